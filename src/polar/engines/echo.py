"""The prompt ids that a server sends back with each chat answer, read in proportion to what is new in them.

A conversation's next prompt repeats the one before to the last id, and so does its JSON text: what is byte for byte the text that was read
last is not parsed again. Where the answer has another form, it is parsed as any other. Knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import orjson

from polar.engines.arrays import ids_array
from polar.engines.base import Ids
from polar.store.cache import Cache

FIELD = "prompt_token_ids"
_NAME = b'"prompt_token_ids"'
"""As a key. Inside a JSON string there would be a backslash before either quote."""
_OPENING = re.compile(rb"\s*:\s*\[")
_SHORT = 4096
"""Bytes of a list that is not worth the trouble."""


class EchoedPrompts:
    """Remembers the latest list of each conversation, `capacity` bytes in all; the least recently used goes first."""

    def __init__(self, capacity: int = 32 << 20) -> None:
        self._latest: Cache[Hashable, tuple[bytes, Ids]] = Cache(capacity)

    def read(self, raw: bytes, conversation: Hashable, loads: Callable[[bytes], Any]) -> Any:
        """What `loads(raw)` gives, but for a top-level list of prompt ids: that is an int32[n] array then.

        `conversation` says whose prompt this is; a wrong one costs a parse, never another result. Raises what `loads` raises.
        """
        name = raw.find(_NAME)
        opening = None if name < 0 else _OPENING.match(raw, name + len(_NAME))
        end = -1 if opening is None else raw.find(b"]", opening.end())
        if opening is None or end - opening.end() < _SHORT or raw.find(_NAME, end) >= 0:
            return loads(raw)
        text = raw[opening.end() : end]
        ids = self._ids(text, conversation)
        if ids is None:
            return loads(raw)
        answer = loads(raw[: opening.end() - 1] + b"null" + raw[end + 1 :])
        if not isinstance(answer, dict) or answer.get(FIELD, raw) is not None:
            return loads(raw)  # it stands deeper inside
        answer[FIELD] = ids
        self._latest.put(conversation, (text, ids), len(text) + ids.nbytes)
        return answer

    def _ids(self, text: bytes, conversation: Hashable) -> Ids | None:
        """int32[n] of a list's text without its brackets; `None` where it is no list of ids."""
        known = self._latest.get(conversation)
        try:
            if known is not None and text.startswith(known[0]):
                rest = text[len(known[0]) :].lstrip()
                if not rest:
                    return known[1]
                if rest.startswith(b","):
                    more = ids_array(orjson.loads(b"[" + rest[1:] + b"]"))
                    return None if more is None else np.concatenate([known[1], more])
            return ids_array(orjson.loads(b"[" + text + b"]"))
        except orjson.JSONDecodeError:
            return None
