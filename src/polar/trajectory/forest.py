"""A session's completions as a forest over token ids. Knows no messages, no roles and no rows.

Every completion is a stream of ids, `prompt + sampled`. All streams together are one radix tree: an edge is a run of ids that every
stream through it shares, so ids that streams have in common are held once. Completion *j* is the parent of *k* if `prompt[k]` starts
with all of `prompt[j] + sampled[j]`, compared id by id, and no longer stream fits (law 2). Interleaved sub-agents, branches, retries,
edits and compaction are then nothing special: their streams part where their ids do.

The tree depends on the set of completions alone, never on the order in which they were added, and the parents are read off the tree. The
order and `Completion.parent` only decide what an addition costs: a prompt that extends the recorded parent is compared with it in one
pass and walks the tree from its end, so that the work in Python does not grow with the number of turns before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.records import Completion, Floats, Ids

_fields_of = attrgetter(*(f.name for f in fields(Completion)))


@dataclass(slots=True, eq=False)
class _Edge:
    """`ids`: int32[n] at the depths `start..start + n`. `ends`: the completions whose streams end at its end."""

    ids: Ids
    start: int
    parent: _Edge | None
    children: dict[int, _Edge] = field(default_factory=dict)
    """By first id."""
    ends: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True, eq=False)
class _Line:
    """The latest prompt of a conversation and what was sampled after it. Each stream of the line is a prefix of `prompt`, the last one
    `prompt + sampled`."""

    prompt: Ids
    sampled: Ids

    def starts(self, prompt: Ids, length: int) -> bool:
        """Whether `prompt` starts with the line's first `length` ids."""
        if length > len(prompt):
            return False
        known = min(length, len(self.prompt))
        return bool(np.array_equal(prompt[:known], self.prompt[:known])) and bool(
            np.array_equal(prompt[known:length], self.sampled[: length - known])
        )


@dataclass(slots=True, eq=False)
class Node:
    """A completion in the forest: its record without prompt ids, and its place. It samples the ids `start..end` of its stream."""

    record: Completion
    start: int
    sampled: Ids
    edge: _Edge
    line: _Line

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def end(self) -> int:
        return self.start + len(self.sampled)

    @property
    def logprobs(self) -> Floats | None:
        return self.record.logprobs


class Forest:
    """The forest of one session. `nodes` are the completions that sampled something after a known prompt, by number; `unplaced` those
    that sampled something after one that is not known (`None`, or empty), and `empty` those that sampled nothing."""

    def __init__(self, session: str, completions: Iterable[Completion] = ()) -> None:
        self.session = session
        self.nodes: dict[int, Node] = {}
        self.unplaced: dict[int, Completion] = {}
        self.empty: dict[int, Completion] = {}
        self._root = _Edge(np.empty(0, np.int32), 0, None)
        for completion in completions:
            self.add(completion)

    def __len__(self) -> int:
        return len(self.nodes) + len(self.unplaced) + len(self.empty)

    def add(self, completion: Completion) -> None:
        """Files one completion; adding it again changes nothing.

        Its arrays are kept, not copied, and must not be written to. Raises `ValueError` for a completion of another session, ids that are
        no int32[n], or a number that is taken by another completion.
        """
        if completion.session != self.session:
            raise ValueError(f"completion {completion.number} belongs to session {completion.session!r}, not {self.session!r}")
        sampled = _ids(completion.sampled_ids, completion.number)
        prompt = _ids(completion.prompt_ids, completion.number)
        if self._known(completion, prompt, sampled):
            return
        record = Completion(*_fields_of(completion))
        record.prompt_ids = None
        if not len(sampled):
            self.empty[completion.number] = record
        elif not len(prompt):
            self.unplaced[completion.number] = record
        else:
            self.nodes[completion.number] = self._place(record, prompt, sampled)

    def records(self) -> Iterator[Completion]:
        """All completions in order of number, without their prompt ids."""
        known = {number: node.record for number, node in self.nodes.items()} | self.unplaced | self.empty
        for number in sorted(known):
            yield known[number]

    def sampled(self) -> dict[int, int]:
        """The number of sampled ids of every completion that has any."""
        counts = {number: len(node.sampled) for number, node in self.nodes.items()}
        return counts | {number: len(_ids(record.sampled_ids, number)) for number, record in self.unplaced.items()}

    def stream(self, number: int) -> Ids:
        """`prompt + sampled` of a completion, int32[n], assembled anew."""
        pieces: list[Ids] = []
        edge: _Edge | None = self.nodes[number].edge
        while edge is not None:
            pieces.append(edge.ids)
            edge = edge.parent
        return np.concatenate(pieces[::-1])

    def prompt(self, number: int) -> Ids:
        return self.stream(number)[: self.nodes[number].start]

    def piece(self, number: int, start: int, end: int) -> Ids:
        """The ids `start..end` of a completion's stream, fewer where it ends before."""
        pieces: list[Ids] = []
        edge: _Edge | None = self.nodes[number].edge
        while edge is not None and edge.end > start:
            pieces.append(edge.ids[max(0, start - edge.start) : max(0, end - edge.start)])
            edge = edge.parent
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def common(self, number: int, other: int) -> int:
        """The number of leading ids that two streams share: the depth at which they part in the tree."""
        path: set[int] = set()
        edge: _Edge | None = self.nodes[number].edge
        while edge is not None:
            path.add(id(edge))
            edge = edge.parent
        edge = self.nodes[other].edge
        while id(edge) not in path:
            assert edge.parent is not None  # both paths end at the root
            edge = edge.parent
        return edge.end

    def same_prompt(self, numbers: Iterable[int]) -> list[list[int]]:
        """The numbers in groups of equal prompts: those of one length that end at one place of the tree."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            node = self.nodes[number]
            edge = node.edge
            while edge.start >= node.start and edge.parent is not None:
                edge = edge.parent
            groups.setdefault((id(edge), node.start), []).append(number)
        return list(groups.values())

    def extends(self, number: int, other: int) -> bool:
        """Whether this completion's prompt starts with the whole stream of the other."""
        edge: _Edge | None = self.nodes[number].edge
        target = self.nodes[other]
        while edge is not None and edge.end >= target.end:
            if edge is target.edge:
                return target.end <= self.nodes[number].start
            edge = edge.parent
        return False

    def parent(self, number: int) -> int | None:
        """The completion whose whole stream is the longest proper start of this one's prompt; `None` for a root.

        Where several streams are equal: the recorded parent, else a complete one, else a delivered one, else the latest.
        """
        node = self.nodes[number]
        edge: _Edge | None = node.edge
        while edge is not None:
            if edge.ends and edge.end <= node.start:
                return max(edge.ends, key=lambda end: self._rank(end, node.record.parent))
            edge = edge.parent
        return None

    def parents(self) -> dict[int, int | None]:
        """`parent` of every node, in order of number."""
        return {number: self.parent(number) for number in sorted(self.nodes)}

    def held(self) -> int:
        """The number of distinct ids that the tree holds; ids shared by streams count once."""
        total, edges = 0, [self._root]
        while edges:
            edge = edges.pop()
            total += len(edge.ids)
            edges.extend(edge.children.values())
        return total

    # --- inside ------------------------------------------------------------------------------------------------------

    def _rank(self, number: int, recorded: int | None) -> tuple[bool, bool, bool, int]:
        record = self.nodes[number].record
        return number == recorded, record.status == "complete", record.delivered, number

    def _known(self, completion: Completion, prompt: Ids, sampled: Ids) -> bool:
        """Whether this very completion is there already. A later `delivered` is taken over: it is set after the fact."""
        number = completion.number
        node = self.nodes.get(number)
        record = node.record if node is not None else self.unplaced.get(number) or self.empty.get(number)
        if record is None:
            return False
        same = np.array_equal(_ids(record.sampled_ids, number), sampled) and record.status == completion.status
        same = same and _same_floats(record.logprobs, completion.logprobs)
        if node is not None:
            same = same and np.array_equal(self.prompt(number), prompt)
        elif number in self.unplaced:
            same = same and not len(prompt)
        if not same:
            raise ValueError(f"session {self.session!r} has two different completions {number}")
        record.delivered |= completion.delivered
        return True

    def _place(self, record: Completion, prompt: Ids, sampled: Ids) -> Node:
        parent = self.nodes.get(record.parent) if record.parent is not None else None
        if parent is not None and parent.line.starts(prompt, parent.end):
            edge, depth, line = parent.edge, parent.end, parent.line
            if parent.end > len(line.prompt):
                line.prompt, line.sampled = prompt, sampled
            else:
                line = _Line(prompt, sampled)
        else:
            edge, depth, line = self._root, 0, _Line(prompt, sampled)
        end = self._insert(edge, np.concatenate([prompt[depth:], sampled]))
        end.ends.append(record.number)
        return Node(record, len(prompt), sampled, end, line)

    def _insert(self, edge: _Edge, rest: Ids) -> _Edge:
        """The edge that ends where `rest`, which starts at the end of `edge`, does; made where there is none."""
        while len(rest):
            child = edge.children.get(int(rest[0]))
            if child is None:
                new = _Edge(rest, edge.end, edge)
                edge.children[int(rest[0])] = new
                return new
            common = _common(child.ids, rest)
            edge = child if common == len(child.ids) else _split(child, common)
            rest = rest[common:]
            if not len(edge.children) and len(rest) and rest.base is not None:
                rest = rest.copy()  # not a view: it would hold what the tree has already
        return edge


def _split(edge: _Edge, length: int) -> _Edge:
    """Puts an edge for the first `length` ids above `edge`, which keeps the others, its end and its identity."""
    assert edge.parent is not None
    upper = _Edge(edge.ids[:length], edge.start, edge.parent, {int(edge.ids[length]): edge})
    edge.parent.children[int(edge.ids[0])] = upper
    edge.ids, edge.start, edge.parent = edge.ids[length:], edge.start + length, upper
    return upper


def _common(a: Ids, b: Ids) -> int:
    """The number of leading ids that `a` and `b` share."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    place = int(different.argmax()) if size else 0
    return place if size and different[place] else size


def _ids(values: Any, number: int) -> NDArray[np.int32]:
    """`values` as int32[n]; empty for `None`."""
    if values is None:
        return np.empty(0, np.int32)
    if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.ndim != 1:
        raise ValueError(f"the ids of completion {number} must be int32[n]")
    return values


def _same_floats(a: Floats | None, b: Floats | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a, b, equal_nan=True))
