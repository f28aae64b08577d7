"""A row from the pieces of its stream: mask, log-probabilities, spans, conversation. Decides nothing about what is trained. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.chat import JsonObject
from polar.records import Completion, Ids, Session
from polar.trajectory.conversation import Turn, join, plain_tool
from polar.trajectory.forest import Forest
from polar.trajectory.row import Mask, Span, Trace
from polar.trajectory.selection import Selection
from polar.trajectory.tags import Recipe

_TASK_FACTS = ("task", "task_id", "repository", "split")
"""Of a session's metadata, what every row says too, so that rows can be grouped and split on their own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A completion's sampled run in a row, from index `start` on. `trained` is what of it is trained here: bool[n], from its start;
    `None` where it stands as context only."""

    record: Completion
    start: int
    trained: Mask | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What a builder works on: one session, and what is to be trained of it."""

    forest: Forest
    session: Session
    recipe: Recipe
    chosen: Selection

    def row(self, ids: Ids, pieces: Sequence[Piece], *, cut: str | None = None, faithful: bool = True) -> Trace:
        """The row of `ids`: int32[n], with `pieces` in order; runs beyond its end are cut there. At least one piece must be trained.

        A run decodes to no message where its answer's message is more: one that the row's end cuts, one that its caller had begun.
        """
        mask = np.zeros(len(ids), np.bool_)
        logprobs = np.zeros(len(ids), np.float32)
        turns = [Turn(piece.record.messages, piece.record.answer) for piece in pieces]
        messages, places = join(turns)
        spans = []
        tags: set[str] = set()
        for piece, place in zip(pieces, places, strict=True):
            record = piece.record
            assert record.sampled_ids is not None
            end = min(piece.start + len(record.sampled_ids), len(ids))
            whole = end == piece.start + len(record.sampled_ids)
            spans.append(
                Span(
                    completion=record.number,
                    start=piece.start,
                    end=end,
                    trained=piece.trained is not None,
                    policy_version=record.policy_version,
                    sampling=record.sampling,
                    finish=record.finish if whole else "length",
                    message=place if whole and "prefilled" not in record.tags else None,
                )
            )
            if piece.trained is not None:
                assert record.logprobs is not None
                mask[piece.start : end] = piece.trained
                np.copyto(logprobs[piece.start : end], record.logprobs[: end - piece.start], where=piece.trained)
                tags |= record.tags
        if any(span.finish == "length" for span in spans):
            tags.add("truncated")
        if any(piece.trained is None and piece.record.number in self.chosen.wanted for piece in pieces):
            tags.add("shared_trunk")
        first = next(span for span in spans if span.trained)
        last = pieces[-1].record
        metadata = self.session.metadata
        return Trace(
            session=self.session.id,
            ids=ids,
            mask=mask,
            logprobs=logprobs,
            spans=tuple(spans),
            finish=spans[-1].finish,
            role=self.chosen.tags[first.completion].role,
            tags=frozenset(tags),
            messages=messages,
            tools=tuple(plain_tool(tool) for tool in last.tools),
            group_id=_text(metadata.get("group_id")) or _text(metadata.get("task_id")),
            rollout_id=_text(metadata.get("rollout_id")) or self.session.id,
            faithful=faithful,
            cut=cut,
            metadata=self._facts(last),
        )

    def _facts(self, last: Completion) -> JsonObject:
        facts: JsonObject = {name: self.session.metadata[name] for name in _TASK_FACTS if name in self.session.metadata}
        facts |= {"model": last.model, "dialect": last.dialect, "mode": last.mode, "policy_version": last.policy_version}
        harness = self.recipe.harness_of(last)
        if harness:
            facts |= {"harness": harness} | ({"harness_guessed": True} if self.recipe.guessed else {})
        return facts


def _text(value: object) -> str | None:
    return None if value is None or value == "" else str(value)
