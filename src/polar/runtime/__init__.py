"""Sandboxes: where an agent or an evaluator runs."""

import importlib

from polar.errors import ConfigError
from polar.runtime import apptainer, bubblewrap, docker, local  # noqa: F401 - they register themselves
from polar.runtime.base import ExecResult, Left, Place, Runtime, named, register, registered
from polar.runtime.owner import Owner, owner_alive
from polar.runtime.spec import MountSpec, Network, RuntimeSpec, Step

__all__ = [
    "ExecResult",
    "Left",
    "MountSpec",
    "Network",
    "Owner",
    "Place",
    "Runtime",
    "RuntimeSpec",
    "Step",
    "backend_of",
    "create",
    "named",
    "owner_alive",
    "register",
    "registered",
]


def backend_of(spec: RuntimeSpec) -> type[Runtime]:
    """The class that makes such a sandbox. Raises `ConfigError` for an unknown backend or an `import_path` that holds no runtime."""
    if spec.import_path is None:
        return named(spec.backend)
    module, _, name = spec.import_path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever is in that module; an exit would end all sessions of the process
        raise ConfigError(f"runtime import_path {spec.import_path!r}: {type(error).__name__}: {error}; write module:Class") from error
    if not (isinstance(cls, type) and issubclass(cls, Runtime)):
        raise ConfigError(f"runtime import_path {spec.import_path!r} names no subclass of polar.runtime.Runtime")
    return cls


def create(spec: RuntimeSpec, place: Place) -> Runtime:
    """The sandbox that `spec` asks for, not yet started. Raises `ConfigError` for a backend that is unknown and for a field that it cannot
    heed: never ignored, and said before anything is made."""
    cls = backend_of(spec)
    cls.check(spec)
    return cls(spec, place)
