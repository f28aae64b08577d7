"""From an `AgentSpec` to a harness and its options. Knows no sandbox."""

from __future__ import annotations

import importlib
from typing import Any

from polar.errors import ConfigError
from polar.harness.base import Harness, Options, named
from polar.harness.spec import AgentSpec

_WHOLE = ("context", "max_output", "compact_at", "retries")
"""Settings that are Polar's own, all whole numbers; `extra_args` is the last."""


def harness_of(spec: AgentSpec) -> Harness:
    """A registered harness, or the class that `import_path` names. Raises `ConfigError`."""
    if spec.harness is not None:
        return named(spec.harness)
    module_name, _, class_name = (spec.import_path or "").partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # whatever is in that module; an exit would end all sessions of the process
        raise ConfigError(f"agent.import_path {spec.import_path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Harness)):
        raise ConfigError(f"agent.import_path {spec.import_path!r} is no subclass of polar.harness.Harness")
    return found()


def read_options(spec: AgentSpec, *, context: int | None) -> Options:
    """`context` is the model's length, where the settings say no other. Raises `ConfigError`."""
    settings: dict[str, Any] = dict(spec.settings)
    own: dict[str, Any] = {}
    for name in _WHOLE:
        value = settings.pop(name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "retries" else 1):
            raise ConfigError(f"agent.settings.{name} is a whole number, not {value!r}")
        own[name] = value
    arguments = settings.pop("extra_args", None) or ()
    if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise ConfigError("agent.settings.extra_args is a list of words")
    length = own.pop("context", context)
    rest: dict[str, Any] = {"settings": settings, "extra_args": tuple(arguments), "mcp_servers": tuple(spec.mcp_servers), **own}
    if length is not None and "max_output" in own:
        return Options(context=length, **rest)
    return Options.within(length, **rest)
