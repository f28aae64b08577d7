"""Which sampled tokens are trained, and why the others are not. Knows no rows.

Decides per completion, from its record, its tag, its place in the forest and the options; a builder turns the answer into rows and ledger
lines. Where several reasons hold, the one that says most about the call is named: what became of it, what it was for, what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.harness.base import Role, Tag
from polar.records import Completion
from polar.trajectory.forest import Forest, Node
from polar.trajectory.ledger import Line, Reason
from polar.trajectory.row import Mask

Cut = Literal["turn", "token"]
Trunk = Literal["longest", "first", "latest"]
OnBreak = Literal["new_row", "splice"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a builder makes rows. Raises `ConfigError` for what makes no sense."""

    trained: tuple[str, ...] = ("main", "sub_agent")
    """The roles that are trained; the others go to the ledger under their own names."""
    max_length: int | None = None
    """The longest row, in ids."""
    cut: Cut = "turn"
    """Where a conversation beyond `max_length` ends: after the last answer that fits (`turn`), or exactly there (`token`). Both keep an
    exact causal prefix, name the row's `cut`, and file the rest as `over_length`."""
    trunk: Trunk = "longest"
    """Which of the rows that share a sampled turn trains it: the longest, or the one that ends with the first or the latest turn."""
    on_break: OnBreak = "new_row"
    """`splice` does what the reference system's prefix merging does, for comparison; its rows are not faithful."""
    end_of_turn: int | None = None
    """For `splice` only: the id that ends a turn; `None` takes the last one of the first answer that ended by itself."""
    constrained: bool = False
    """Whether tokens sampled under a grammar or a bias are trained; likewise the next ones."""
    greedy: bool = False
    abandoned_retries: bool = False
    malformed: bool = True
    untrainable: bool = False
    """Whether tokens that the capture called untrainable are trained: for SFT, where the distribution of log-probabilities is no matter."""

    def __post_init__(self) -> None:
        unknown = set(self.trained) - set(get_args(Role))
        if unknown:
            raise ConfigError(f"trained: no role is called {', '.join(sorted(unknown))}; there are: {', '.join(get_args(Role))}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length: {self.max_length} is too short for a row; it counts ids")
        for name, choices in (("cut", Cut), ("trunk", Trunk), ("on_break", OnBreak)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(get_args(choices))}")
        if self.on_break == "splice" and self.max_length is not None:
            raise ConfigError("max_length: the reference system's merging, on_break=splice, knows no row length")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Options:
        """Options from a task's or a command's settings. Raises `ConfigError` for an unknown name."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ConfigError(f"a builder has no option {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        values = dict(config)
        if "trained" in values:
            values["trained"] = tuple(values["trained"])
        return cls(**values)

    def to_json(self) -> JsonObject:
        """What `of` takes."""
        return {**asdict(self), "trained": list(self.trained)}


DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing of a completion is trained."""

    reason: Reason
    rule: str


@dataclass(slots=True)
class Selection:
    """What is trained of a session.

    `wanted` holds the usable tokens of every completion that is trained: bool[n], true where the log-probability is there, cut at
    `max_length`. `refused` says of every other completion with sampled ids why it is not. `lines` is the ledger of both, in order.
    """

    tags: dict[int, Tag]
    wanted: dict[int, Mask]
    refused: dict[int, Refusal]
    lines: list[Line]


def select(forest: Forest, tag: Callable[[Completion], Tag], options: Options = DEFAULTS) -> Selection:
    records = {record.number: record for record in forest.records()}
    tags = {number: tag(record) for number, record in records.items()}
    retries = {} if options.abandoned_retries else abandoned_retries(forest)
    found = Selection(tags, {}, {}, [])
    for number, count in sorted(forest.sampled().items()):
        node = forest.nodes.get(number)
        refusal = refuse(records[number], tags[number], options, retries.get(number))
        if refusal is None and node is None:
            refusal = Refusal(Reason.MISSING_IDS, records[number].untrainable or "no prompt ids were recorded")
        if refusal is None and node is not None:
            refusal = _measure(node, options, found)
        if refusal is not None:
            found.refused[number] = refusal
            found.lines.append(Line(number, 0, count, refusal.reason, refusal.rule))
    return found


def refuse(record: Completion, tag: Tag, options: Options, retried: int | None = None) -> Refusal | None:
    """Why nothing of a completion is trained, as far as its record tells. `retried` is the call that took an abandoned one's place."""
    if record.status == "aborted":
        return Refusal(Reason.ABORTED, record.untrainable or "aborted")
    if tag.role not in options.trained:
        return Refusal(Reason(tag.role), tag.rule)
    if retried is not None:
        return Refusal(Reason.ABANDONED_RETRY, f"completion {retried} has the same prompt, and nothing goes on from this one")
    if record.logprobs is None or record.sampled_ids is None or len(record.logprobs) != len(record.sampled_ids):
        return Refusal(Reason.MISSING_LOGPROB, record.untrainable or "no log-probabilities that line up with the sampled ids")
    if record.untrainable is not None and not options.untrainable:
        return Refusal(Reason.UNTRAINABLE, record.untrainable)
    for name, allowed in (("constrained", options.constrained), ("greedy", options.greedy), ("malformed", options.malformed)):
        fact = "tool_call_malformed" if name == "malformed" else name
        if not allowed and fact in record.tags:
            return Refusal(Reason(name), f"tagged {fact} at capture")
    return None


def abandoned_retries(forest: Forest) -> dict[int, int]:
    """Answers that a retry replaced, each with the call that took its place.

    Of several tries of one call those are abandoned from which nothing goes on and which their client did not take, as long as another try
    is left: one that something goes on from, a delivered one, or else the last.
    """
    continued = set(forest.parents().values())
    found: dict[int, int] = {}
    for group in tries(forest):
        records = {number: forest.nodes[number].record for number in group}
        kept = [n for n in group if n in continued] or [n for n in group if records[n].delivered]
        kept = kept or [n for n in group if records[n].status == "complete"] or group
        for number in group:
            if number not in continued and not records[number].delivered and number != kept[-1]:
                found[number] = kept[-1]
    return found


def tries(forest: Forest) -> list[list[int]]:
    """Calls with equal prompts, in groups of two and more, each in order. The choices of one request are no tries of each other."""
    choices: dict[int, list[int]] = defaultdict(list)
    for number, node in sorted(forest.nodes.items()):
        choices[node.record.choice].append(number)
    return [group for numbers in choices.values() for group in forest.same_prompt(numbers) if len(group) > 1]


def _measure(node: Node, options: Options, found: Selection) -> Refusal | None:
    """Files a completion's usable tokens under `found.wanted` and the others in the ledger; a refusal if there is none."""
    assert node.logprobs is not None
    limit = options.max_length
    usable = np.isfinite(node.logprobs)
    fits = len(usable)
    if limit is not None and node.end > limit:
        fits = max(0, limit - node.start) if options.cut == "token" else 0
        rule = f"max_length={limit}, cut={options.cut}; the answer ends at {node.end}"
        if not fits:
            return Refusal(Reason.OVER_LENGTH, rule)
    if not usable[:fits].any():
        return Refusal(Reason.MISSING_LOGPROB, "the engine gave no log-probability for any of its tokens")
    for start, end in runs(~usable[:fits]):
        found.lines.append(Line(node.number, start, end, Reason.MISSING_LOGPROB, "the engine gave no log-probability for these tokens"))
    if fits < len(usable):
        found.lines.append(Line(node.number, fits, len(usable), Reason.OVER_LENGTH, rule))
    found.wanted[node.number] = usable[:fits]
    return None


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """`start..end` of the runs of true in `mask`: bool[n]."""
    if not mask.any():
        return []
    edges = np.flatnonzero(np.diff(mask.view(np.int8), prepend=np.int8(0), append=np.int8(0))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
