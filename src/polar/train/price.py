"""What a run will take, before it is begun: sessions, tokens, arithmetic, memory, hours. Knows no torch and starts nothing.

Every figure says where it is from: `measured` (results of sessions like these, or the steps that this very run has made already), `stated`
(the settings' section `price`), `assumed` (a round number of ours, to be replaced), or `exact` (it follows from the settings). What is
reckoned from several is as sure as the least sure of them. Nothing here knows how rewards will develop.

Arithmetic of a step: 6 FLOP a parameter and row token for forward and backward (4 for one that is frozen under an adapter), 2 more with
gradient checkpointing and for each further forward pass (minibatches' proximal policy, a reference): Kaplan et al. 2020, arXiv:2001.08361,
section 2.1; attention's own is left out. Of experts, those that a token goes through count.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from polar.errors import ConfigError
from polar.train.checks import check, check_recorded
from polar.train.config import TrainConfig
from polar.train.curriculum import split
from polar.train.groups import Group, teaches
from polar.train.metrics import read_metrics
from polar.train.place import CONFIG, place_of
from polar.train.requests import Requests
from polar.train.source import read_groups

Origin = Literal["exact", "measured", "stated", "assumed", "unknown"]
_SURE: tuple[Origin, ...] = ("exact", "measured", "stated", "assumed", "unknown")

EXPERTS, EXPERTS_USED = ("num_experts", "n_routed_experts", "num_local_experts"), ("num_experts_per_tok",)
"""How config.json calls the number of a layer's experts, and of those that a token goes through."""
ASSUMED: Mapping[str, float] = {"sampled_tokens": 2_000.0, "row_tokens": 12_000.0, "session_seconds": 120.0, "teaching": 0.5}
"""Of a coding session of a few turns. Stated or measured figures are worth more than these."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` of `None`: it cannot be told, and `why` says what would be needed."""

    name: str
    value: float | None
    unit: str
    origin: Origin
    why: str = ""


@dataclass(frozen=True, slots=True)
class Price:
    """In the order in which they are shown."""

    figures: tuple[Figure, ...]

    def __getitem__(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


def price(config: TrainConfig, measured: Path | None = None) -> Price:
    """Raises `ConfigError` for settings that the run would refuse, too, and for a file of results that is none."""
    check(config)
    evaluated = 0
    if config.tasks is not None:
        requests = Requests(config, *split(config.tasks))
        if config.rollout.url is None:  # a service elsewhere checks what it knows
            requests.check()
        evaluated = requests.evaluated * config.evaluation.samples * _evaluations(config)
    recorded = list(read_groups(Path(config.recorded))) if config.recorded is not None else []
    check_recorded(config, recorded)
    known = _Known(config, [*(read_groups(measured) if measured is not None else ()), *recorded])
    return Price(tuple(_figures(config, known, evaluated)))


class _Known:
    """What is known of a session and of a step, the surest first."""

    def __init__(self, config: TrainConfig, groups: Sequence[Group]) -> None:
        self._config = config
        results = [result for group in groups for result in group.results]
        self._measured: dict[str, float] = {}
        if results:
            rows = [sum(_length(trace) for trace in (result.trajectory or {}).get("traces", ())) for result in results]
            self._measured["sampled_tokens"] = fmean(result.sampled_tokens for result in results)
            self._measured["row_tokens"] = fmean(rows)
            seconds = fmean(result.timing.run_ms / 1000 for result in results)
            if seconds > 0:
                self._measured["session_seconds"] = seconds
            several = [group for group in groups if len(group.results) > 1]
            if several:
                share = fmean(teaches(group, config.make_advantage()) for group in several)
                self._measured["teaching"] = max(share, 1 / (len(several) + 1))
        self._measured |= _own_steps(config)

    def figure(self, name: str, unit: str) -> Figure:
        if name in self._measured:
            return Figure(name, self._measured[name], unit, "measured")
        stated = getattr(self._config.price, name, None)
        if stated is not None:
            return Figure(name, float(stated), unit, "stated")
        if name in ASSUMED:
            return Figure(name, ASSUMED[name], unit, "assumed")
        return Figure(name, None, unit, "unknown", f"state price.{name}, or measure it with a few steps")


def _figures(config: TrainConfig, known: _Known, evaluated: int) -> Iterable[Figure]:
    batch, steps = config.batch, config.steps
    sampled, row = known.figure("sampled_tokens", "tokens a session"), known.figure("row_tokens", "tokens a session")
    seconds, teaching = known.figure("session_seconds", "s a session"), known.figure("teaching", "of the groups")
    if config.advantage.zero_variance == "keep":
        teaching = Figure("teaching", 1.0, "of the groups", "exact")
    yield from (sampled, row, seconds, teaching)
    taken = _of("groups a step", min(batch.most, batch.groups / _value(teaching)), "groups", teaching)
    sessions = _of("sessions", steps * _value(taken) * batch.samples, "sessions", teaching)
    yield Figure("steps", steps, "steps", "exact")
    yield taken
    yield sessions
    yield Figure("evaluation sessions", evaluated, "sessions", "exact")
    everything = _value(sessions) + evaluated
    yield _of("tokens sampled", everything * _value(sampled), "tokens", sampled, teaching)
    trained = steps * batch.groups * batch.samples * _value(row)
    yield _of("tokens of trained rows", trained, "tokens", row)

    parameters = _parameters(config)
    yield parameters
    passes = 6 - 2 * (config.model.lora is not None) + 2 * config.model.gradient_checkpointing
    passes += 2 * (config.optimisation.minibatches > 1) + 2 * (config.loss.beta > 0)
    flop = None if parameters.value is None else passes * parameters.value * _active(config) * trained
    yield Figure("arithmetic of the steps", flop, "FLOP", _least(row, parameters), parameters.why)
    yield _memory(config, parameters)

    rolling = None if not config.live else everything * _value(seconds) / config.rollout.at_once / 3600
    if rolling is not None:
        where = "" if config.rollout.url is None else "with rollout.at_once sessions at a time; the service may have other room"
        yield Figure("time of rollouts", rolling, "h", _least(seconds, teaching), where)
    training = _training_hours(known, trained, flop, row, parameters)
    yield training
    yield _whole(config, rolling, training, seconds, teaching)


def _training_hours(known: _Known, trained: float, flop: float | None, row: Figure, parameters: Figure) -> Figure:
    speed, tflops = known.figure("train_tokens_per_second", "tokens/s"), known.figure("tflops", "TFLOP/s")
    if speed.value is not None:
        return Figure("time of steps", trained / speed.value / 3600, "h", _least(row, speed))
    if tflops.value is not None and flop is not None:
        return Figure("time of steps", flop / (tflops.value * 1e12) / 3600, "h", _least(row, tflops, parameters))
    return Figure("time of steps", None, "h", "unknown", "state price.train_tokens_per_second or price.tflops, or measure a few steps")


def _whole(config: TrainConfig, rolling: float | None, training: Figure, seconds: Figure, teaching: Figure) -> Figure:
    """With rollouts ahead of the steps the slower of the two decides; else they take turns."""
    if rolling is None:
        return Figure("time in all", training.value, "h", training.origin, training.why)
    if training.value is None:
        return Figure("time in all", None, "h", "unknown", training.why)
    together = max(rolling, training.value) if config.max_staleness else rolling + training.value
    return Figure("time in all", together, "h", _least(seconds, teaching, training))


def _memory(config: TrainConfig, parameters: Figure) -> Figure:
    """Weights, gradients and AdamW's two moments, in float32 (`polar.train.optimizer`); under bfloat16 the weights that compute as well,
    but for those in pieces, which are there a layer at a time. A KL term's reference, frozen. Activations come on top."""
    if parameters.value is None:
        return Figure("memory for the state", None, "bytes", "unknown", parameters.why)
    weight = 4 if config.model.dtype == "float32" else 2
    if config.model.lora is not None:
        return Figure("memory for the state", weight * parameters.value, "bytes", "exact", "of the frozen base; the adapter's is small")
    each = 16 + (weight if weight == 2 and config.model.sharding != "full" else 0) + (weight if config.loss.beta else 0)
    return Figure("memory for the state", each * parameters.value, "bytes", "exact", "over all devices; activations come on top")


def _parameters(config: TrainConfig) -> Figure:
    folder = Path(place_of(config.model.name))
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return Figure("parameters", None, "", "unknown", f"{config.model.name} is no folder here")
    return Figure("parameters", sum(map(_entries, files)), "", "exact")


def _active(config: TrainConfig) -> float:
    """The share of a model's parameters that a token goes through: 1 but for those with experts."""
    folder = Path(place_of(config.model.name))
    facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    facts = facts.get("text_config") or facts
    count, used = (next((facts[name] for name in names if facts.get(name)), 1) for names in (EXPERTS, EXPERTS_USED))
    files = sorted(folder.glob("*.safetensors"))
    experts, everything = (sum(_entries(file, part) for file in files) for part in (".experts.", ""))
    return 1 - experts / everything * (1 - min(1, used / count))


def _entries(file: Path, part: str = "") -> int:
    """Of all tensors in a safetensors file with `part` in their name, from its header. Raises `ConfigError`."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__" and part in name)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}") from error


def _own_steps(config: TrainConfig) -> dict[str, float]:
    """What the steps say that this run has made already."""
    if config.output is None or not (Path(config.output) / "metrics.jsonl").is_file():
        return {}
    lines = [line for line in read_metrics(Path(config.output)) if line.get("tokens/rows") and line.get("time/step_s")]

    def total(name: str) -> float:
        return sum(float(line.get(name) or 0) for line in lines)

    rows, seconds, sampled, sessions = total("tokens/rows"), total("time/step_s"), total("tokens/sampled"), total("sessions")
    groups, taught = total("groups"), total("groups/taught")
    known = {"train_tokens_per_second": rows / seconds} if seconds else {}
    if sampled and sessions:
        known["sampled_tokens"] = sampled / sessions
    if groups and taught:
        trained = groups if config.advantage.zero_variance == "keep" else taught
        known |= {"teaching": taught / groups, "row_tokens": rows / trained / config.batch.samples}
    return known


def _evaluations(config: TrainConfig) -> int:
    """How often held-out tasks are evaluated."""
    how, steps = config.evaluation, config.steps
    during = {step for step in range(1, steps) if how.every and step % how.every == 0}
    last = how.after or (how.every > 0 and steps % how.every == 0)
    return len(during) + how.before + last


def _length(trace: Mapping[str, Sequence[int]]) -> int:
    return len(trace.get("prompt_ids", ())) + len(trace.get("response_ids", ()))


def _of(name: str, value: float, unit: str, *sources: Figure) -> Figure:
    return Figure(name, value, unit, _least(*sources))


def _least(*sources: Figure) -> Origin:
    return max((source.origin for source in sources), key=_SURE.index)


def _value(figure: Figure) -> float:
    assert figure.value is not None
    return figure.value
