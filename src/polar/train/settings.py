"""Reads `train.yaml` and lays `--set a.b=c` over it; says what is wrong in one line a setting, with the nearest name. Knows no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from polar.errors import ConfigError
from polar.rollout.settings import read
from polar.train.config import TrainConfig


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of a file, with `overrides` (`optimisation.lr=1e-5`, the value being YAML) over them. Raises `ConfigError`."""
    return parse(overlaid(read(path), overrides), str(path), over=names(overrides))


def overlaid(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Raises `ConfigError` for an override that is none."""
    result: dict[str, Any] = _copied(settings)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {override}: write it as name=value, for instance optimisation.lr=1e-5")
        try:
            value = yaml.safe_load(text)
        except (ValueError, yaml.YAMLError) as error:  # ValueError: a number of thousands of digits
            raise ConfigError(f"--set {override}: the value is not YAML: {error}") from error
        *outer, last = name.strip().split(".")
        target = result
        for part in outer:
            inner = target.get(part)
            if not isinstance(inner, dict):  # a section in its short form, or not there
                inner = target[part] = _long(part, inner, override)
            target = inner
        target[last] = value
    return result


def names(overrides: Sequence[str]) -> list[str]:
    """Which settings they set."""
    return [override.partition("=")[0].strip() for override in overrides]


def parse(settings: Mapping[str, Any], where: str = "the settings", *, over: Sequence[str] = ()) -> TrainConfig:
    """Raises `ConfigError` with a line for each wrong setting. `over`: those that are not from `where`, but from `--set`."""
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(told(problems(error), where, over)) from error


def told(wrong: Sequence[str], where: str, over: Sequence[str], over_where: str = "--set") -> str:
    """The lines of `problems`, under the place that each is from: `over_where` where a line is about a setting of `over`."""
    theirs = [line for line in wrong if any(_about(line, name) for name in over)]
    groups = ((where, [line for line in wrong if line not in theirs]), (over_where, theirs))
    return "\n".join("\n".join([f"{place}: these are wrong:", *lines]) for place, lines in groups if lines)


def problems(error: ValidationError, schema: type[BaseModel] = TrainConfig) -> list[str]:
    """What is wrong, one line each: which setting, and why; an unknown one with the nearest that there is."""
    known = places(schema)
    by_last = {place.rpartition(".")[2]: place for place in known}
    lines = []
    for problem in error.errors():
        name, why = ".".join(str(part) for part in problem["loc"]), problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            meant = difflib.get_close_matches(str(problem["loc"][-1]), sorted(by_last), 1)
            why = "there is no such setting" + (f"; is {by_last[meant[0]]} meant?" if meant else "")
        elif problem["type"] == "missing":
            why = "is missing"
        joined = f"{name}.{why}" if name and f"{name}.{why.partition(':')[0]}" in known else f"{name}: {why}"  # a section names its setting
        lines.append(joined if name else why)
    return lines


def _about(line: str, name: str) -> bool:
    """Whether a line of `problems` is about a setting, one of its own, or a section that it stands in."""
    said = line.partition("; is ")[0]  # what follows is a guess
    return name.startswith(f"{said.partition(':')[0]}.") or re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", said) is not None


@contextmanager
def setting(name: str) -> Iterator[None]:
    """A `ConfigError` from within says that it is of this setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


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


def _long(name: str, value: Any, override: str) -> dict[str, Any]:
    if value is None:
        return {}
    short = {"model": "name", "tasks": "train", "runtime": "backend", "engine": "urls"}.get(name)
    if short is None:
        raise ConfigError(f"--set {override}: {name} has the value {value!r}, which holds no settings")
    if name == "engine":
        return {} if value == "embedded" else {"urls": value if isinstance(value, list) else [value]}
    return {short: value}


def _copied(value: Any) -> Any:
    return {str(key): _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value
