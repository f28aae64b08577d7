"""Samples the next token of each row of logits, and tells the log-probability that it had in the distribution sampled from.

Knows no model and no sequence. The order of operations is vLLM's: bias, penalties, temperature, then truncation by min-p,
top-k and top-p, then renormalisation: what vLLM calls processed log-probabilities, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polar.engine.api import Params


@dataclass(slots=True)
class Row:
    """What one row needs besides its logits: `seen` are the prompt's ids (for the repetition penalty), `sampled` the answer's so far."""

    params: Params
    seen: Sequence[int]
    sampled: Sequence[int]
    generator: torch.Generator | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Choice]:
    """`logits`: float32[len(rows), vocabulary], overwritten."""
    greedy = [row.params.temperature < 1e-5 for row in rows]
    for index, row in enumerate(rows):
        if not row.params.neutral:
            _penalise(logits[index], row)
    temperatures = [1.0 if cold else row.params.temperature for cold, row in zip(greedy, rows, strict=True)]
    if any(temperature != 1.0 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, dtype=logits.dtype, device=logits.device).unsqueeze(1))
    for index, row in enumerate(rows):
        if not row.params.neutral and not greedy[index]:
            _truncate(logits[index], row.params)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _draw(logprobs, rows, greedy)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    ids, values = tokens.tolist(), chosen.tolist()
    return [Choice(ids[index], values[index], _top(logprobs[index], row.params.top_logprobs)) for index, row in enumerate(rows)]


def _draw(logprobs: torch.Tensor, rows: Sequence[Row], greedy: Sequence[bool]) -> torch.Tensor:
    """int64[rows]: the largest of p / e with e exponential is a draw from p."""
    if all(greedy):
        return logprobs.argmax(dim=-1)
    noise = torch.empty_like(logprobs).exponential_()
    for index, row in enumerate(rows):
        if row.generator is not None:
            noise[index].exponential_(generator=row.generator)
    scores = logprobs.exp() / noise.clamp_min_(1e-20)
    for index, cold in enumerate(greedy):
        if cold:
            scores[index] = logprobs[index]
    return scores.argmax(dim=-1)


def _top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _penalise(logits: torch.Tensor, row: Row) -> None:
    """In place: bias; the repetition penalty on all ids so far; presence and frequency penalties on the answer's."""
    params = row.params
    for token, bias in params.logit_bias.items():
        if 0 <= token < logits.shape[-1]:
            logits[token] += bias
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*row.seen, *row.sampled}), dtype=torch.int64, device=logits.device)
        found = logits[ids]
        logits[ids] = torch.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    if row.sampled and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(row.sampled, device=logits.device), minlength=logits.shape[-1])
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)


def _truncate(logits: torch.Tensor, params: Params) -> None:
    """In place, on tempered logits: what is cut off becomes minus infinity. The likeliest token always stays."""
    if params.min_p > 0.0:
        probabilities = torch.softmax(logits, dim=-1)
        logits[probabilities < params.min_p * probabilities.max()] = -torch.inf
    if 0 < params.top_k < logits.shape[-1]:
        logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        cut = before >= params.top_p
        cut[0] = False
        logits[order[cut]] = -torch.inf
