"""Chunked log-probabilities equal the plain ones, gradients too, and no large matrix is ever made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from polar.train.logprobs import token_logprobs


def case(n: int, d: int, v: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 31 + v)
    hidden = torch.randn(n, d, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, v, (n,), generator=generator)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 12), st.floats(0.3, 2.0))
def test_values_and_gradients_equal_the_plain_ones(n: int, chunk: int, v: int, temperature: float) -> None:
    hidden, weight, targets = case(n, 4, v)
    scale = torch.linspace(-1, 2, n, dtype=torch.float64)
    plain = torch.log_softmax(hidden @ weight.T / temperature, -1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((plain * scale).sum(), (hidden, weight))
    found = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(found, plain)
    for ours, theirs in zip(torch.autograd.grad((found * scale).sum(), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_is_summed_in_single() -> None:
    hidden, weight, targets = case(6, 8, 50, torch.bfloat16)
    found = token_logprobs(hidden, weight, targets)
    assert found.dtype == torch.float32
    exact = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, exact)
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.size = max(self.size, one.numel())
        return result


def test_no_tokens_by_vocabulary_matrix_exists_forward_or_backward() -> None:
    hidden, weight, targets = case(64, 4, 1000, torch.float32)
    with Largest() as largest:
        token_logprobs(hidden, weight, targets, chunk=8).sum().backward()
    assert largest.size == 8 * 1000


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="over 0"):
        token_logprobs(*case(1, 2, 3), temperature=0.0)
