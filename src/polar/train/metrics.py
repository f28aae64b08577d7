"""A run's numbers by step: always as JSON lines, and wherever else they are wanted. Knows no model and no loss.

    <folder>/metrics.jsonl    {"step": 3, "time": 1764489600.1, "loss": 0.71, ...}; a number that is not finite is null
    <folder>/tensorboard/     event files
    <folder>/wandb/           what Weights & Biases keeps on this machine

The JSON lines are the record: a line is written in one piece and synced, so that a run killed at any moment leaves whole lines, and one
that goes on from a checkpoint cuts those of the steps that it does again: no step stands there twice. TensorBoard is told to forget the
same steps. W&B and trackio cannot forget: in them, steps done again appear again.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.train.disk import saving

FILE = "metrics.jsonl"
_RUN_ID = "metrics.id"
_RESERVED = ("step", "time")


class Writer(Protocol):
    """Where numbers go. `values` are ints and floats, possibly not finite."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """The writers of one run, as one. Closes them as a context manager, too."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = tuple(writers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step; several calls for one step add up, a name that comes again counts as it came last.

        Raises `ValueError` for a value that is no number, and for a name that the line itself uses (`step`, `time`).
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        for writer in self._writers:
            writer.log(step, numbers)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_metrics(
    folder: Path,
    writers: Sequence[str] = (),
    *,
    resumed_step: int | None = None,
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Metrics:
    """The metrics of the run in `folder`. `writers`: any of `jsonl` (there in any case), `tensorboard`, `wandb`, `trackio`.

    `resumed_step` is the last step that the checkpoint knows: what was written of later ones is cut. -1 starts afresh, `None` keeps
    everything. `config` is shown beside the run (W&B, trackio), `name` is the run's there (default: the folder's).
    Raises `ConfigError` for a writer that does not exist, is not installed, or cannot be opened.
    """
    modules = _modules(writers)
    folder.mkdir(parents=True, exist_ok=True)
    opened: list[Writer] = [JsonLines(folder / FILE, resumed_step)]
    for one, module in modules.items():
        opened.append(_OTHERS[one](module, folder, resumed_step, dict(config or {}), name or folder.resolve().name))
    return Metrics(opened)


def read_metrics(folder: Path | str) -> list[dict[str, float | None]]:
    """One entry a step, in order of steps, with all of its numbers; `None` for one that was not finite. Empty where nothing was written.

    A last line that a crash cut short is left out. Raises `ConfigError` for a file that holds something else.
    """
    found: dict[int, dict[str, float | None]] = {}
    for line in _lines(Path(folder) / FILE):
        found.setdefault(line["step"], {}).update(line)
    return [found[step] for step in sorted(found)]


class JsonLines:
    """Appends a line a call, each durable when `log` returns. Opening it and `log` raise `SaveFailed`."""

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        keep = [line for line in _lines(path) if resumed_step is None or line["step"] <= resumed_step]
        whole = b"".join(map(_encoded, keep))
        self._folder = path.parent
        with saving("the metrics", self._folder):
            if path.exists() and path.read_bytes() != whole:
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                with temporary.open("wb") as file:
                    file.write(whole)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        left = memoryview(_encoded({"step": step, "time": time.time(), **values}))
        with saving("the metrics", self._folder):
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class TensorBoard:
    """`folder/tensorboard`; `tensorboard --logdir` shows it."""

    def __init__(self, module: Any, folder: Path, resumed_step: int | None, config: JsonObject, name: str) -> None:
        purge = None if resumed_step is None else resumed_step + 1
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run of W&B for a folder, also over restarts. `WANDB_PROJECT` (default: polar), `WANDB_MODE` and the rest are W&B's own.

    The axis is our step, not W&B's count of calls, which takes no step twice and drops what it takes for the past.
    """

    def __init__(self, module: Any, folder: Path, resumed_step: int | None, config: JsonObject, name: str) -> None:
        try:
            self._run = module.init(
                project=os.environ.get("WANDB_PROJECT", "polar"),
                id=_run_id(folder),
                name=name,
                dir=str(folder),
                config=config,
                resume="allow",
            )
        except module.errors.Error as error:
            raise ConfigError(f"wandb: {error} (WANDB_MODE=offline writes to {folder / 'wandb'} only)") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """One run of trackio for a folder, also over restarts, where trackio keeps them (`TRACKIO_DIR`); `trackio show` shows it."""

    def __init__(self, module: Any, folder: Path, resumed_step: int | None, config: JsonObject, name: str) -> None:
        self._run = module.init(
            project=os.environ.get("TRACKIO_PROJECT", "polar"), name=f"{name}-{_run_id(folder)}", config=config, resume="allow", embed=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_OTHERS: dict[str, Callable[[Any, Path, int | None, JsonObject, str], Writer]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
_MODULES = {"tensorboard": "torch.utils.tensorboard"}


def check_writers(writers: Sequence[str]) -> None:
    """Raises `ConfigError` for one that does not exist or is not installed."""
    _modules(writers)


def _modules(writers: Sequence[str]) -> dict[str, Any]:
    """Of those beside the JSON lines, each once."""
    unknown = sorted(set(writers) - {"jsonl", *_OTHERS})
    if unknown:
        raise ConfigError(f"no metrics writer is called {', '.join(unknown)}; there are: jsonl, {', '.join(_OTHERS)}")
    return {one: _module(one) for one in dict.fromkeys(writers) if one != "jsonl"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        raise ConfigError(f"the metrics writer {name} needs its library: pip install {name} ({error})") from error


def _run_id(folder: Path) -> str:
    """The same for every run in this folder, and for no other folder."""
    path = folder / _RUN_ID
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _number(name: str, value: Any) -> float:
    if name in _RESERVED:
        raise ValueError(f"a metric cannot be called {name}: each line has its own")
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]  # an int stays one
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the metric {name} is no number: {value!r}") from error


def _encoded(line: Mapping[str, Any]) -> bytes:
    """orjson writes what is not finite as null."""
    return orjson.dumps(dict(line), option=orjson.OPT_APPEND_NEWLINE)


def _lines(path: Path) -> list[JsonObject]:
    """All whole lines; none where there is no file. Raises `ConfigError` for a line that is none of ours."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    found: list[JsonObject] = []
    for number, text in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            line = orjson.loads(text)
            if type(line["step"]) is not int:
                raise ValueError("its step is no whole number")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a line of metrics ({error})") from error
        found.append(line)
    return found
