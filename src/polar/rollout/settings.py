"""Reads `polar.yaml` (or the reference's `topology.yaml`), lays the environment over it, and says what is wrong in one line a setting.

Where settings come from, the later over the earlier: defaults, the file, `POLAR__SECTION__NAME` variables, the command line. Knows the
schema (`polar.rollout.config`) and nothing of what it sets.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ValidationError

from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig
from polar.gateway.config import problems as gateway_problems
from polar.rollout.config import PolarConfig

PREFIX = "POLAR__"
"""Of variables that set one setting: `POLAR__ROLLOUT__PORT=9000`, `POLAR__GATEWAY__NODES__0__MAX_RUN_WORKERS=8`. Values are YAML."""
FILE_VARIABLES = ("POLAR_CONFIG", "POLAR_TOPOLOGY")
FILE_NAMES = ("polar.yaml", "topology.yaml")
SECRET = frozenset({"token", "api_key", "admin_token"})


def find(path: Path | None, environment: Mapping[str, str] | None = None) -> Path | None:
    """The file to read: as given, else named by the environment, else `polar.yaml` or `topology.yaml` here; `None`: there is none."""
    environment = os.environ if environment is None else environment
    if path is not None:
        return path
    for name in FILE_VARIABLES:
        if environment.get(name):
            return Path(environment[name])
    return next((Path(name) for name in FILE_NAMES if Path(name).is_file()), None)


def load(path: Path | None = None, environment: Mapping[str, str] | None = None) -> PolarConfig:
    """The settings. Raises `ConfigError` with a line for each wrong one."""
    environment = os.environ if environment is None else environment
    place = find(path, environment)
    return parse(overlaid(read(place), environment), str(place) if place else "the settings")


def read(path: Path | None) -> dict[str, Any]:
    """The file's mapping, with sections that are there but empty left out. Raises `ConfigError`."""
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no text, or a number of thousands of digits
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    if _holds_itself(loaded, ()):
        raise ConfigError(f"{path}: an alias (*name) stands inside of what it names (&name)")
    return {str(name): value for name, value in loaded.items() if value is not None}


def overlaid(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """`settings` with the environment's over them. Raises `ConfigError` for a variable that names no place."""
    result: dict[str, Any] = _copied(settings)
    for name in sorted(environment):
        if not name.startswith(PREFIX):
            continue
        parts = name[len(PREFIX) :].lower().split("__")
        try:
            value = yaml.safe_load(environment[name])
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{name} is not YAML: {error}") from error
        _set(result, parts, value, name)
    return result


def parse(settings: Mapping[str, Any], where: str = "the settings") -> PolarConfig:
    """Raises `ConfigError` with a line for each wrong setting, those of the nodes' gateways too."""
    try:
        config = PolarConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{where}: these are wrong:\n{problems(error)}") from error
    names: set[str] = set()
    for index, node in enumerate(config.gateway.nodes):
        if node.id in names:
            raise ConfigError(f"{where}: gateway.nodes.{index}.id: two nodes are called {node.id!r}")
        names.add(node.id)
        try:
            _ = node.gateway_config
        except ValidationError as error:
            lines = "\n".join(f"gateway.nodes.{index}.gateway.{line}" for line in gateway_problems(error).splitlines())
            raise ConfigError(f"{where}: these are wrong:\n{lines}") from error
    if wrong := [*_impossible(config)]:
        raise ConfigError("\n".join([f"{where}: these are wrong:", *wrong]))
    return config


def _impossible(config: PolarConfig) -> Iterator[str]:
    """What is well-formed and could not be started, one line each."""
    from polar.store.connect import place_of  # with SQLAlchemy: not for commands that read settings of another kind

    if not config.gateway.nodes:
        yield "gateway.nodes: there must be a node (leave it out for one with defaults)"
    for name, store in [
        ("rollout.store", config.rollout.store),
        *((f"gateway.nodes.{index}.gateway.store", node.gateway_config.store) for index, node in enumerate(config.gateway.nodes)),
    ]:
        try:
            place_of(store) if store is not None else None
        except ConfigError as error:
            yield f"{name}: {error}"
    listeners: list[_Listener] = []
    for one in _listeners(config):
        same = next((other for other in listeners if one.port and one.collides(other)), None)
        if same is not None:
            yield f"{one.name}: port {one.port} is {same.name}, too"
        listeners.append(one)


@dataclass(frozen=True, slots=True)
class _Listener:
    name: str
    machine: str
    """How others reach it; `""` is this machine."""
    host: str
    port: int

    def collides(self, other: _Listener) -> bool:
        hosts = {self.host, other.host}
        return (self.machine, self.port) == (other.machine, other.port) and (len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::", ""}))


def _listeners(config: PolarConfig) -> Iterator[_Listener]:
    """Nodes with a `public_url` on another host may be on another machine; only what surely is on the same one is compared."""
    rollout = config.rollout
    yield _Listener("rollout.port", "", rollout.host, rollout.port)
    if rollout.compat_open:
        yield _Listener("rollout.compat_port", "", "127.0.0.1", rollout.compat_port)
    for index, node in enumerate(config.gateway.nodes):
        own = node.gateway_config
        machine = (urlsplit(node.public_url).hostname or "") if node.public_url else ""
        machine = "" if machine in ("localhost", "127.0.0.1", "::1") else machine
        yield _Listener(f"gateway.nodes.{index}.port", machine, own.host, own.port)
        yield _Listener(f"gateway.nodes.{index}.control_port", machine, node.control_host, own.control_port if own.port else node.control)


def problems(error: ValidationError) -> str:
    """What is wrong, one line each: which setting, and why; an unknown one with the nearest that there is."""
    lines = []
    for problem in error.errors():
        name, why = ".".join(str(part) for part in problem["loc"]), problem["msg"]
        if problem["type"] == "extra_forbidden":
            meant = difflib.get_close_matches(str(problem["loc"][-1]), sorted(set(_names(PolarConfig))), 1)
            why = "there is no such setting" + (f"; is {meant[0]} meant?" if meant else "")
        lines.append(f"{name}: {why}")
    return "\n".join(lines)


def shown(config: PolarConfig) -> dict[str, Any]:
    """All settings as they are, defaults too; secrets masked."""
    masked: dict[str, Any] = _masked(config.model_dump(mode="json"))
    return masked


def _masked(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _masked(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return "********" if name in SECRET and value is not None else value


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel) and inner is not GatewayConfig:
                yield from _names(inner)


def _holds_itself(value: Any, outer: tuple[int, ...]) -> bool:
    """YAML can say so, and nothing that reads settings would ever end."""
    if not isinstance(value, dict | list):
        return False
    inside = (*outer, id(value))
    return id(value) in outer or any(_holds_itself(one, inside) for one in (value.values() if isinstance(value, dict) else value))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _set(target: Any, parts: list[str], value: Any, name: str) -> None:
    """Sets one value below `target`, making the mappings on the way; a number is a place in a list, or the next one."""
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        fresh: Any = [] if after is not None and after.isdigit() else {}
        if isinstance(target, list):
            if not part.isdigit() or int(part) > len(target):
                raise ConfigError(f"{name}: {part!r} is no place in a list of {len(target)}")
            if int(part) == len(target):
                target.append(fresh)
            key: Any = int(part)
        elif isinstance(target, dict):
            key = part
            if after is not None and not isinstance(target.get(key), dict | list):
                target[key] = fresh
        else:
            raise ConfigError(f"{name}: {part!r} lies below a value that holds no settings")
        if after is None:
            target[key] = value
        else:
            target = target[key]
