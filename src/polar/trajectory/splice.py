"""The reference system's prefix merging, for comparison only (`on_break="splice"`). Its rows are marked not faithful.

What it does, from its public material: calls are chained if the last *prompt* of a chain is a prefix of the next one; what was sampled is
not compared. A chain's row is its first prompt and answer, then for each further call the answer, preceded by what its prompt has after the
first end of turn beyond the prompt before. Where there is no end of turn to be found, the rest of the chain is dropped. So later turns may
be trained in a context that the engine never saw, which is what `prefix_merging` exists to avoid.

Two differences, which make the numbers comparable: only calls that this project would train are looked at (set the options to train all
roles to get the original), and what is dropped stands in the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar.chat import JsonObject
from polar.records import Ids
from polar.trajectory.assemble import Job, Piece
from polar.trajectory.forest import Node
from polar.trajectory.ledger import Line, Reason
from polar.trajectory.row import Trace
from polar.trajectory.selection import runs

_ENDED = ("stop", "tool_calls", "stop_sequence")


@dataclass(slots=True)
class _Call:
    node: Node
    prompt: Ids


def splice(job: Job, end_of_turn: int | None) -> tuple[list[Trace], list[Line], JsonObject]:
    """Rows, what the reference drops, and its own counts. `end_of_turn` is the id that ends a turn; `None`: see `Options`."""
    chains = _chains(job)
    traces: list[Trace] = []
    lines: list[Line] = []
    for chain in chains:
        pieces, kept = _row(chain, end_of_turn)
        ids = np.concatenate(pieces)
        runs_at = _starts(pieces)
        traces.append(
            job.row(
                ids,
                [
                    Piece(call.node.record, start, job.chosen.wanted[call.node.number])
                    for call, start in zip(chain[:kept], runs_at, strict=True)
                ],
                faithful=False,
            )
        )
        for call in chain[kept:]:
            rule = f"splice: no end of turn after the answer of completion {chain[kept - 1].node.number}; the chain's rest is dropped"
            number = call.node.number
            lines.extend(Line(number, start, end, Reason.CHAIN_BROKEN, rule) for start, end in runs(job.chosen.wanted[number]))
    truncated = len({line.rule for line in lines})
    facts = {
        "roots": len(chains),
        "breaks": 0,
        "chains_total": len(chains),
        "chains_reconstructed_truncated": truncated,
        "completions_merged": sum(len(trace.spans) for trace in traces),
    }
    return traces, lines, facts


def _chains(job: Job) -> list[list[_Call]]:
    chains: list[list[_Call]] = []
    numbers = sorted(job.chosen.wanted, key=lambda number: (job.forest.nodes[number].record.ended, number))
    for number in numbers:
        call = _Call(job.forest.nodes[number], job.forest.prompt(number))
        open_ones = [chain for chain in chains if _is_prefix(chain[-1].prompt, call.prompt)]
        if open_ones:
            max(open_ones, key=lambda chain: len(chain[-1].prompt)).append(call)
        else:
            chains.append([call])
    return chains


def _row(chain: list[_Call], end_of_turn: int | None) -> tuple[list[Ids], int]:
    """The row's pieces, in turn not sampled and sampled, and how many calls of the chain are in it."""
    end = _end_of_turn(chain) if end_of_turn is None else end_of_turn
    pieces: list[Ids] = [chain[0].prompt, chain[0].node.sampled]
    for place in range(1, len(chain)):
        before, call = chain[place - 1], chain[place]
        tail = call.prompt[len(before.prompt) :]
        found = np.flatnonzero(tail == end) if end is not None else np.empty(0, np.intp)
        if not len(found):
            return pieces, place
        first = int(found[0])
        pieces += [tail[first + 1 :] if before.node.sampled[-1] == end else tail[first:], call.node.sampled]
    return pieces, len(chain)


def _starts(pieces: list[Ids]) -> list[int]:
    """Where the sampled pieces, every second one, start in the row."""
    lengths = np.cumsum([len(piece) for piece in pieces]).tolist()
    return [int(length) for length in lengths[::2]]


def _end_of_turn(chain: list[_Call]) -> int | None:
    return next((int(call.node.sampled[-1]) for call in chain if call.node.record.finish in _ENDED), None)


def _is_prefix(start: Ids, prompt: Ids) -> bool:
    return len(start) <= len(prompt) and bool(np.array_equal(prompt[: len(start)], start))
