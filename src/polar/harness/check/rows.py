"""Builds a recorded session's rows with `prefix_merging` and judges them. Pure: no store, no gateway, no process.

What is judged is counted twice: rows, ledger and breaks by the builder; parents, roots and ends here, from the records alone and call by
call. A call's *parent* is the one whose prompt and answer are the longest start of its prompt, id by id; a *root* has neither a parent
nor a predecessor that capture knew; an *end* is a call that is nobody's parent. Every root, and every break (a line of the drift report
with its cause), opens one way through the session, and each way has one end. A row is such a way along trained calls. So, exactly:

    rows + side == roots + breaks

where `side` counts the ends that only untrained calls lead to. (The last call of a row may be asked for a title or a summary; where
nothing trained goes on from it, that is the row's own end and counts once, as the row's.) In mode `messages`, where the engine renders
every prompt anew, nearly every trained call is a row. In mode `tokens` the main conversation is one row up to a compaction and one
after it, and a sub-agent is one; where a CLI edits its own history (`Plan.edits`), each edit makes one row more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polar.harness.base import Harness
from polar.harness.check.plan import Plan
from polar.harness.check.verify import extends
from polar.records import Cause, Completion, Ids, Mode, Session
from polar.trajectory import Forest, LawBroken, Line, Options, PrefixMerging, Trace, Trajectory
from polar.trajectory.drift import FIXES
from polar.trajectory.tags import of

SIDE_ROLES = frozenset({"compaction", "title", "router", "probe"})

Parents = Mapping[int, int | None]


@dataclass(slots=True)
class Built:
    """The rows of one session. `rows` counts them by role, `untrained` the calls of the ledger by reason and `rules` by reason and rule,
    `breaks` the lines of the drift report by cause; `roots` and `side` are those of the identity above. `sampled == in_rows + in_ledger`,
    in tokens."""

    rows: Counter[str] = field(default_factory=Counter)
    untrained: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    side: int = 0
    roots: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    sampled: int = 0
    in_rows: int = 0
    in_ledger: int = 0
    problems: list[str] = field(default_factory=list)


def judge_rows(completions: Sequence[Completion], harness: Harness, plan: Plan, mode: Mode, bridging: bool) -> Built:
    """The rows of one session's records and everything that is wrong with them.

    The scripted engine's captures are marked untrainable (no check of its log-probabilities took place); they are built all the same.
    """
    session = Session(completions[0].session if completions else "", b"", b"")
    try:
        made = PrefixMerging(Options(untrainable=True)).build(Forest(session.id, completions), session, of(harness))
    except LawBroken as error:
        return Built(problems=[f"the rows break a law: {error}"])
    return judge_trajectory(made, completions, harness, plan, mode, bridging)


def judge_trajectory(
    made: Trajectory, completions: Sequence[Completion], harness: Harness, plan: Plan, mode: Mode, bridging: bool
) -> Built:
    """Likewise for rows that are there already."""
    built = Built(sampled=sum(len(item.sampled_ids) for item in completions if item.sampled_ids is not None))
    _fill(built, made)
    ordered = sorted(completions, key=lambda item: item.number)
    _check_conservation(built, made)
    _check_contexts(built, made.traces, {item.number: item for item in ordered})
    _check_ledger(built, made.ledger.lines, {item.number: item for item in ordered}, harness)
    _check_identity(built, made, ordered)
    _check_shape(built, made, ordered, harness, plan, joined=mode == "tokens" and bridging)
    return built


def parents_of(completions: Sequence[Completion]) -> dict[int, int | None]:
    """Each call's parent, by comparing it with every other; among equals the recorded one, else the latest."""
    found: dict[int, int | None] = {}
    for item in completions:
        fitting = [other for other in completions if other is not item and extends(item, other)]
        best = max(fitting, key=lambda other: (_length(other), other.number == item.parent, other.number), default=None)
        found[item.number] = None if best is None else best.number
    return found


def roots_of(completions: Sequence[Completion], parents: Parents) -> list[int]:
    """Calls that go on from nothing. One that sends an earlier root's prompt again is a retry of it, not another root."""
    roots: list[Completion] = []
    for item in completions:
        known = item.parent if item.broken is None else item.broken.parent
        if parents[item.number] is not None or (known in parents and known != item.number):
            continue
        if not any(np.array_equal(_prompt(item), _prompt(root)) for root in roots):
            roots.append(item)
    return [item.number for item in roots]


def side_ends(parents: Parents, untrained: set[int]) -> list[int]:
    """The ends that only untrained calls lead to, in order; one that a row's last call has as its own is left out."""
    inner = set(parents.values())
    going_on: set[int] = set()
    for number in parents:
        if number not in untrained:
            above = parents[number]
            while above is not None and above not in going_on:
                going_on.add(above)
                above = parents[above]
    claimed: set[int] = set()
    found = []
    for number in sorted(parents):
        if number in inner or number not in untrained:
            continue
        above = parents[number]
        while above is not None and above in untrained:
            above = parents[above]
        if above is None or above in going_on or above in claimed:
            found.append(number)
        else:
            claimed.add(above)
    return found


def restarts_of(completions: Sequence[Completion], harness: Harness) -> list[int]:
    """The calls of the main conversation that come next after a compaction."""
    found, compacted = [], False
    for item in completions:
        role = harness.tag(item).role
        if role == "main" and compacted:
            found.append(item.number)
        compacted = role == "compaction" or (compacted and role != "main")
    return found


# --- inside ------------------------------------------------------------------------------------------------------------


def _fill(built: Built, made: Trajectory) -> None:
    built.rows = Counter(trace.role for trace in made.traces)
    built.untrained = Counter(reason for _, reason in {(line.completion, str(line.reason)) for line in made.ledger})
    built.rules = Counter(rule for _, rule in {(line.completion, f"{line.reason} ({line.rule})") for line in made.ledger})
    built.breaks = Counter(line.cause for line in made.drift)
    built.in_rows = sum(int(trace.mask.sum()) for trace in made.traces)
    built.in_ledger = made.ledger.tokens


def _check_conservation(built: Built, made: Trajectory) -> None:
    if built.in_rows + built.in_ledger != built.sampled:
        built.problems.append(f"{built.in_rows} tokens in rows and {built.in_ledger} in the ledger are not the {built.sampled} sampled")
    if not made.traces:
        built.problems.append("no rows were built")


def _check_contexts(built: Built, traces: Sequence[Trace], calls: Mapping[int, Completion]) -> None:
    """Law 2, against the recorded prompts themselves."""
    for trace in traces:
        for span in trace.spans:
            prompt = calls[span.completion].prompt_ids
            if not trace.faithful or prompt is None or not np.array_equal(trace.ids[: span.start], prompt):
                built.problems.append(f"call {span.completion} stands in a row after ids that the engine did not see")


def _check_ledger(built: Built, lines: Sequence[Line], calls: Mapping[int, Completion], harness: Harness) -> None:
    """Only side calls are untrained, whole, each with the rule of the recipe that says so."""
    for line in lines:
        call = calls[line.completion]
        tag = harness.tag(call)
        if line.reason not in SIDE_ROLES:
            built.problems.append(f"call {line.completion} is not trained: {line.reason}, {line.rule}")
        elif line.reason != tag.role or line.rule != tag.rule or call.sampled_ids is None or line.tokens != len(call.sampled_ids):
            built.problems.append(f"call {line.completion} is in the ledger as {line.reason} by {line.rule!r}, not by its recipe's rule")


def _check_identity(built: Built, made: Trajectory, calls: Sequence[Completion]) -> None:
    usable = [
        item for item in calls if item.ids is not None and len(_prompt(item)) and item.sampled_ids is not None and len(item.sampled_ids)
    ]
    parents = parents_of(usable)
    built.roots = len(roots_of(usable, parents))
    built.side = len(side_ends(parents, {line.completion for line in made.ledger}))
    rows, breaks = len(made.traces), len(made.drift)
    if rows + built.side != built.roots + breaks:
        built.problems.append(f"{rows} rows + {built.side} side ways are not {built.roots} roots + {breaks} breaks")
    for line in made.drift:
        if line.cause not in FIXES or not line.detail:
            built.problems.append(f"the break at call {line.completion} has no cause that is known, or no detail: {line.cause!r}")


def _check_shape(built: Built, made: Trajectory, calls: Sequence[Completion], harness: Harness, plan: Plan, *, joined: bool) -> None:
    """What the exercise must leave. `joined`: prompts extend each other, so every row has a reason that the harness gave."""
    restarts = restarts_of(calls, harness)
    if plan.compaction and not restarts:
        built.problems.append("no turn of the main conversation comes after a compaction")
    if plan.compaction and not built.untrained["compaction"]:
        built.problems.append("no compaction is in the ledger")
    wanted = 1 if plan.sub_agent else 0
    if built.rows["sub_agent"] < wanted:
        built.problems.append("no row of a sub-agent")
    if not joined:
        return
    if built.rows["sub_agent"] != wanted:
        built.problems.append(f"{built.rows['sub_agent']} rows of sub-agents; {wanted} wanted")
    opening = [_opening(trace) for trace in made.traces if trace.role == "main"]
    first = next((item.number for item in calls if harness.tag(item).role == "main"), -1)
    for number in sorted({first, *restarts} - set(opening)):
        built.problems.append(f"call {number} opens no row of its own")
    edits = [line for line in made.drift if line.cause == Cause.HISTORY_EDITED and line.completion not in restarts]
    more = sorted(set(opening) - {first, *restarts})
    if not len(more) == len(edits) == plan.edits:
        named = "; ".join(f"call {line.completion}: {line.cause}, {line.detail}" for line in made.drift)
        built.problems.append(
            f"{len(more)} more rows of the main conversation (from calls {more} on) for {plan.edits} edits of it: {named}"
        )


def _opening(trace: Trace) -> int:
    """The first call that a row trains."""
    return next(span.completion for span in trace.spans if span.trained)


def _prompt(item: Completion) -> Ids:
    return item.prompt_ids if item.prompt_ids is not None else np.empty(0, np.int32)


def _length(item: Completion) -> int:
    ids = item.ids
    return 0 if ids is None else len(ids)
