"""Reads `train.yaml` and lays `--set a.b=c` over it; says what is wrong in one line a setting, with the nearest name. Knows no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from polar.errors import ConfigError
from polar.rollout.settings import read
from polar.train.config import TrainConfig


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of a file, with `overrides` (`optimisation.lr=1e-5`, the value being YAML) over them. Raises `ConfigError`."""
    return parse(overlaid(read(path), overrides), str(path))


def overlaid(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Raises `ConfigError` for an override that is none."""
    result: dict[str, Any] = _copied(settings)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {override}: write it as name=value, for instance optimisation.lr=1e-5")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not YAML: {error}") from error
        *outer, last = name.strip().split(".")
        target = result
        for part in outer:
            inner = target.get(part)
            if not isinstance(inner, dict):  # a section in its short form, or not there
                inner = target[part] = _long(part, inner)
            target = inner
        target[last] = value
    return result


def parse(settings: Mapping[str, Any], where: str = "the settings") -> TrainConfig:
    """Raises `ConfigError` with a line for each wrong setting."""
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{where}: these are wrong:\n{problems(error)}") from error


def problems(error: ValidationError) -> str:
    """What is wrong, one line each: which setting, and why; an unknown one with the nearest that there is."""
    lines = []
    for problem in error.errors():
        name, why = ".".join(str(part) for part in problem["loc"]), problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            known = {known: place for place in _places(TrainConfig) for known in (place.rpartition(".")[2],)}
            meant = difflib.get_close_matches(str(problem["loc"][-1]), sorted(known), 1)
            why = "there is no such setting" + (f"; is {known[meant[0]]} meant?" if meant else "")
        elif problem["type"] == "missing":
            why = "is missing"
        lines.append(f"{name}: {why}" if name else why)
    return "\n".join(lines)


def places(model: type[BaseModel] = TrainConfig) -> list[str]:
    """The dotted names of all settings, in the order of the schema."""
    return list(_places(model))


def _places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _sections(field.annotation):
            yield from _places(inner, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
        elif get_args(one) and one is not annotation:
            yield from _sections(one)


def _long(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    short = {"model": "name", "tasks": "train", "runtime": "backend", "engine": "urls"}.get(name)
    if short is None:
        raise ConfigError(f"--set: {name} has the value {value!r}, which holds no settings")
    if name == "engine":
        return {} if value == "embedded" else {"urls": value if isinstance(value, list) else [value]}
    return {short: value}


def _copied(value: Any) -> Any:
    return {str(key): _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value
