"""Builders: a session's completions made into rows and a ledger. Pure.

`prefix_merging` obeys laws 1 to 3 by construction: a row is a path of the token forest, from a root to a completion that no trained one
goes on from, with mask 1 on the sampled runs that this row trains. `per_request` makes one row of every completion. Both end in `check`,
which accounts for every sampled token and raises `LawBroken` if one is lost, doubled, not the engine's own or out of its context.

Others register under the entry point group `polar.builders`: a `Builder` subclass, by the name that tasks give as `builder.strategy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.records import Completion, Session
from polar.trajectory.assemble import Job, Piece
from polar.trajectory.breaks import Decoder, report, roots_and_breaks
from polar.trajectory.forest import Forest
from polar.trajectory.ledger import ConservationError, Coverage, FaithfulnessError, Ledger, Line, Reason
from polar.trajectory.row import Trace, Trajectory
from polar.trajectory.selection import DEFAULTS, Options, Selection, select
from polar.trajectory.splice import splice
from polar.trajectory.tags import Recipe, recipe


@dataclass(slots=True)
class Rows:
    """What a builder made: rows, ledger lines beyond those of its job's selection, and facts for `Trajectory.builder`."""

    traces: list[Trace]
    lines: list[Line] = field(default_factory=list)
    facts: JsonObject = field(default_factory=dict)


class Builder(ABC):
    """One way to make rows. Instances hold no state but their options."""

    name: ClassVar[str]

    def __init__(self, options: Options = DEFAULTS) -> None:
        self.options = options

    @abstractmethod
    def rows(self, job: Job) -> Rows:
        """Rows for all of `job.chosen.wanted`."""

    def build(self, forest: Forest, session: Session, known: Recipe | None = None, tokenizer: Decoder | None = None) -> Trajectory:
        """The session's trajectory, without reward. The same set of completions gives the same one, in whatever order it was added.

        `known` is the harness's recipe, worked out from the session where it is not given; with a `tokenizer` the drift report has text.
        Raises `LawBroken` if the rows break a law: a bug of the builder.
        """
        known = known or recipe(session, forest.records())
        chosen = select(forest, known.tag, self.options)
        rows = self.rows(Job(forest, session, known, chosen))
        lines = sorted([*chosen.lines, *rows.lines], key=lambda line: (line.completion, line.start))
        check(forest, rows.traces, lines)
        sampled = sum(forest.sampled().values())
        return Trajectory(
            session=session.id,
            traces=tuple(rows.traces),
            ledger=Ledger(tuple(lines)),
            drift=tuple(report(forest, chosen.tags, lines, known.harness, tokenizer)),
            sampled=sampled,
            status="COMPLETED" if sampled else "ERROR",
            error=None if sampled else "the session sampled no token",
            warnings=tuple(_warnings(forest, known)),
            builder={
                "strategy": self.name,
                "options": self.options.to_json(),
                "harness": known.harness,
                "harness_guessed": known.guessed,
                **rows.facts,
            },
            metadata=dict(session.metadata),
        )


class PrefixMerging(Builder):
    """One row for each conversation, as long as its prompts extend each other."""

    name = "prefix_merging"

    def rows(self, job: Job) -> Rows:
        if self.options.on_break == "splice":
            return Rows(*splice(job, self.options.end_of_turn))
        forest, wanted = job.forest, job.chosen.wanted
        parents = forest.parents()
        branches = _Branches(parents, wanted)
        roots, breaks = roots_and_breaks(forest, {number: parents[number] for number in branches.members})
        beyond = _cut_ends(forest, job.chosen, branches.leaves)
        taken: set[int] = set()
        traces = []
        for leaf in self._ordered(job, branches.leaves):
            path = branches.to(leaf)
            pieces = [
                Piece(forest.nodes[number].record, forest.nodes[number].start, None if number in taken else wanted.get(number))
                for number in path
            ]
            taken.update(path)
            ids = forest.stream(leaf)[: forest.nodes[leaf].start + len(wanted[leaf])]
            traces.append(job.row(ids, pieces, cut="over_length" if leaf in beyond else None))
        traces.sort(key=lambda trace: next(span.completion for span in trace.spans if span.trained))
        return Rows(traces, facts={"roots": len(roots), "breaks": len(breaks)})

    def _ordered(self, job: Job, leaves: Iterable[int]) -> list[int]:
        """Leaves in the order in which they take the turns that they share."""
        if self.options.trunk == "longest":
            return sorted(leaves, key=lambda leaf: (-job.forest.nodes[leaf].end, leaf))
        return sorted(leaves, reverse=self.options.trunk == "latest")


class PerRequest(Builder):
    """One row for each completion: its prompt and its answer."""

    name = "per_request"

    def rows(self, job: Job) -> Rows:
        traces = []
        for number, wanted in sorted(job.chosen.wanted.items()):
            node = job.forest.nodes[number]
            ids = job.forest.stream(number)[: node.start + len(wanted)]
            cut = "over_length" if len(wanted) < len(node.sampled) else None
            traces.append(job.row(ids, [Piece(node.record, node.start, wanted)], cut=cut))
        return Rows(traces, facts={"roots": len(traces), "breaks": 0})


BUILTIN: Mapping[str, type[Builder]] = {cls.name: cls for cls in (PrefixMerging, PerRequest)}
GROUP = "polar.builders"


def builder(name: str = PrefixMerging.name, config: Mapping[str, Any] | Options = DEFAULTS) -> Builder:
    """The builder of that name with these options. Raises `ConfigError` for an unknown name or option."""
    options = config if isinstance(config, Options) else Options.of(config)
    if name in BUILTIN:
        return BUILTIN[name](options)
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in plugins:
        raise ConfigError(f"no builder is called {name!r}; there are: {', '.join([*BUILTIN, *plugins])}")
    made = plugins[name].load()
    if not (isinstance(made, type) and issubclass(made, Builder)):
        raise ConfigError(f"the entry point {name!r} of {GROUP} is {made!r}, not a subclass of Builder")
    return made(options)


def build(
    session: Session, completions: Iterable[Completion], made_by: Builder | None = None, tokenizer: Decoder | None = None
) -> Trajectory:
    """A session's trajectory in one step, with `prefix_merging` and its defaults unless said otherwise."""
    return (made_by or PrefixMerging()).build(Forest(session.id, completions), session, tokenizer=tokenizer)


def check(forest: Forest, traces: Sequence[Trace], lines: Iterable[Line]) -> None:
    """Laws 1 to 3 for a session's rows and ledger, whoever made them.

    Every sampled token must stand exactly once in a trained span of `traces` or in `lines` (else `ConservationError`), with the id and the
    log-probability that the engine gave, and, in a row that says it is faithful, after exactly its prompt (else `FaithfulnessError`).
    """
    covered = Coverage(forest.sampled())
    for trace in traces:
        for span in trace.spans:
            node = forest.nodes.get(span.completion)
            if node is None:
                raise ConservationError(f"a row has a span of completion {span.completion}, which sampled nothing after a known prompt")
            mask, count = trace.mask[span.start : span.end], len(span)
            if not np.array_equal(trace.ids[span.start : span.end], node.sampled[:count]):
                raise FaithfulnessError(f"a row's ids {span.start}..{span.end} are not what completion {span.completion} sampled")
            if span.trained:
                if node.logprobs is None or not np.array_equal(trace.logprobs[span.start : span.end][mask], node.logprobs[:count][mask]):
                    raise FaithfulnessError(f"a row's log-probabilities of completion {span.completion} are not the engine's")
                covered.add(span.completion, mask)
        if trace.faithful and trace.spans:
            _check_context(forest, trace)
    covered.add_lines(lines)
    covered.check()


def _check_context(forest: Forest, trace: Trace) -> None:
    """The row starts with the last span's prompt, and each span's stream is where the next one's prompt starts, so that every span stands
    after its own prompt. Linear in the row."""
    last = trace.spans[-1]
    if not np.array_equal(trace.ids[: last.start], forest.prompt(last.completion)):
        raise FaithfulnessError(f"in a row of session {trace.session!r}, completion {last.completion} does not follow its own prompt")
    for span in trace.spans:
        if forest.nodes[span.completion].start != span.start:
            raise FaithfulnessError(f"completion {span.completion} stands at {span.start} of a row, after a prompt of another length")
    for before, span in pairwise(trace.spans):
        if not forest.extends(span.completion, before.completion):
            raise FaithfulnessError(f"the prompt of completion {span.completion} does not extend completion {before.completion} before it")


# --- inside ----------------------------------------------------------------------------------------------------------


class _Branches:
    """The part of a forest that rows are made of: the wanted completions (`leaves`: those that no wanted one goes on from), and those that
    they go on from."""

    def __init__(self, parents: Mapping[int, int | None], wanted: Iterable[int]) -> None:
        self._parents = parents
        above: set[int] = set()
        chosen = set(wanted)
        for number in chosen:
            parent = parents[number]
            while parent is not None and parent not in above:
                above.add(parent)
                parent = parents[parent]
        self.leaves = chosen - above
        self.members = chosen | above

    def to(self, leaf: int) -> list[int]:
        """From the root to `leaf`."""
        path: list[int] = []
        number: int | None = leaf
        while number is not None:
            path.append(number)
            number = self._parents[number]
        return path[::-1]


def _cut_ends(forest: Forest, chosen: Selection, leaves: set[int]) -> set[int]:
    """Completions whose conversations go on beyond `max_length`, all leaves that do among them."""
    ends = {number for number in leaves if len(chosen.wanted[number]) < len(forest.nodes[number].sampled)}
    passed: set[int] = set()
    for number, refusal in chosen.refused.items():
        if refusal.reason is not Reason.OVER_LENGTH:
            continue
        above = forest.parent(number)
        while above is not None and above not in leaves and above not in passed:
            passed.add(above)
            above = forest.parent(above)
        if above is not None:
            ends.add(above)
    return ends


def _warnings(forest: Forest, known: Recipe) -> list[str]:
    """An unknown harness's side calls look like conversations without tools."""
    if known.rules:
        return []
    roots = roots_and_breaks(forest, forest.parents())[0]
    bare = [number for number in roots if not forest.nodes[number].record.tools]
    if not bare:
        return []
    listed = ", ".join(map(str, bare[:8])) + (", ..." if len(bare) > 8 else "")
    return [
        f"the harness is not known, so every call is trained; {len(bare)} of its {len(roots)} conversations have no tools and may be "
        f"titles or probes (completions {listed}); name the harness in the session's metadata to tell them apart"
    ]
