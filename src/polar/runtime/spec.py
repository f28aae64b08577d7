"""What a sandbox is asked to be: the `runtime` object of a task, JSON-compatible with the reference system's `RuntimeSpec`.

Knows no backend. Every field has a default that is safe: no network but the gateway, limits where the backend can set them.

A spec knows which of its fields were said, and writes only those: one that names no backend is what a task changes of its node's
`default_runtime` (`RuntimeSpec.over`), wherever and however often it travelled as JSON.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

Network = Literal["gateway", "host", "bridge", "none"]
"""`gateway`: the model API and nothing else; `bridge`: the model API and the internet; `host`: the machine's own network; `none`: nothing,
for evaluators."""


class Step(BaseModel):
    """One action that prepares a sandbox. Paths inside are POSIX paths; `source` is a path on the node, relative to the task's folder."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["upload_file", "upload_dir", "exec"]
    source: str | None = None
    target: str | None = None
    command: str | None = None
    """A shell line; a failing part of a pipe fails the step."""
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    max_attempts: int = Field(default=1, ge=1, le=10)
    retry_backoff: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _complete(self) -> Step:
        if self.type == "exec" and not self.command:
            raise ValueError("an exec step needs a command")
        if self.type != "exec" and not (self.source and self.target):
            raise ValueError(f"an {self.type} step needs a source and a target")
        return self


class MountSpec(BaseModel):
    """A host folder seen inside."""

    model_config = ConfigDict(extra="forbid")

    source: str
    target: str
    read_only: bool = True


DEFAULT_PIDS = 4096
"""More than any harness needs, and few enough that a program which forks without end stops itself and not the machine."""


class RuntimeSpec(BaseModel):
    """A sandbox. Which fields a backend heeds, its module says; one that it cannot heed is refused, never ignored."""

    model_config = ConfigDict(extra="forbid")

    backend: str = "local"
    """`local`, `bubblewrap`, `docker` (Podman too), `apptainer`, or a name that a plug-in registered. A task that names none gets its
    node's `default_runtime` with what else it says over it."""
    image: str | None = None
    """Container image, or a root file system's folder for bubblewrap; `None`: the backend's default."""
    build_context: str | None = None
    """A folder with a Dockerfile to build the image from (docker)."""
    prepare: list[Step] = Field(default_factory=list)
    eval_prepare: list[Step] | None = None
    """Steps for the evaluator's sandbox; `None`: as `prepare`."""
    env: dict[str, str] = Field(default_factory=dict)
    mounts: list[MountSpec] = Field(default_factory=list)
    network: Network = "gateway"
    allow_internet: bool = False
    """`network: gateway` with this is `bridge`."""
    workdir: str | None = None
    """Where the agent works; `None`: the image's own, or `/workspace`."""
    user: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=16)
    storage_mb: int | None = Field(default=None, ge=16)
    pids: int | None = Field(default=None, ge=4)
    """Processes and threads at once; `None`: `DEFAULT_PIDS` (Podman: its own default) where the backend can count them."""
    gpus: int | None = Field(default=None, ge=0)
    import_path: str | None = None
    """`module:Class` of a runtime that is not registered."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """For the backend, in its own vocabulary (`volumes` of the reference's docker backend, say)."""

    @property
    def effective_network(self) -> Network:
        return "bridge" if self.network == "gateway" and self.allow_internet else self.network

    @property
    def names_backend(self) -> bool:
        return "backend" in self.model_fields_set or self.import_path is not None

    def over(self, default: RuntimeSpec) -> RuntimeSpec:
        """The whole sandbox, where `default` is the node's: this one if it names a backend, else `default` with what is said here over it.
        Variables and `kwargs` are laid over its own one by one, mounts and preparation follow its own."""
        if self.names_backend:
            return self
        said = {name: getattr(self, name) for name in self.model_fields_set}
        said |= {name: {**getattr(default, name), **said[name]} for name in ("env", "kwargs") if name in said}
        said |= {name: [*getattr(default, name), *said[name]] for name in ("mounts", "prepare") if name in said}
        if {"prepare", "eval_prepare"} & said.keys() and (default.eval_prepare is not None or self.eval_prepare is not None):
            said["eval_prepare"] = [
                *(default.prepare if default.eval_prepare is None else default.eval_prepare),
                *(self.prepare if self.eval_prepare is None else self.eval_prepare),
            ]
        if "image" in said or "build_context" in said:  # two answers to one question
            said = {"image": None, "build_context": None, **said}
        if "network" in said:
            said.setdefault("allow_internet", False)
        return default.model_copy(update=said)

    def whole(self) -> RuntimeSpec:
        """The same with every field said: for a node's own default, which nothing is under."""
        return self.model_copy(update={name: getattr(self, name) for name in type(self).model_fields})

    @model_serializer(mode="wrap")
    def _only_what_was_said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}
