"""Each term of the loss against values worked out by hand, and the gradient against finite differences in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.train.loss import Loss, grpo_loss

PLAIN = Loss(tis_cap=None)


def t(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_one_step_a_batch_is_the_policy_gradient() -> None:
    new = t(-1.0, -2.0, grad=True)
    terms = grpo_loss(new, t(2.0, -1.0), t(0.5, 0.5), t(-1.0, -2.0), how=PLAIN)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.5)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped"),
    [(1.5, 1.0, 1.28, 1), (0.5, 1.0, 0.5, 0), (0.5, -1.0, -0.8, 1), (1.5, -1.0, -1.5, 0), (1.1, 1.0, 1.1, 0)],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio: float, advantage: float, surrogate: float, clipped: int) -> None:
    old = -1.0
    terms = grpo_loss(t(old + math.log(ratio)), t(advantage), t(1.0), t(old), old=t(old), how=PLAIN)
    assert -terms.loss.item() == pytest.approx(surrogate)
    assert terms.clipped.item() == clipped


def test_a_negative_advantage_is_bounded_by_the_dual_clip() -> None:
    terms = grpo_loss(t(math.log(10) - 1), t(-1.0), t(1.0), t(-1.0), old=t(-1.0), how=Loss(tis_cap=None, dual_clip=3.0))
    assert terms.loss.item() == pytest.approx(3.0)


def test_the_correction_is_cut_at_its_cap_and_carries_no_gradient() -> None:
    new = t(-1.0, -1.0, grad=True)
    recorded = t(-1.0 - math.log(4), -1.0 + math.log(2))
    terms = grpo_loss(new, t(1.0, 1.0), t(1.0, 1.0), recorded, how=Loss(tis_cap=2.0))
    terms.loss.backward()
    assert -terms.loss.item() == pytest.approx(2.0 + 0.5)
    assert terms.capped.item() == 1
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.0, -0.5])


def test_k3_is_exact_and_never_negative() -> None:
    terms = grpo_loss(t(-1.0), t(0.0), t(1.0), t(-1.0), reference=t(-1.5), how=Loss(beta=0.1))
    assert terms.loss.item() == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1))
    with pytest.raises(ValueError, match="reference"):
        grpo_loss(t(-1.0), t(0.0), t(1.0), t(-1.0), how=Loss(beta=0.1))


def test_the_unbiased_kl_has_the_gradient_of_the_divergence_itself() -> None:
    """Over a distribution of three tokens, whose expectation can be taken exactly; the plain one has another gradient."""
    logits = t(0.3, -0.2, 0.9).requires_grad_()
    reference = torch.log_softmax(t(1.0, 0.0, -0.5), 0)
    new = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits, retain_graph=True)
    found = []
    for unbiased in (True, False):
        how = Loss(beta=1.0, tis_cap=None, unbiased_kl=unbiased)
        terms = grpo_loss(new, torch.zeros_like(new), new.detach().exp(), new.detach(), reference=reference, how=how)
        found.append(torch.autograd.grad(terms.loss, logits, retain_graph=True)[0])
    torch.testing.assert_close(found[0], exact)
    assert not torch.allclose(found[1], exact, atol=1e-2)


def test_what_weighs_nothing_may_hold_anything() -> None:
    new = t(-1.0, float("nan"), grad=True)
    terms = grpo_loss(new, t(1.0, float("inf")), t(1.0, 0.0), t(-1.0, float("nan")))
    terms.loss.backward()
    assert math.isfinite(terms.loss.item())
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("drift", [-200.0, 200.0])
def test_a_token_whose_ratio_is_beyond_all_numbers_leaves_the_others_their_gradient(drift: float, advantage: float) -> None:
    """Elsewhere a log-ratio of 89 and more was infinite after `exp`, and the gradient of the whole batch NaN, even where the clip took the
    token away (THUDM/slime#2198, radixark/miles#1363, PrimeIntellect-ai/prime-rl#2972)."""
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0 - drift])
    terms = grpo_loss(new, torch.tensor([1.0, advantage]), torch.ones(2), old, old=old, how=Loss())
    terms.loss.backward()
    assert new.grad is not None
    assert new.grad[0] == -1.0
    assert math.isfinite(new.grad[1])
    assert all(math.isfinite(float(value)) for value in (terms.loss, terms.ratio, terms.mismatch))


def test_a_policy_far_from_its_reference_is_led_back_by_a_finite_gradient() -> None:
    """k3 was infinite there, and so was the loss (huggingface/trl#3015)."""
    new = torch.tensor([-200.0], requires_grad=True)
    terms = grpo_loss(new, torch.zeros(1), torch.ones(1), torch.tensor([-200.0]), reference=torch.tensor([-1.0]), how=Loss(beta=0.1))
    terms.loss.backward()
    assert new.grad is not None
    assert math.isfinite(terms.loss.item())
    assert -math.inf < new.grad.item() < 0


@pytest.mark.parametrize("wrong", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"tis_cap": 0.0}, {"dual_clip": 1.0}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Loss(**wrong)  # type: ignore[arg-type]


NUMBERS = st.floats(-3, -0.05)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.floats(-2, 2)), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_the_gradient_is_that_of_finite_differences(rows: list[tuple[float, ...]], with_old: bool, dual: bool) -> None:
    new, old, recorded, reference, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    how = Loss(beta=0.05, dual_clip=3.0 if dual else None)
    ratio = torch.exp(new - old)
    edges = torch.tensor([1 - how.clip_low, 1 + how.clip_high, 3.0], dtype=torch.float64)
    if with_old and (ratio[:, None] - edges).abs().min() < 1e-4:
        return  # at a kink there is no derivative to compare with
    weights = torch.full_like(new, 1 / len(new))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return grpo_loss(x, advantage, weights, recorded, old=old if with_old else x0, reference=reference, how=how).loss

    x0 = new.clone()
    assert torch.autograd.gradcheck(loss, (new.clone().requires_grad_(),), eps=1e-7, atol=1e-5)


@given(st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch(parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    new, recorded, advantage = (torch.randn(20, dtype=torch.float64, generator=generator) for _ in range(3))
    weights = torch.full_like(new, 1 / 20)
    whole = grpo_loss(new, advantage, weights, recorded).loss
    cut = sum(grpo_loss(*chunk).loss for chunk in zip(*(x.chunk(parts) for x in (new, advantage, weights, recorded)), strict=True))
    assert whole.item() == pytest.approx(float(cut))
