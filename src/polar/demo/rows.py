"""From a session's completions to training rows by the prefix walk of law 2, with a ledger of what no row holds (law 3). Pure.

Completion *k* joins a row only if its prompt starts with exactly the ids of that row; otherwise it starts a row of its own. Every
sampled token stands in one row or in the ledger under a named reason: `in_rows + ledgered == sampled`, checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from polar.harness import Tag
from polar.records import Completion, Floats, Ids

TRAINED_ROLES = ("main", "sub_agent")


@dataclass(slots=True)
class Row:
    """A token stream. `ids`: int32[n]; `mask`: bool[n], true where sampled; `logprobs`: float32[n], NaN where not sampled."""

    ids: Ids
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
    logprobs: Floats
    completions: list[int]

    @property
    def trained(self) -> int:
        return int(self.mask.sum())


@dataclass(slots=True)
class Walk:
    """What became of a session. `ledger` maps a reason to the number of sampled tokens that are not trained because of it."""

    rows: list[Row] = field(default_factory=list)
    ledger: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    prompt: int = 0
    """Prompt tokens over all calls, each counted as often as it was sent."""

    @property
    def in_rows(self) -> int:
        return sum(row.trained for row in self.rows)

    @property
    def ledgered(self) -> int:
        return sum(self.ledger.values())


def refused(completion: Completion, tag: Tag) -> str | None:
    """Why nothing of a completion is trained; `None` if all of it is."""
    if completion.status == "aborted":
        return "aborted"
    if completion.untrainable is not None:
        return completion.untrainable
    if tag.role not in TRAINED_ROLES:
        return f"{tag.role} ({tag.rule})"
    if "constrained" in completion.tags:
        return "constrained sampling"
    if completion.prompt_ids is None or completion.sampled_ids is None or completion.logprobs is None:
        return "ids or log-probabilities are missing"
    if np.isnan(completion.logprobs).any():
        return "missing log-probability"
    return None


def walk(completions: Iterable[Completion], tag: Callable[[Completion], Tag]) -> Walk:
    """Rows and ledger of one session's completions, in order of number."""
    found = Walk()
    for completion in completions:
        sampled = 0 if completion.sampled_ids is None else len(completion.sampled_ids)
        found.sampled += sampled
        found.prompt += 0 if completion.prompt_ids is None else len(completion.prompt_ids)
        reason = refused(completion, tag(completion))
        if reason is not None:
            if sampled:
                found.ledger[reason] = found.ledger.get(reason, 0) + sampled
            continue
        row = next((row for row in reversed(found.rows) if _extends(completion, row)), None)
        if row is None:
            row = Row(np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.float32), [])
            found.rows.append(row)
        _append(row, completion)
    if found.in_rows + found.ledgered != found.sampled:
        raise AssertionError(f"{found.sampled} tokens were sampled, {found.in_rows} are in rows and {found.ledgered} in the ledger")
    return found


def _extends(completion: Completion, row: Row) -> bool:
    prompt = completion.prompt_ids
    return prompt is not None and len(prompt) >= len(row.ids) and np.array_equal(prompt[: len(row.ids)], row.ids)


def _append(row: Row, completion: Completion) -> None:
    prompt, sampled, logprobs = completion.prompt_ids, completion.sampled_ids, completion.logprobs
    if prompt is None or sampled is None or logprobs is None:
        raise ValueError(f"completion {completion.number} has no ids or no log-probabilities")
    fresh = prompt[len(row.ids) :]
    row.ids = np.concatenate([row.ids, fresh, sampled])
    row.mask = np.concatenate([row.mask, np.zeros(len(fresh), np.bool_), np.ones(len(sampled), np.bool_)])
    row.logprobs = np.concatenate([row.logprobs, np.full(len(fresh), np.nan, np.float32), logprobs])
    row.completions.append(completion.number)
