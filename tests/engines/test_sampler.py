import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engine.api import Params
from polar.engine.sampler import Row, sample

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=12)


def reference(logits: list[float], params: Params, seen: list[int], sampled: list[int]) -> list[float]:
    """The log-probabilities by the textbook, in Python floats."""
    values = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in {*seen, *sampled}:
        values[token] = values[token] / params.repetition_penalty if values[token] > 0 else values[token] * params.repetition_penalty
    for token in range(len(values)):
        count = sampled.count(token)
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    values = [value / params.temperature for value in values]
    kept = set(range(len(values)))

    def probabilities() -> dict[int, float]:
        top = max(values[token] for token in kept)
        weights = {token: math.exp(values[token] - top) for token in kept}
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}

    if params.min_p:
        found = probabilities()
        kept = {token for token in kept if found[token] >= params.min_p * max(found.values())}
    if params.top_k:
        limit = sorted((values[token] for token in kept), reverse=True)[: params.top_k][-1]
        kept = {token for token in kept if values[token] >= limit}
    if params.top_p < 1:
        found = probabilities()
        mass, chosen = 0.0, set()
        for token in sorted(kept, key=lambda item: -values[item]):
            if mass >= params.top_p:
                break
            chosen.add(token)
            mass += found[token]
        kept = chosen
    found = probabilities()
    return [math.log(found[token]) if token in kept else -math.inf for token in range(len(values))]


@settings(max_examples=150, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    st.sampled_from([1.0, 0.9, 0.5]),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([(0.0, 0.0, 1.0), (0.5, 0.3, 1.0), (0.0, 0.0, 1.3)]),
    st.lists(st.integers(0, 2), max_size=4),
    st.integers(0, 10_000),
)
def test_the_logprob_is_that_of_the_distribution_sampled_from(
    logits: list[float],
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    penalties: tuple[float, float, float],
    sampled: list[int],
    seed: int,
) -> None:
    presence, frequency, repetition = penalties
    # Values that are all different by far more than float32's rounding: at a tie, which token is cut is nobody's to say.
    logits = [round(value, 2) + 0.0137 * at for at, value in enumerate(logits)]
    params = Params(
        10,
        temperature,
        top_p,
        min(top_k, len(logits)),
        min_p,
        presence,
        frequency,
        repetition,
        seed=seed,
        top_logprobs=len(logits),
        logit_bias={1: 0.5},
    )
    row = Row(params, [0], sampled, torch.Generator().manual_seed(seed))
    choice = sample(torch.tensor([logits], dtype=torch.float32), [row])[0]
    expected = reference(logits, params, [0], sampled)
    if any(abs(a - b) < 1e-3 for at, a in enumerate(expected) for b in expected[at + 1 :] if math.isfinite(a) and math.isfinite(b)):
        return
    assert math.isfinite(expected[choice.token_id])
    assert choice.logprob == pytest.approx(expected[choice.token_id], abs=1e-4)
    for token, value in choice.top:
        assert value == pytest.approx(expected[token], abs=1e-4)


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).repeat(20_000, 1)
    rows = [Row(Params(1), [], [])] * 20_000
    counts = torch.bincount(torch.tensor([choice.token_id for choice in sample(logits, rows)])) / 20_000
    assert counts.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


def test_temperature_zero_takes_the_likeliest_and_tells_its_untempered_logprob() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    choice = sample(logits.clone(), [Row(Params(1, temperature=0.0, top_p=0.5), [], [])])[0]
    assert choice.token_id == 1
    assert choice.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_rows_of_one_batch_do_not_touch_each_other() -> None:
    logits = torch.randn(3, 50)
    rows = [
        Row(Params(1, temperature=0.5, seed=1), [], [], torch.Generator().manual_seed(1)),
        Row(Params(1, top_k=3, seed=2), [], [], torch.Generator().manual_seed(2)),
        Row(Params(1, temperature=0.0), [], []),
    ]
    alone = [
        sample(logits[at : at + 1].clone(), [Row(row.params, [], [], torch.Generator().manual_seed(row.params.seed or 0))])[0]
        for at, row in enumerate(rows)
    ]
    together = sample(logits.clone(), rows)
    assert [choice.token_id for choice in together] == [choice.token_id for choice in alone]
    assert [choice.logprob for choice in together] == pytest.approx([choice.logprob for choice in alone], abs=1e-6)
