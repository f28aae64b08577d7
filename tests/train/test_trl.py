"""Against TRL's `GRPOTrainer` on the same rows and weights: from rewards to gradients, its own code beside ours, on float64 weights
(TRL's LM head gives float32 log-probabilities whatever the weights are, which bounds how near two can come).

TRL gets the sampled ids by its `rollout_func`, scores them (advantages, proximal and reference log-probabilities, importance ratios) and
computes its loss; then the weights are moved a little, so that ratios are not 1 and clips have something to clip.

The names differ: `grpo` is `sequence_mean`, `dapo` is `token_mean` (so is `bnpo` where a batch is one micro-batch), `dr_grpo` is
`fixed_length`; `delta` is `dual_clip`, `vllm_importance_sampling_clip_max` is `tis_cap`. TRL divides by the deviation of a sample (n - 1),
Polar by that of the group (n): a constant factor, taken out here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_qwen3 import WIDER, tiny_qwen3
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from polar.train.advantages import Advantage, Rollout, advantages
from polar.train.loss import Loss, grpo_loss
from polar.train.policy import Policy, Way
from polar.train.rows import Row, row_of
from polar.train.weights import Aggregation, weights
from polar.trajectory import Span, Trace

trl = pytest.importorskip("trl")

VOCABULARY = 40
GROUPS, SAMPLES = 2, 4
LONGEST = 12
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Setting:
    """The same thing in both languages."""

    loss_type: str = "dapo"
    aggregation: Aggregation = "token_mean"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    beta: float = 0.0
    delta: float | None = None
    cap: float | None = None
    scaled: bool = True
    way: Way = "shared"
    unbiased_kl: bool = False

    @property
    def loss(self) -> Loss:
        return Loss(self.epsilon, self.epsilon_high, self.cap, self.beta, self.delta, self.unbiased_kl)


SETTINGS = {
    "dapo": Setting(),
    "grpo": Setting("grpo", "sequence_mean"),
    "bnpo": Setting("bnpo", "token_mean"),
    "dr_grpo": Setting("dr_grpo", "fixed_length", scaled=False),
    "symmetric clip": Setting(epsilon=0.1, epsilon_high=0.1),
    "tight clip": Setting("grpo", "sequence_mean", epsilon=0.01, epsilon_high=0.02),
    "kl": Setting(beta=0.04),
    "kl, unbiased": Setting("grpo", "sequence_mean", beta=0.04, unbiased_kl=True),
    "dual clip": Setting(delta=1.5),
    "importance sampling": Setting(cap=2.0),
    "importance sampling, tight": Setting("grpo", "sequence_mean", cap=0.9),
    "all at once": Setting("dr_grpo", "fixed_length", 0.05, 0.1, 0.1, 1.3, 1.1, False),
    "packed": Setting(way="packed"),
    "plain": Setting("grpo", "sequence_mean", way="plain"),
}


@dataclass(frozen=True)
class Samples:
    """What was sampled: for each of `GROUPS` * `SAMPLES` rollouts its prompt, its completion with tool output between, and its reward."""

    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    recorded: list[list[float]]
    rewards: list[float]


def sampled() -> Samples:
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCABULARY, 5 + 3 * group).tolist() for group in range(GROUPS) for _ in range(SAMPLES)]
    lengths = [LONGEST - 2 * (number % 4) for number in range(len(prompts))]
    completions = [random.integers(3, VOCABULARY, length).tolist() for length in lengths]
    masks = [[int(not 3 <= place < 3 + number % 3) for place in range(length)] for number, length in enumerate(lengths)]
    recorded = [random.normal(-3.7, 0.4, length).astype(np.float32).tolist() for length in lengths]
    return Samples(prompts, completions, masks, recorded, random.random(len(prompts)).tolist())


def model_at(folder: Path) -> Any:
    made = tiny_qwen3(VOCABULARY, initializer_range=0.2, bos_token_id=None, eos_token_id=1, pad_token_id=0, **WIDER)
    made.to(torch.float64).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w2"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")


def their_trainer(model: Any, samples: Samples, setting: Setting, folder: Path) -> Any:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": samples.prompts,
            "completion_ids": samples.completions,
            "logprobs": samples.recorded,
            "env_mask": samples.masks,
        }

    def reward(**_: Any) -> list[float]:
        return samples.rewards

    args = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        loss_type=setting.loss_type,
        epsilon=setting.epsilon,
        epsilon_high=setting.epsilon_high,
        delta=setting.delta,
        beta=setting.beta,
        use_bias_correction_kl=setting.unbiased_kl,
        scale_rewards="group" if setting.scaled else "none",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=setting.cap or 2.0,
        num_iterations=2,  # so that the proximal log-probabilities are kept
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": f"w{group}"} for group in range(GROUPS)])
    trainer = trl.GRPOTrainer(model, reward, args, data, processing_class=tokenizer(), rollout_func=rollout)
    trainer.current_gradient_accumulation_steps = 1
    if setting.cap is not None:  # vLLM itself has no part in the loss; nothing is generated here
        trainer.use_vllm, trainer.vllm_importance_sampling_correction, trainer._last_loaded_step = True, True, 0
    return trainer


def our_rows(samples: Samples, setting: Setting) -> list[Row]:
    names = [f"{number}" for number in range(len(samples.rewards))]
    rollouts = [Rollout(name, str(number // SAMPLES), samples.rewards[number]) for number, name in enumerate(names)]
    factor = ((SAMPLES - 1) / SAMPLES) ** 0.5 if setting.scaled else 1.0
    how = Advantage(scale="std" if setting.scaled else "none", epsilon=1e-4 * factor)
    earned = advantages(rollouts, how).values
    traces = []
    for number, name in enumerate(names):
        prompt, completion = samples.prompts[number], samples.completions[number]
        mask = np.array([0] * len(prompt) + samples.masks[number], np.bool_)
        recorded = np.array([0.0] * len(prompt) + samples.recorded[number], np.float32) * mask
        ids = np.array(prompt + completion, np.int32)
        traces.append(Trace(name, ids, mask, recorded, (Span(0, len(prompt), len(ids)),), rollout_id=name))
    weighed = weights(traces, [True] * len(traces), aggregation=setting.aggregation, fixed_length=LONGEST)
    return [
        row_of(trace, weights=share, advantage=earned[trace.session] * factor) for trace, share in zip(traces, weighed.rows, strict=True)
    ]


def moved(model: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_loss_and_gradients_are_those_of_trl(setting: Setting, tmp_path: Path) -> None:
    samples, theirs = sampled(), model_at(tmp_path)
    ours, start = Policy(copy.deepcopy(theirs), temperature=TEMPERATURE), Policy(copy.deepcopy(theirs), temperature=TEMPERATURE)

    trainer = their_trainer(theirs, samples, setting, tmp_path)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": f"w{n // SAMPLES}"} for n in range(GROUPS * SAMPLES)])
    moved(trainer.model)
    their_loss = trainer.compute_loss(trainer.model, inputs)
    their_loss.backward()

    moved(ours.model)
    rows = our_rows(samples, setting)
    with torch.no_grad():
        before = torch.cat(start.logprobs(rows, setting.way))
    terms = grpo_loss(
        torch.cat(ours.logprobs(rows, setting.way)),
        torch.cat([torch.full((len(row.places),), row.advantage, dtype=torch.float64) for row in rows]),
        torch.cat([row.weights.double() for row in rows]),
        torch.cat([row.recorded.double() for row in rows]),
        old=before,
        reference=before if setting.beta else None,
        how=setting.loss,
    )
    terms.loss.backward()

    assert abs(their_loss.item() - terms.loss.item()) < 1e-5
    expected = gradients(trainer.model)
    assert max(float(one.abs().max()) for one in expected.values()) > 1e-2
    for name, gradient in gradients(ours.model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5, msg=name)
    reach: dict[str, Callable[[], bool]] = {
        "tight clip": lambda: bool(terms.clipped > 0),
        "dual clip": lambda: bool(terms.clipped > 0),
        "importance sampling": lambda: bool(terms.capped > 0),
    }
    for name, reached in reach.items():
        assert setting != SETTINGS[name] or reached(), f"nothing was tried: {name}"
