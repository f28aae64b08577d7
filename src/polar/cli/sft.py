"""`polar sft`: a supervised warm start on exported data."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from polar.cli.output import INTERRUPTED, out, say
from polar.errors import ConfigError
from polar.train.sft_config import load


def sft(
    model: Annotated[str | None, typer.Argument(help="A model's folder, or tiny-qwen3.", show_default=False)] = None,
    data: Annotated[
        str | None, typer.Argument(help="A folder that `polar export` wrote, or a Parquet or JSON lines file.", show_default=False)
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The run's folder; an interrupted run goes on in its own.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file of these settings; flags win over it.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data. [default: 1]")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Ends the run earlier than the epochs do.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate. [default: 1e-5; with LoRA, ten times as much is usual]")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a step, in whole rows. [default: 32768]")] = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens that go through the model at once: memory. [default: 16384]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Leave out longer rows. [default: the model's context]")] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine, linear or constant. [default: cosine]")] = None,
    warmup_share: Annotated[float | None, typer.Option(help="Of all steps. [default: 0.03]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[default: 0.01]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 (with float32 masters). [default: float32]")] = None,
    lora: Annotated[int | None, typer.Option("--lora", help="Train a LoRA adapter of this rank instead of all weights.")] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--gradient-checkpointing", help="Less memory, a third more arithmetic.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="What is trained. [default: train]")] = None,
    validation: Annotated[
        str | None, typer.Option(help="The split whose loss is watched; none for none. [default: validation, else test]")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between validation losses. [default: each epoch]")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints. [default: 100]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of rows. [default: 0]")] = None,
    renderer: Annotated[str | None, typer.Option(help="For conversations without ids. [default: by the model's template]")] = None,
    any_tokenizer: Annotated[
        bool | None, typer.Option("--any-tokenizer", help="Take ids though another tokenizer or template made them.")
    ] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="jsonl, tensorboard, wandb or trackio; repeatable.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, NAME=VALUE with a YAML value; repeatable.")] = None,
) -> None:
    """Fine-tune a model on recorded sessions (SFT), as a warm start. Ctrl-C writes a checkpoint; the same command goes on."""
    given: dict[str, Any] = {
        "model": model,
        "data": data,
        "output": output,
        "epochs": epochs,
        "max_steps": max_steps,
        "lr": lr,
        "batch_tokens": batch_tokens,
        "token_budget": token_budget,
        "max_tokens": max_tokens,
        "schedule": schedule,
        "warmup_share": warmup_share,
        "weight_decay": weight_decay,
        "dtype": dtype,
        "lora": None if lora is None else {"r": lora, "alpha": 2.0 * lora},
        "gradient_checkpointing": gradient_checkpointing,
        "split": split,
        "validation": validation,
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
        "seed": seed,
        "renderer": renderer,
        "any_tokenizer": any_tokenizer,
        "metrics": metrics or None,
    }
    settings = load(config, given | _set(set_))
    try:
        from transformers.utils.logging import disable_progress_bar

        from polar.train.sft import run
    except ImportError as error:
        raise ConfigError(f"polar sft needs torch and transformers: pip install -e '.[train]' (in Polar's folder) ({error})") from error
    disable_progress_bar()  # a bar for each checkpoint would stand between the lines of progress
    with _stopping() as stop:
        report = run(settings, say=say, stop=stop)
    if not report.finished:
        raise typer.Exit(INTERRUPTED if stop() else 0)
    if report.losses:
        first, last = min(report.losses), max(report.losses)
        out.print(f"validation loss {report.losses[first]:.4f} (step {first}) to {report.losses[last]:.4f} (step {last})", highlight=False)
    if report.model is not None:
        out.print(str(report.model), highlight=False, soft_wrap=True)


def _set(given: list[str] | None) -> dict[str, Any]:
    found = {}
    for item in given or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set {item}: write NAME=VALUE")
        try:
            found[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {item}: the value is not YAML: {error}") from error
    return found


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came. The first one asks for a stop after the step, a second SIGINT ends the process."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        say("stopping after this step; again to stop at once (then what came after the last checkpoint is done again)")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
