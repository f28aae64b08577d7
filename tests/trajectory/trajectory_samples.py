"""Completions for the trajectory tests: by hand (`call`), and arbitrary sessions (`sessions`, hypothesis)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from polar.chat import Message, Tool
from polar.harness import Tag
from polar.records import Break, Cause, Completion, Ids, Session
from polar.trajectory import Forest, Options, PrefixMerging, Recipe, Span, Trace, Trajectory

SESSION = Session("s", b"", b"", metadata={"task_id": "t"})
MAIN = Recipe("test", lambda _: Tag("main", "test"))
TOOLS = (Tool("run", ""),)
EVERYTHING = Options(
    trained=("main", "sub_agent", "compaction", "title", "router", "probe"), constrained=True, greedy=True, abandoned_retries=True
)
"""Nothing is left out that could be trained."""


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def call(number: int, prompt: list[int] | None, sampled: list[int] | None, logprobs: list[float] | None = None, **more: Any) -> Completion:
    """A completion with tools, delivered, with log-probabilities of -0.5 unless others are given."""
    if logprobs is None and sampled is not None:
        logprobs = [-0.5] * len(sampled)
    fields: dict[str, Any] = {
        "session": "s",
        "number": number,
        "status": "complete",
        "dialect": "openai_chat",
        "mode": "tokens",
        "messages": (Message("user", "question"),),
        "answer": Message("assistant", f"answer {number}"),
        "finish": "stop",
        "tools": TOOLS,
        "delivered": True,
        "prompt_ids": None if prompt is None else np.array(prompt, np.int32),
        "sampled_ids": None if sampled is None else np.array(sampled, np.int32),
        "logprobs": None if logprobs is None else np.array(logprobs, np.float32),
    }
    return Completion(**{**fields, **more})


def merge(*completions: Completion, recipe: Recipe = MAIN, session: Session = SESSION, **options: Any) -> Trajectory:
    """`prefix_merging` of these completions."""
    return PrefixMerging(Options(**options)).build(Forest("s", completions), session, recipe)


def streams(trajectory: Trajectory) -> list[list[int]]:
    return [trace.ids.tolist() for trace in trajectory.traces]


def trained(trajectory: Trajectory) -> list[list[int]]:
    """For each row, the ids with mask 1."""
    return [trace.ids[trace.mask].tolist() for trace in trajectory.traces]


def masks(trajectory: Trajectory) -> list[list[int]]:
    return [trace.mask.astype(int).tolist() for trace in trajectory.traces]


def row(**change: Any) -> Trace:
    """`[1, 2 | 3, 4, 5]` with 3 and 5 sampled by completions 0 and 1."""
    values: dict[str, Any] = {
        "session": "s",
        "ids": ids(1, 2, 3, 4, 5),
        "mask": np.array([0, 0, 1, 0, 1], np.bool_),
        "logprobs": np.array([0, 0, -0.1, 0, -0.3], np.float32),
        "spans": (Span(0, 2, 3, message=1), Span(1, 4, 5, message=3)),
        "messages": (Message("user", "q"), Message("assistant", "a"), Message("user", "r"), Message("assistant", "b")),
        "rollout_id": "s",
    }
    return Trace(**{**values, **change})


# --- arbitrary sessions ------------------------------------------------------------------------------------------------

tokens = st.integers(0, 3)
"""So few that streams meet by accident."""
runs = st.lists(tokens, max_size=4)
roles = st.sampled_from(["main", "main", "main", "sub_agent", "compaction", "title", "router", "probe"])


@dataclass
class Drawn:
    """A session's completions in order of number. Roles stand in `hints`."""

    completions: list[Completion] = field(default_factory=list)

    def stream(self, number: int) -> list[int]:
        one = self.completions[number]
        prompt = [] if one.prompt_ids is None else one.prompt_ids.tolist()
        return prompt + ([] if one.sampled_ids is None else one.sampled_ids.tolist())


def by_hint(completion: Completion) -> Tag:
    return Tag(completion.hints.get("role", "main"), "drawn")


DRAWN = Recipe("drawn", by_hint)


@st.composite
def sessions(draw: st.DrawFn, clean: bool = False) -> list[Completion]:
    """What a harness may do to its conversations: new ones, turns, forks, edits, retries, truncation, interleaved; what may be missing:
    ids, log-probabilities, everything. `clean`: nothing is missing and everything can be trained."""
    made = Drawn()
    for number in range(draw(st.integers(0, 9))):
        made.completions.append(_damaged(draw, _next(draw, made, number), clean))
    return made.completions


def _next(draw: st.DrawFn, made: Drawn, number: int) -> Completion:
    ways = ["root"] if not number else ["root", "turn", "turn", "turn", "latest", "latest", "latest", "edit", "retry", "cut", "twin"]
    way = draw(st.sampled_from(ways))
    before = number - 1 if way == "latest" else draw(st.integers(0, max(number - 1, 0)))
    stream = made.stream(before) if number else []
    parent: int | None = before
    sampled = draw(runs if way == "twin" else st.lists(tokens, min_size=1, max_size=4))
    if way in ("turn", "latest"):
        prompt = stream + draw(runs)
    elif way == "edit":
        place = draw(st.integers(0, max(len(stream) - 1, 0)))
        prompt = [*stream[:place], draw(tokens), *stream[place + 1 :], *draw(runs)]
    elif way == "retry":
        known = made.completions[before]
        prompt, parent = [] if known.prompt_ids is None else known.prompt_ids.tolist(), known.parent
    elif way == "cut":
        prompt = stream[: draw(st.integers(0, len(stream)))] + draw(runs)
    elif way == "twin":  # the same stream, divided otherwise between prompt and answer
        place = draw(st.integers(0, len(stream)))
        prompt, sampled = stream[:place], stream[place:]
    else:
        prompt, parent = draw(runs), None
    return call(
        number,
        prompt or [draw(tokens)],
        sampled,
        draw(st.lists(st.floats(-8, 0, width=32), min_size=len(sampled), max_size=len(sampled))),
        parent=draw(st.sampled_from([parent, parent, parent, None, draw(st.integers(0, number - 1)) if number else None])),
        finish=draw(st.sampled_from(["stop", "length", "tool_calls"])),
        delivered=draw(st.booleans()),
        policy_version=draw(st.sampled_from([None, "1", "2"])),
        ended=float(number),
    )


def _damaged(draw: st.DrawFn, one: Completion, clean: bool) -> Completion:
    if one.parent is not None and draw(st.integers(0, 4)) == 0:
        one = replace(one, broken=Break(draw(st.sampled_from(list(Cause))), one.parent, 0, 1, "drawn"))
    if clean:
        return one
    assert one.logprobs is not None
    fault = draw(st.sampled_from([None] * 10 + ["prompt", "empty prompt", "sampled", "empty", "logprobs", "short", "nan", "all nan"]))
    if fault == "prompt":
        one = replace(one, prompt_ids=None)
    elif fault == "empty prompt":
        one = replace(one, prompt_ids=ids())
    elif fault == "sampled":
        one = replace(one, sampled_ids=None, logprobs=None)
    elif fault == "empty":
        one = replace(one, sampled_ids=ids(), logprobs=np.empty(0, np.float32))
    elif fault == "logprobs":
        one = replace(one, logprobs=None)
    elif fault == "short":
        one = replace(one, logprobs=one.logprobs[1:])
    elif fault in ("nan", "all nan"):
        hole = np.array([fault == "all nan" or draw(st.booleans()) for _ in one.logprobs], np.bool_)
        one = replace(one, logprobs=np.where(hole, np.float32("nan"), one.logprobs))
    return replace(
        one,
        status=draw(st.sampled_from(["complete"] * 6 + ["aborted"])),
        untrainable=draw(st.sampled_from([None] * 6 + ["engine was not checked"])),
        tags=frozenset(draw(st.sets(st.sampled_from(["greedy", "constrained", "tool_call_malformed", "clamped"]), max_size=1))),
        choice=draw(st.sampled_from([0, 0, 0, 1])),
        hints={"role": draw(roles)},
    )


options = st.builds(
    Options,
    trained=st.sampled_from([("main", "sub_agent"), ("main",), EVERYTHING.trained, ()]),
    max_length=st.sampled_from([None, None, 3, 6, 10]),
    cut=st.sampled_from(["turn", "token"]),
    trunk=st.sampled_from(["longest", "first", "latest"]),
    constrained=st.booleans(),
    greedy=st.booleans(),
    abandoned_retries=st.booleans(),
    malformed=st.booleans(),
    untrainable=st.booleans(),
)
