"""`task.toml` of a Harbor task, schema 1.0 to 1.4 (https://www.harborframework.com/docs/tasks). Knows no sandbox and no evaluator.

Keys that Harbor has and Polar does not heed, and keys that nobody knows, are kept and named (`warnings`), never refused: a task set of
another year still loads. What Polar adds stands in the table `[metadata.polar]`, where Harbor looks at nothing.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from polar.errors import ConfigError
from polar.rollout.models import EvaluatorSpec, OnPolicyFailure

_UNITS = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])?i?b?\s*", re.IGNORECASE)


class _Table(BaseModel):
    model_config = ConfigDict(extra="allow")

    def unknown(self, at: str = "") -> Iterator[str]:
        """The keys that this class does not name, with their tables."""
        yield from (f"{at}{key}" for key in self.model_extra or ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, _Table):
                yield from value.unknown(f"{at}{name}.")


class Environment(_Table):
    """`[environment]`, and `[verifier.environment]`. Sizes in MiB, times in seconds."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=1)
    storage_mb: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)
    allow_internet: bool | None = None
    network_mode: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    os: str | None = None
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _older_spelling(cls, value: Any) -> Any:
        """`memory = "2G"` and `storage = "10G"` of schema 1.0."""
        if not isinstance(value, dict):
            return value
        table = dict(value)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in table:
                table.setdefault(new, megabytes(table.pop(old)))
        return table

    @field_validator("env", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return {key: str(one) for key, one in value.items()} if isinstance(value, dict) else value

    @property
    def wants_internet(self) -> bool:
        """Whether it says so; Harbor's default is yes, which nobody has decided."""
        return self.allow_internet is True or self.network_mode in ("public", "allowlist")


class Agent(_Table):
    timeout_sec: float = Field(default=600.0, gt=0)
    user: str | None = None


class CollectHook(_Table):
    command: str


class Verifier(_Table):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[CollectHook] = Field(default_factory=list)


class Solution(_Table):
    env: dict[str, str] = Field(default_factory=dict)


class Extension(BaseModel):
    """`[metadata.polar]`: what Harbor has no key for. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    evaluator: EvaluatorSpec | None = None
    """In place of `tests/test.sh`."""
    on_policy_failure: OnPolicyFailure = "grade"
    noop_reward: float = 0.0
    """What an agent gets that does nothing."""
    plain: bool = False
    """Whether any sandbox will do that has a shell, Python and git (`polar.tasks.environment`)."""
    public: list[str] = Field(default_factory=list)
    """Files of the tests that the agent may see as they are, relative to the task's folder (a test runner)."""


class Manifest(_Table):
    """The whole file."""

    schema_version: str = "1.0"
    version: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: Agent = Field(default_factory=Agent)
    verifier: Verifier = Field(default_factory=Verifier)
    environment: Environment = Field(default_factory=Environment)
    solution: Solution = Field(default_factory=Solution)
    artifacts: list[Any] = Field(default_factory=list)
    source: str | None = None
    polar: Extension = Field(default_factory=Extension, exclude=True)
    """Read from `metadata.polar`."""

    @model_validator(mode="before")
    @classmethod
    def _extension(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("metadata"), dict) and "polar" in value["metadata"]:
            return {**value, "polar": value["metadata"]["polar"]}
        return value

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is in the file and changes nothing here."""
        found = [f"task.toml: {key} is not heeded" for key in self.unknown()]
        if self.environment.wants_internet:
            found.append("task.toml asks for the internet, which no task gives itself: set runtime.allow_internet where it is needed")
        if self.environment.os not in (None, "linux"):
            found.append(f"task.toml: environment.os is {self.environment.os!r}; sandboxes are Linux")
        return tuple(found)


def read(path: Path) -> Manifest:
    """Raises `ConfigError` that names the file and the key."""
    try:
        return Manifest.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(_problem(one['loc'], one['type'], one['msg']) for one in error.errors())}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _problem(place: tuple[int | str, ...], kind: str, message: str) -> str:
    """What is wrong with a key, as it stands in the file."""
    if kind == "extra_forbidden":
        meant = difflib.get_close_matches(str(place[-1]), [*Extension.model_fields, *EvaluatorSpec.model_fields], 1)
        message = "there is no such key" + (f"; is {meant[0]} meant?" if meant else "")
    name = ".".join(map(str, place))
    return f"{'metadata.' if place[:1] == ('polar',) else ''}{name}: {message}"


def megabytes(value: Any) -> Any:
    """MiB of a size as Harbor wrote it once (`2G`, `512M`, a number of MiB); what is no size is given back, for the field to refuse."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return round(float(match[1]) * _UNITS[(match[2] or "m").lower()]) if match else value
