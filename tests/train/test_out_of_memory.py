"""Memory that is used up: one error that says what takes less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sft_samples import config

from polar.errors import OutOfMemory
from polar.train import sft
from polar.train.learner import Learner
from polar.train.memory import enough_memory


def test_main_memory_that_is_used_up_is_one_error() -> None:
    with pytest.raises(OutOfMemory, match=r"\(4000000000000000 bytes more were asked for\).*token_budget.*goes on"), enough_memory():
        torch.empty(10**15)


def test_a_device_whose_memory_is_used_up_is_one_error() -> None:
    words = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 3.00 GiB of which 1.00 GiB is free."
    with pytest.raises(OutOfMemory, match=r"\(2.00 GiB more were asked for\)"), enough_memory():
        raise torch.OutOfMemoryError(words)


def test_another_error_of_torch_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shape"), enough_memory():
        torch.empty(2).view(3)


def test_a_step_that_does_not_fit_ends_the_run_with_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "step", lambda *_: torch.empty(10**15))
    with pytest.raises(OutOfMemory):
        sft.run(config(tmp_path), say=lambda line: None)
