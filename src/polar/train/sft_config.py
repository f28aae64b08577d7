"""`sft.yaml`: what `polar sft` does. The schema only, and no torch: a wrong setting is said before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from polar.engine.models import known_models
from polar.errors import ConfigError
from polar.rollout.settings import read
from polar.train.config import LoraSection, Schedule, Writer, decays
from polar.train.settings import problems, told

Dtype = Literal["float32", "bfloat16"]

NUMBERS_NOT = frozenset(
    {
        *("data", "any_tokenizer", "output", "metrics", "checkpoint_every", "keep", "evaluate_every"),
        *("token_budget", "gradient_checkpointing", "attention"),
    }
)
"""Settings that an interrupted run may go on with changed: no weight depends on them, those of memory aside, which change the order of sums
alone. Of the data, its rows count, not its place."""


class SftConfig(BaseModel):
    """The whole file. Each setting is also a flag, with dashes for underscores."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    """A folder in Hugging Face's format, or a model that `polar engine` knows (`tiny-qwen3`)."""
    data: str
    """A folder that `polar export` wrote, in any of its forms, or a Parquet or JSON lines file of such rows."""
    output: str
    """The run's folder; one that holds this run, unfinished, is gone on with."""
    split: str = "train"
    validation: str | None = None
    """The split whose loss is watched and never trained; `None`: `validation` or `test`, where the data has one; `none`: no split."""
    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    """Ends the run, and the schedule, earlier than the epochs do."""
    batch_tokens: int = Field(default=32_768, ge=1)
    """Tokens of a step, in whole rows: context counts as well as what is trained. A longer row is a step of its own."""
    token_budget: int = Field(default=16_384, ge=1)
    """Tokens that go through the model at once. Changes memory and speed, not the result."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longer rows are left out; `None`: those longer than the model's context."""
    lr: float = Field(default=1e-5, gt=0)
    schedule: Schedule = "cosine"
    """`linear` and `cosine` reach 0 at the last step."""
    warmup_share: float = Field(default=0.03, ge=0, lt=1)
    """Of all steps."""
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    dtype: Dtype = "float32"
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    lora: LoraSection | None = None
    """`lora: {}` takes its defaults."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the order of rows, and of a new adapter's weights."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between losses of the validation split; 0: at the start, after each epoch and at the end."""
    checkpoint_every: int = Field(default=100, ge=1)
    """Steps between checkpoints. A killed run goes on from the last one; a stopped one writes one first."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    renderer: str | None = None
    """For conversations without ids; `None`: by the model's template."""
    any_tokenizer: bool = False
    """Take ids though the export says that another tokenizer or template made them: for a tokenizer that was only saved anew."""
    metrics: list[Writer] = Field(default=["jsonl"])

    _decays = field_validator("betas")(decays)

    @model_validator(mode="after")
    def _fits(self) -> SftConfig:
        if self.validation == self.split:
            raise ValueError(f"validation: {self.split} is what is trained; a loss on it says nothing")
        return self

    def numbers(self) -> dict[str, Any]:
        """What the weights depend on."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in NUMBERS_NOT}


def load(path: Path | None, overrides: Mapping[str, Any]) -> SftConfig:
    """The settings of a file, with `overrides` that are not `None` over them. Raises `ConfigError` with a line for each wrong one, a model
    or data that are not there included."""
    given = {name: value for name, value in overrides.items() if value is not None}
    settings = {**read(path), **given}
    absent = list(_absent(settings))
    try:
        config = SftConfig.model_validate(settings)
    except ValidationError as error:
        raise _refused([*problems(error, SftConfig), *absent], path, given) from error
    if absent:
        raise _refused(absent, path, given)
    return config


def _refused(wrong: list[str], path: Path | None, given: Mapping[str, Any]) -> ConfigError:
    return ConfigError(told(wrong, str(path) if path else "the settings", list(given), "the command line"))


def _absent(settings: Mapping[str, Any]) -> Iterator[str]:
    model, data, known = settings.get("model"), settings.get("data"), known_models()
    if isinstance(model, str) and model not in known and not (Path(model).expanduser() / "config.json").is_file():
        yield f"model: {model} is neither a folder with a config.json nor one of {', '.join(known)}"
    if isinstance(data, str) and not Path(data).exists():
        yield f"data: there is no file or folder {data}"
