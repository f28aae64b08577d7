"""The training row (`Trace`) and the trajectory of a session, with their JSON forms. Knows no store, no trainer and no harness.

A `Trace` cannot be made wrong: its constructor checks what every reader relies on.

* `ids`, `mask` and `logprobs` have one length; `mask` is true only inside trained spans; `logprobs` is finite, and 0 where `mask` is false.
* `spans` are in order, do not overlap and lie inside the row; each is the run of ids that one completion sampled.
* Concatenated, `prompt_ids` and `response_ids` are `ids`: the prompt ends where the first sampled run starts.

The JSON form is the reference system's `Trace`: `prompt_ids`, `response_ids`, `loss_mask`, `response_logprobs`, `prompt_messages`,
`response_messages`, `tools`, `finish_reason`, `reward`, `metadata`, the lists of one response being of one length. What that form has no
field for stands in `metadata`, under the names of `_METADATA`. Messages and tools are in the OpenAI Chat Completions form; signatures and
references, which mean nothing outside their session, are left out (`polar.trajectory.conversation.plain`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polar.chat import JsonObject, Message, Tool
from polar.records import Floats, Ids
from polar.trajectory.conversation import message_from_chat, message_to_chat, tool_from_chat
from polar.trajectory.drift import DriftLine
from polar.trajectory.ledger import Ledger, Line
from polar.trajectory.text import dumps, loads

Mask = NDArray[np.bool_]
TrajectoryStatus = Literal["COMPLETED", "TIMEOUT", "ERROR"]

_METADATA = ("session_id", "rollout_id", "group_id", "role", "tags", "spans", "faithful", "cut")


@dataclass(frozen=True, slots=True)
class Span:
    """The ids `start..end` of a row, sampled by one completion.

    `trained` is whether this is the row that trains them: a turn that several rows share is trained in one of them only, and a run that
    the ledger holds stands in rows as context. Inside a trained span the mask may still be false for single tokens without a
    log-probability. `message` is the index, in the row's messages, of the answer that the run decodes to; `None` where it is not known.
    """

    completion: int
    start: int
    end: int
    trained: bool = True
    policy_version: str | None = None
    sampling: JsonObject = field(default_factory=dict)
    """As used by the engine."""
    finish: str = "stop"
    message: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One training row. `ids`: int32[n], `mask`: bool[n], `logprobs`: float32[n]. Raises `ValueError` if they contradict each other.

    `faithful`: every trained token follows exactly the ids that the engine saw before it (law 2). `cut` names why the row ends before its
    conversation did (`over_length`). `reward` is `None` until an outcome reached the row; a row without one is not trained.
    """

    session: str
    ids: Ids
    mask: Mask
    logprobs: Floats
    spans: tuple[Span, ...]
    finish: str = "stop"
    role: str = "main"
    tags: frozenset[str] = frozenset()
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    reward: float | None = None
    group_id: str | None = None
    rollout_id: str = ""
    faithful: bool = True
    cut: str | None = None
    metadata: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in (("ids", np.int32), ("mask", np.bool_), ("logprobs", np.float32)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"a row's {name} must be {np.dtype(dtype).name}[n], not {getattr(array, 'dtype', type(array).__name__)}")
            if len(array) != len(self.ids):
                raise ValueError(f"a row has {len(self.ids)} ids and {len(array)} entries of {name}")
        allowed = np.zeros(len(self.ids), np.bool_)
        end = 0
        for span in self.spans:
            if not end <= span.start <= span.end <= len(self.ids):
                raise ValueError(f"the span {span.start}..{span.end} overlaps the one before it or leaves the row of {len(self.ids)} ids")
            allowed[span.start : span.end] = span.trained
            end = span.end
        if (self.mask & ~allowed).any():
            place = int((self.mask & ~allowed).argmax())
            raise ValueError(f"the id at {place} is trained, but no trained span of the row holds it")
        if not np.isfinite(self.logprobs).all():
            raise ValueError(f"the log-probability at {int((~np.isfinite(self.logprobs)).argmax())} is not finite")
        if (self.logprobs[~self.mask] != 0).any():
            raise ValueError("a row has log-probabilities where nothing is trained; they must be 0 there")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"the reward {self.reward} is not finite")

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @property
    def trained(self) -> int:
        """The number of trained tokens."""
        return int(np.count_nonzero(self.mask))

    @property
    def prompt_length(self) -> int:
        """The number of ids before the first sampled one."""
        return self.spans[0].start if self.spans else len(self.ids)

    @property
    def prompt_ids(self) -> Ids:
        return self.ids[: self.prompt_length]

    @property
    def response_ids(self) -> Ids:
        return self.ids[self.prompt_length :]

    @property
    def truncated(self) -> bool:
        """Whether any of its turns ended for length."""
        return any(span.finish == "length" for span in self.spans)

    @property
    def has_images(self) -> bool:
        """Whether its ids stand for images, too: without them they mean nothing."""
        return any(message.images for message in self.messages)

    @property
    def completions(self) -> tuple[int, ...]:
        """The numbers of the completions whose sampled runs it holds, trained or not."""
        return tuple(span.completion for span in self.spans)

    @property
    def policy_versions(self) -> tuple[str, ...]:
        """Those of its trained spans, each once, in order of appearance."""
        return tuple(dict.fromkeys(span.policy_version for span in self.spans if span.trained and span.policy_version is not None))

    @property
    def trained_messages(self) -> tuple[bool, ...]:
        """For each message, whether it is the answer of a span that this row trains: the mask of SFT data."""
        trained = {span.message for span in self.spans if span.trained}
        return tuple(index in trained for index in range(len(self.messages)))

    def with_reward(self, reward: float | None) -> Trace:
        return replace(self, reward=reward)

    # --- JSON ---

    def to_json(self) -> JsonObject:
        """The reference's `Trace` as plain lists and objects. float32 goes out as the shortest decimal that reads back to the same bits."""
        parsed: JsonObject = loads(self.dumps())
        return parsed

    def dumps(self) -> bytes:
        """`to_json` as one line of JSON text, without its newline."""
        return dumps(self._arrays())

    def _arrays(self) -> JsonObject:
        start = self.prompt_length
        first = min((span.message for span in self.spans if span.message is not None), default=max(len(self.messages) - 1, 0))
        return {
            "prompt_ids": self.ids[:start],
            "response_ids": self.ids[start:],
            "loss_mask": self.mask[start:].view(np.uint8),
            "response_logprobs": self.logprobs[start:],
            "prompt_messages": [message_to_chat(message) for message in self.messages[:first]],
            "response_messages": [message_to_chat(message) for message in self.messages[first:]],
            "tools": [tool.schema() for tool in self.tools] or None,
            "finish_reason": self.finish,
            "reward": self.reward,
            "metadata": {
                **self.metadata,
                "session_id": self.session,
                "rollout_id": self.rollout_id,
                "group_id": self.group_id,
                "role": self.role,
                "tags": sorted(self.tags),
                "spans": [asdict(span) for span in self.spans],
                "faithful": self.faithful,
                "cut": self.cut,
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """The row of `to_json`, or any row in the reference's form: without `spans`, each run of the mask becomes a span; log-probabilities
        where nothing is trained are read as 0.

        Raises `ValueError` or `KeyError` for what is not a row; `polar.trajectory.validate` says more about it.
        """
        prompt, response = list(data["prompt_ids"]), list(data["response_ids"])
        extra = dict(data.get("metadata") or {})
        known = {name: extra.pop(name) for name in _METADATA if name in extra}
        padding = [0] * len(prompt)
        logprobs = data.get("response_logprobs")
        if logprobs is None:
            raise ValueError("the row has no response_logprobs")
        mask = _array([*padding, *data["loss_mask"]], np.uint8, "loss_mask")
        if (mask > 1).any():
            raise ValueError("loss_mask holds values other than 0 and 1")
        values = np.array([*padding, *logprobs], np.float32)
        if len(values) == len(mask):
            values[mask == 0] = 0
        finish = data.get("finish_reason") or "stop"
        spans = known.get("spans")
        return cls(
            session=known.get("session_id") or "",
            ids=_array([*prompt, *response], np.int32, "ids"),
            mask=mask.astype(np.bool_),
            logprobs=values,
            spans=_runs(mask, finish) if spans is None else tuple(Span(**span) for span in spans),
            finish=finish,
            role=known.get("role") or "main",
            tags=frozenset(known.get("tags") or ()),
            messages=tuple(message_from_chat(m) for m in [*(data.get("prompt_messages") or ()), *(data.get("response_messages") or ())]),
            tools=tuple(tool_from_chat(tool) for tool in data.get("tools") or ()),
            reward=data.get("reward"),
            group_id=known.get("group_id"),
            rollout_id=known.get("rollout_id", known.get("session_id") or "") or "",
            faithful=known.get("faithful", True),
            cut=known.get("cut"),
            metadata=extra,
        )

    @classmethod
    def loads(cls, line: bytes | str) -> Trace:
        return cls.from_json(loads(line))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All rows of a session, with the ledger of what no row trains and the report of where its prompts broke.

    `sampled` counts every token that the session sampled: `sum(row.trained) + ledger.tokens == sampled` (law 3), which the builders
    check. `metadata` is the session's own, and `builder` says what made the rows and how.
    """

    session: str
    traces: tuple[Trace, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    drift: tuple[DriftLine, ...] = ()
    sampled: int = 0
    status: TrajectoryStatus = "COMPLETED"
    error: str | None = None
    warnings: tuple[str, ...] = ()
    builder: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)

    @property
    def in_rows(self) -> int:
        """The number of trained tokens over all rows."""
        return sum(trace.trained for trace in self.traces)

    @property
    def roots(self) -> int:
        """Conversations that extend nothing before them: without cuts and exclusions, `len(traces) == roots + len(drift)`."""
        return int(self.builder.get("roots", 0))

    def with_traces(self, traces: Iterable[Trace]) -> Trajectory:
        return replace(self, traces=tuple(traces))

    def to_json(self) -> JsonObject:
        """The reference's `Trajectory`: `status`, `traces`, `error`, `metadata`, the latter with what that form has no field for."""
        parsed: JsonObject = loads(self.dumps())
        return parsed

    def dumps(self) -> bytes:
        """`to_json` as one line of JSON text, without its newline."""
        return dumps(
            {
                "status": self.status,
                "error": self.error,
                "metadata": {
                    **self.metadata,
                    "session_id": self.session,
                    "builder": self.builder,
                    "sampled_tokens": self.sampled,
                    "ledger": [asdict(line) for line in self.ledger],
                    "drift": [asdict(line) for line in self.drift],
                    "warnings": list(self.warnings),
                },
                "traces": [trace._arrays() for trace in self.traces],
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trajectory:
        """The inverse of `to_json`. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for what is not a trajectory."""
        extra = dict(data.get("metadata") or {})
        return cls(
            session=extra.pop("session_id", ""),
            traces=tuple(Trace.from_json(trace) for trace in data["traces"]),
            ledger=Ledger(tuple(Line(**line) for line in extra.pop("ledger", ()))),
            drift=tuple(DriftLine(**line) for line in extra.pop("drift", ())),
            sampled=int(extra.pop("sampled_tokens", 0)),
            status=data["status"],
            error=data.get("error"),
            warnings=tuple(extra.pop("warnings", ())),
            builder=extra.pop("builder", {}),
            metadata=extra,
        )

    @classmethod
    def loads(cls, line: bytes | str) -> Trajectory:
        return cls.from_json(loads(line))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)


def _array(values: list[Any], dtype: type[np.generic], name: str) -> NDArray[Any]:
    if any(type(value) is not int for value in values):
        raise ValueError(f"{name} holds values that are not integers")
    try:
        return np.array(values, dtype)
    except OverflowError:
        raise ValueError(f"{name} holds values that {np.dtype(dtype).name} cannot") from None


def _runs(mask: NDArray[np.uint8], finish: str) -> tuple[Span, ...]:
    """The runs of ones, as spans of completions numbered from 0."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=np.int8(0), append=np.int8(0)))
    return tuple(
        Span(number, int(start), int(end), finish=finish) for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    )
