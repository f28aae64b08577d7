"""Finds where a session's prompts broke, and names the causes (law 8). Pure; knows no rows.

A break is a completion that a chain of turns does not simply go on with: one that opens another branch of the forest, or another root
although it had a predecessor. So `leaves == roots + breaks`, by counting. The cause is what capture recorded; where it recorded none
(both prompts were right, but only one can go on), the forest and the tags tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from polar.harness.base import Tag
from polar.records import Cause, Completion
from polar.tokens.drift import Reason as Suspicion
from polar.tokens.drift import find_break
from polar.trajectory.drift import CHOICE, SIDE_CALL, DriftLine
from polar.trajectory.forest import Forest
from polar.trajectory.ledger import Line, Reason
from polar.trajectory.selection import tries

_SHOWN_BEFORE = 8
_SHOWN_AFTER = 24
"""Ids decoded on either side of the first difference."""


class Decoder(Protocol):
    def decode(self, ids: list[int], /) -> str: ...


Parents = Mapping[int, int | None]


def roots_and_breaks(forest: Forest, parents: Parents) -> tuple[list[int], list[int]]:
    """The true roots and the breaks of a forest, or of a part of it that `parents` spans (a parent of every member is a member).

    Of the children of one completion, the one that was recorded as going on from it, else the earliest, goes on with its row; every
    other one is a break. A forest's root is a break if capture knew a predecessor of it, or if its prompt is that of an earlier one.
    """
    children: dict[int | None, list[int]] = defaultdict(list)
    for number in sorted(parents):
        children[parents[number]].append(number)
    roots: list[int] = []
    breaks: list[int] = []
    for parent, numbers in children.items():
        if parent is None:
            firsts = {group[0] for group in forest.same_prompt(numbers)}
            for number in numbers:
                (roots if number in firsts and predecessor(forest, number) is None else breaks).append(number)
        else:
            first = heir(forest, parent, numbers)
            breaks.extend(number for number in numbers if number != first)
    return roots, sorted(breaks)


def heir(forest: Forest, parent: int, children: list[int]) -> int:
    """Which of a completion's children goes on with its row."""
    return next((number for number in children if predecessor(forest, number) == parent), children[0])


def predecessor(forest: Forest, number: int) -> int | None:
    """The completion that capture matched this one to, if it is in the forest."""
    record = forest.nodes[number].record
    parent = record.parent if record.broken is None else record.broken.parent
    return parent if parent in forest.nodes and parent != number else None


def report(
    forest: Forest, tags: Mapping[int, Tag], lines: Sequence[Line], harness: str = "", tokenizer: Decoder | None = None
) -> list[DriftLine]:
    """A line for every break, in order of completion. `lines` is the session's ledger."""
    parents = forest.parents()
    breaks = roots_and_breaks(forest, parents)[1]
    opening = set(breaks)
    retried, lost = _retries(forest, lines)
    for line in lines:
        if line.reason == Reason.CHAIN_BROKEN:
            number: int | None = line.completion
            while number is not None and number not in opening:
                number = parents[number]
            if number is not None:
                lost[number] += line.tokens
    children: dict[int, list[int]] = defaultdict(list)
    for number, parent in parents.items():
        if parent is not None:
            children[parent].append(number)
    found = []
    for number in breaks:
        parent = parents[number]
        earlier = retried.get(number)
        expected = predecessor(forest, number)
        if earlier is not None:
            against, cause = (
                earlier,
                Cause.RETRY.value if forest.nodes[earlier].record.choice == forest.nodes[number].record.choice else CHOICE,
            )
            detail = f"the same prompt as completion {earlier}"
        elif parent is None or (expected is not None and not forest.extends(number, expected)):
            assert expected is not None  # a root without a predecessor is no break
            against, (cause, detail) = expected, _recorded(forest, number, expected, tokenizer)
            if tags[expected].role == "compaction" != tags[number].role:
                cause, detail = Cause.COMPACTION.value, f"goes on from the summary; recorded as {cause}: {detail}"
        else:
            against, (cause, detail) = heir(forest, parent, children[parent]), _forked(tags[number], parent)
        found.append(_line(forest, number, against, cause, detail, lost.get(number, 0), harness, tokenizer))
    return found


def _retries(forest: Forest, lines: Iterable[Line]) -> tuple[dict[int, int], dict[int, int]]:
    """For each call with a prompt that was there before, the try before it (or else the choice), and the sampled tokens that are not
    trained because of it: those of the tries that it replaced."""
    retried = {later: earlier for group in forest.same_prompt(sorted(forest.nodes)) for earlier, later in pairwise(group)}
    heirs: dict[int, int] = {}
    for group in tries(forest):
        for earlier, later in pairwise(group):
            retried[later], heirs[earlier] = earlier, later
        heirs[group[-1]] = group[-1]
    lost: dict[int, int] = defaultdict(int)
    for line in lines:
        if line.completion in heirs and line.reason in (Reason.ABANDONED_RETRY, Reason.ABORTED):
            lost[heirs[line.completion]] += line.tokens
    return retried, lost


def _recorded(forest: Forest, number: int, expected: int, tokenizer: Decoder | None) -> tuple[str, str]:
    record = forest.nodes[number].record
    if record.broken is not None:
        return record.broken.cause.value, record.broken.detail
    parent: Completion = replace(forest.nodes[expected].record, prompt_ids=forest.prompt(expected))
    found = find_break(forest.prompt(number), parent, Suspicion(None, Cause.HISTORY_EDITED, "capture named no cause"), tokenizer)
    assert found is not None  # the prompt does not extend `expected`
    return found.cause.value, found.detail


def _forked(tag: Tag, parent: int) -> tuple[str, str]:
    """Why there is another turn after `parent`, its prompt right and not that of a retry."""
    if tag.role == "sub_agent":
        return Cause.SUB_AGENT.value, f"branches off after completion {parent}"
    if tag.role == "compaction":
        return Cause.COMPACTION.value, f"asks for a summary of the history up to completion {parent}"
    if tag.role != "main":
        return SIDE_CALL, f"a {tag.role} call on the history up to completion {parent} ({tag.rule})"
    return Cause.HISTORY_EDITED.value, f"goes back to completion {parent} and on from there another way"


def _line(
    forest: Forest, number: int, against: int, cause: str, detail: str, lost: int, harness: str, tokenizer: Decoder | None
) -> DriftLine:
    node, end = forest.nodes[number], forest.nodes[against].end
    place = min(forest.common(number, against), node.start)
    start, stop = max(0, place - _SHOWN_BEFORE), place + _SHOWN_AFTER
    before, after = forest.piece(against, start, stop), forest.piece(number, start, min(stop, node.start))
    return DriftLine(
        completion=number,
        parent=against,
        cause=cause,
        position=place,
        dropped=end - place,
        repeated=node.start,
        lost=lost,
        before_id=int(before[place - start]) if place < end else None,
        after_id=int(after[place - start]) if place < node.start else None,
        before="" if tokenizer is None else tokenizer.decode(before.tolist()),
        after="" if tokenizer is None else tokenizer.decode(after.tolist()),
        detail=detail,
        harness=harness,
        dialect=node.record.dialect,
        mode=node.record.mode,
    )
