"""What the fuzzer must know of a provider's protocol: how to say a conversation in it, and what an answer and an error look like."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from fuzz_json import Json, clone
from fuzz_talk import Talk

from polar.testing.asgi import Answer


@dataclass
class Shot:
    """One request. `raw` goes out in place of `body` where it is set."""

    url: str
    body: Json
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None

    def copy(self) -> Shot:
        return Shot(self.url, clone(self.body), self.method, dict(self.headers), self.raw)


class Wire(ABC):
    name: ClassVar[str]

    @abstractmethod
    def headers(self, key: str) -> dict[str, str]:
        """As this provider's clients send them."""

    @abstractmethod
    def shot(self, talk: Talk, rng: random.Random) -> Shot:
        """A request that the provider would take."""

    @abstractmethod
    def respell(self, shot: Shot, rng: random.Random) -> None:
        """Changes how something is said, and nothing of what is said."""

    @abstractmethod
    def noise(self, shot: Shot, rng: random.Random) -> None:
        """What harnesses do to an answer of ours before they send it back, as the last answer of `shot`: no bridge may break on it."""

    @abstractmethod
    def whole(self, answer: Answer) -> Json:
        """The finished answer in its unstreamed form, put together from the events where it was streamed; fails on anything malformed."""

    @abstractmethod
    def number_text(self, whole: Json) -> str:
        """The id that names the completion."""

    @abstractmethod
    def grow(self, shot: Shot, whole: Json, talk: Talk, rng: random.Random) -> Shot:
        """The next turn's request: the same, plus the answer, plus what came after it."""

    @abstractmethod
    def check_error(self, status: int, body: Json) -> None:
        """Fails unless this is the provider's own shape."""

    @abstractmethod
    def wrong_paths(self) -> tuple[str, ...]: ...

    @abstractmethod
    def count(self, shot: Shot) -> tuple[Shot, Callable[[Json], int]] | None:
        """The token count of the same request, and where its answer has the number."""

    def lookups(self, answer_id: str) -> tuple[tuple[str, str], ...]:
        """Requests by the id of an answer, (method, url)."""
        return ()


def swap(place: dict[str, Any], old: str, new: str) -> None:
    """Renames a key in place, its position kept."""
    items = [(new if key == old else key, value) for key, value in place.items()]
    place.clear()
    place.update(items)


def respaced(text: str, rng: random.Random) -> str:
    """A JSON text as another writer would have put it."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return orjson.dumps(value, option=rng.choice([0, orjson.OPT_INDENT_2, orjson.OPT_SORT_KEYS])).decode()
