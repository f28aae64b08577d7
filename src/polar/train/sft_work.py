"""What a supervised run is before its model is loaded: its folder, its rows, how many steps, and where it goes on. Knows no loss."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.engine.models import resolve
from polar.errors import ConfigError
from polar.tokens.tokenizer import load_tokenizer
from polar.train import checkpoints
from polar.train.learner import Optimisation
from polar.train.loading import LoraSettings
from polar.train.sft_config import NUMBERS_NOT, SftConfig
from polar.train.sft_data import Rows, batches, read_rows, splits_of

SETTINGS = "sft.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_VALIDATION = ("validation", "test")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loading:
    """What all processes need: arguments of `load_policy`, and how the optimiser goes."""

    model: dict[str, Any]
    optimisation: Optimisation


@dataclass(frozen=True, slots=True)
class Work:
    """What the leader knows before the model is loaded. `place`: the checkpoint to go on from; `steps`: of the whole run."""

    output: Path
    source: Path
    data: Rows
    validation: Rows | None
    steps: int
    place: Path | None
    finished: bool
    loading: Loading


def prepared(config: SftConfig, say: Say) -> Work:
    """Reads the data and finds out where the run is. Raises `ConfigError` for data or a folder that does not fit."""
    source, output = resolve(config.model), Path(config.output)
    data, validation = _read(config, source, say)
    lengths = [len(sample) for sample in data.samples]
    steps = sum(len(batches(lengths, config.batch_tokens, epoch=epoch, seed=config.seed)) for epoch in range(config.epochs))
    steps = min(steps, config.max_steps or steps)
    _identify(output, config, data, validation)
    place = checkpoints.latest(output / CHECKPOINTS)
    finished = place is not None and checkpoints.load_run(place).batches >= steps and (output / MODEL).is_dir()
    lora = None if config.lora is None else LoraSettings(**config.lora.model_dump())
    saved = None if place is None else place / "model"
    model: dict[str, Any] = {
        "model": str(source if saved is None or lora is not None else saved),
        "adapter": saved if lora is not None else None,
        "lora": lora,
        "dtype": config.dtype,
        "attention": config.attention,
        "gradient_checkpointing": config.gradient_checkpointing,
    }
    optimisation = Optimisation(
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        schedule=config.schedule,
        warmup_steps=round(config.warmup_share * steps),
        total_steps=steps,
        max_grad_norm=config.max_grad_norm,
        token_budget=config.token_budget,
    )
    return Work(output, source, data, validation, steps, place, finished, Loading(model, optimisation))


def _read(config: SftConfig, source: Path, say: Say) -> tuple[Rows, Rows | None]:
    from transformers import AutoConfig

    data, shape = Path(config.data), AutoConfig.from_pretrained(str(source)).get_text_config()
    tokenizer = load_tokenizer(source)
    context = int(getattr(shape, "max_position_embeddings", 0) or 1 << 31)

    def rows(split: str) -> Rows:
        return read_rows(
            data,
            split,
            tokenizer,
            vocabulary=int(shape.vocab_size),
            max_tokens=config.max_tokens or context,
            renderer=config.renderer,
            any_tokenizer=config.any_tokenizer,
        )

    names = splits_of(data)
    watched = config.validation or next((name for name in _VALIDATION if name in names and name != config.split), "none")
    found = {split: rows(split) for split in (config.split, watched) if split != "none"}
    for split, one in found.items():
        say(f"{split}: {len(one.samples):,} rows, {one.tokens:,} tokens, {one.trained:,} of them trained")
        for reason, count in one.left_out.items():
            say(f"{split}: {count:,} rows left out: {reason}")
        if not one.samples:
            raise ConfigError(f"{data}: there is nothing to train in the split {split}" if split == config.split else f"{split} is empty")
    return found[config.split], found.get(watched)


def _identify(output: Path, config: SftConfig, data: Rows, validation: Rows | None) -> None:
    """Says what run the folder holds, or checks that it is this one. Raises `ConfigError` where it is not."""
    mine = {**config.numbers(), "rows": data.fingerprint(), "validation_rows": None if validation is None else validation.fingerprint()}
    place = output / SETTINGS
    if place.is_file():
        try:
            theirs = {name: value for name, value in json.loads(place.read_text()).items() if name not in NUMBERS_NOT}
            changed = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{place} is not of a run of polar sft: {error}") from error
        if changed:
            raise ConfigError(
                f"{output} holds a run with another {', '.join(changed)}: go on with its own settings, or name another output"
            )
        return
    temporary = place.with_name(f".{SETTINGS}")
    temporary.write_text(json.dumps(mine, indent=2) + "\n")
    temporary.replace(place)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """The folder, made, and this process's alone. Raises `ConfigError` where it holds something else or another process trains in it."""
    if output.exists() and (not output.is_dir() or (_holds_anything(output) and not (output / SETTINGS).is_file())):
        raise ConfigError(f"{output} exists and is no run of polar sft: name another folder")
    output.mkdir(parents=True, exist_ok=True)
    with opened(output) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in {output}") from None
        yield


def _holds_anything(folder: Path) -> bool:
    """Beyond settings that were being written when their process was killed."""
    return any(path.name != f".{SETTINGS}" for path in folder.iterdir())


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a file or a folder, for what is done with it as a whole."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
