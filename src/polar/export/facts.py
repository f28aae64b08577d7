"""What is known of a session from outside its completions: its task, its group, its reward. Knows no store and no file layout.

The facts stand in a session's `metadata` and, above it, in a labels file: one JSON object a line with a `session_id` and any of the same
keys. `docs/data.md` is the page for people. A fact of the wrong type is refused by name: a reward is never guessed, and none is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.records import Session, SessionKind

Outcome = Literal["graded", "failed_by_policy", "failed_by_infrastructure"]
TEXTS = ("task", "repository", "source", "group_id", "rollout_id", "harness", "split")
KEYS = ("reward", "outcome", "row_rewards", *TEXTS)


@dataclass(frozen=True, slots=True)
class Facts:
    """One session's facts; `None` for what nobody said.

    `reward` is the outcome's number, `row_rewards` one number a row (or `None`) where an evaluator graded rows. `outcome` is one of the
    three of law 5; a session that failed by infrastructure has no reward. `task` names the task (`task_id`, where only that is there),
    `repository` where it comes from, `source` the set that both belong to (for the acceptance table; default: the repository, else the
    task). `group_id` joins the samples of one task at one policy version, `rollout_id` the sessions of one sample (default: the session
    itself). `split` is the task set's own.
    """

    session: str
    created: float = 0.0
    kind: SessionKind = "train"
    closed: bool = True
    reward: float | None = None
    outcome: Outcome | None = None
    row_rewards: tuple[float | None, ...] | None = None
    task: str | None = None
    repository: str | None = None
    source: str | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    harness: str | None = None
    split: str | None = None

    @property
    def group(self) -> str | None:
        """What best-of-n compares: the group, else the task."""
        return self.group_id or self.task

    @property
    def origin(self) -> str:
        """The line of the acceptance table that it counts in."""
        return self.source or self.repository or self.task or "unknown"


def facts_of(session: Session, label: Mapping[str, Any] | None = None) -> Facts:
    """The facts of a session's metadata, with those of a labels file over them. Raises `ConfigError` for one of the wrong type."""
    values = {name: session.metadata[name] for name in KEYS if name in session.metadata} | {
        name: value for name, value in (label or {}).items() if name in KEYS
    }
    if values.get("task") is None and isinstance(session.metadata.get("task_id"), str):
        values["task"] = session.metadata["task_id"]
    try:
        return Facts(session.id, session.created, session.kind, session.closed is not None, **_checked(values))
    except ValueError as error:
        raise ConfigError(f"session {session.id}: {error}") from error


def read_labels(path: Path) -> Iterator[tuple[str, JsonObject]]:
    """The lines of a labels file, one session at a time. Raises `ConfigError` for a line that is none, with its number."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"the labels {path} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _label(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def label_line(session_id: str, **facts: Any) -> bytes:
    """A line of a labels file, with its newline. Raises `ValueError` for a fact of the wrong type."""
    _checked(facts)
    return orjson.dumps({"session_id": session_id, **facts}) + b"\n"


def _label(line: bytes) -> tuple[str, JsonObject]:
    data = orjson.loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("session_id"), str):
        raise ValueError('a line is a JSON object with a "session_id" and facts such as "reward"')
    unknown = sorted(set(data) - {"session_id", *KEYS})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no fact of a session; there are: {', '.join(KEYS)}")
    facts = {name: value for name, value in data.items() if name != "session_id"}
    _checked(facts)
    return data["session_id"], facts


def _checked(values: Mapping[str, Any]) -> JsonObject:
    checked: JsonObject = {}
    for name, value in values.items():
        if value is None:
            checked[name] = None
        elif name == "reward":
            checked[name] = _number(value, "reward")
        elif name == "row_rewards":
            if not isinstance(value, list | tuple):
                raise ValueError("row_rewards must be a list, one number or null a row")
            checked[name] = tuple(None if item is None else _number(item, "row_rewards") for item in value)
        elif name == "outcome":
            if value not in get_args(Outcome):
                raise ValueError(f"outcome must be one of {', '.join(get_args(Outcome))}, not {value!r}")
            checked[name] = value
        elif name in TEXTS:
            if not isinstance(value, str):
                raise ValueError(f"{name} must be text, not {value!r}")
            if any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(f"{name} holds half of a surrogate pair: {value!r}")
            checked[name] = value or None
        else:
            raise ValueError(f"{name} is no fact of a session; there are: {', '.join(KEYS)}")
    if checked.get("outcome") == "failed_by_infrastructure" and checked.get("reward") is not None:
        raise ValueError("it failed by infrastructure and has a reward; such a session has none")
    return checked


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return float(value)
