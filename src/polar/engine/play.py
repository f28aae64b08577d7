"""Turns a backend's steps into text: detokenises as ids come and looks for stop strings, which a backend knows nothing of."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from polar.engine.api import Backend, Finish, Job, Tokenizer
from polar.engine.text import Detokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """One token with the text that became final with it (which may be empty, or of earlier tokens)."""

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    text: str
    finish: Finish | None = None
    stop: int | str | None = None


@dataclass(slots=True)
class Output:
    """A whole continuation. `text` ends before the stop string; ids and log-probabilities are complete."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    finish: Finish = "abort"
    stop: int | str | None = None

    def add(self, piece: Piece) -> None:
        self.token_ids.append(piece.token_id)
        self.logprobs.append(piece.logprob)
        self.top.append(piece.top)
        self.text += piece.text
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop


async def play(
    backend: Backend, job: Job, tokenizer: Tokenizer, *, skip_special: bool = True, include_stop: bool = False
) -> AsyncGenerator[Piece, None]:
    """Yields pieces up to the first with `finish`. Text that may be the start of a stop string is held back."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    stops = job.params.stop
    hold = max((len(stop) for stop in stops), default=1) - 1
    text, sent = "", 0
    async with aclosing(backend.run(job)) as steps:
        async for step in steps:
            new = detokenizer.push(step.token_id)
            if step.finish is not None:
                new += detokenizer.flush()
            start = max(0, len(text) - hold)
            text += new
            found = [(at, stop) for stop in stops if (at := text.find(stop, start)) >= 0] if new else []
            if found:
                at, stop = min(found)
                end = max(sent, at + len(stop) if include_stop else at)
                yield Piece(step.token_id, step.logprob, step.top, text[sent:end], "stop", stop)
                return
            end = len(text) if step.finish is not None else max(sent, len(text) - hold)
            yield Piece(step.token_id, step.logprob, step.top, text[sent:end], step.finish, step.stop)
            sent = end
            if step.finish is not None:
                return


async def collect(backend: Backend, job: Job, tokenizer: Tokenizer, *, skip_special: bool = True, include_stop: bool = False) -> Output:
    """The whole continuation. Cancelling the task cancels the job."""
    output = Output()
    async with aclosing(play(backend, job, tokenizer, skip_special=skip_special, include_stop=include_stop)) as pieces:
        async for piece in pieces:
            output.add(piece)
    return output
