"""An evaluator: a finished session in, a reward out. Knows no trainer, no queue and no HTTP.

A new evaluator is one file beside this one: subclass `Evaluator`, give it a `Config`, decorate it with `@register`.

Every evaluator holds to this:

* it raises `EvaluatorError` (or lets a `SandboxError` through) where it could not judge: that is infrastructure, is retried, and is
  never a zero (law 5). A wrong, broken or missing piece of work is a low reward, not an error;
* nothing that the agent left is trusted: it grades in a fresh sandbox (`evidence.fresh`) with tests that the agent never saw, or says in
  its docstring why it need not;
* everything that led to the verdict lies in `evidence.folder` afterwards, for people.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from polar.chat import JsonObject
from polar.errors import ConfigError, EvaluatorError
from polar.runtime.base import Runtime
from polar.trajectory import Trajectory

Fresh = Callable[[], AbstractAsyncContextManager[Runtime]]
"""A started and prepared sandbox of the evaluator's own (`eval_prepare`), without network; the first one was made while the agent ran."""
Other = Callable[[JsonObject], AbstractAsyncContextManager[Runtime]]
"""The same, with these fields of the task's `RuntimeSpec` in place of its own (`image`, `build_context`, `env`, `prepare`, ...)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of a session when it is judged."""

    session: str
    task: str
    instruction: str
    metadata: JsonObject
    trajectory: Trajectory
    """Built, without rewards."""
    answer: str | None
    """The harness's final answer, where it gave one."""
    patch: bytes | None
    """`git diff` of the work folder against its state before the agent; `None` where the folder is no repository."""
    exit_code: int | None
    problem: str | None
    """Why the harness failed, or `None`."""
    timed_out: bool
    agent: Runtime | None
    """The agent's own sandbox, still there, everything that it started stopped; `None` where it is gone."""
    fresh: Fresh
    folder: Path
    """For logs and reports; private, kept with the session."""
    task_folder: Path | None = None
    """What relative paths of the configuration are relative to."""
    timeout_s: float = 600.0
    """What is left of the evaluation budget."""
    transcript: Path | None = None
    patch_refused: str | None = None
    """Why no patch can be had of what the agent left, although one could of what it started from: its own doing."""
    other: Other | None = None
    """Sandboxes that differ from the task's, for verifiers with an image of their own; `None` where there is no way to make one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is finite. `row_rewards` is empty, or has one entry a row of the trajectory (`None`: no credit). `metrics` are numbers for
    logs; `report` is JSON for people and tests (which tests passed, the judge's words)."""

    reward: float
    row_rewards: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    report: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise EvaluatorError(f"the evaluator gave the reward {self.reward}, which is not a finite number")
        if any(one is not None and not math.isfinite(one) for one in self.row_rewards):
            raise EvaluatorError("the evaluator gave a row's reward that is not a finite number")


class NoConfig(BaseModel):
    """The configuration of an evaluator that takes none."""

    model_config = ConfigDict(extra="forbid")


C = TypeVar("C", bound=BaseModel)


class Evaluator(ABC, Generic[C]):
    """One way to judge. Instances hold their configuration and nothing of a session."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]] = NoConfig
    needs_fresh: bool = True
    """Whether it asks for a fresh sandbox, which is then made while the agent runs. An instance may differ from its class."""

    def __init__(self, config: C, env: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.env = dict(env or {})
        """For the commands that it runs."""

    @abstractmethod
    async def evaluate(self, evidence: Evidence) -> Verdict:
        """Raises `EvaluatorError` or `SandboxError` where it could not judge."""


_REGISTRY: dict[str, type[Evaluator[Any]]] = {}
E = TypeVar("E", bound=type[Evaluator[Any]])


def register(cls: E) -> E:
    """Makes an evaluator known by its name."""
    _REGISTRY[cls.name] = cls
    return cls


def registered() -> Mapping[str, type[Evaluator[Any]]]:
    """All evaluators by name."""
    return _REGISTRY


def make(name: str | type[Evaluator[Any]], config: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Evaluator[Any]:
    """The evaluator of that name (or class), configured. Raises `ConfigError` for an unknown name or a wrong configuration: at submission,
    not after the agent has worked for an hour."""
    try:
        cls = _REGISTRY[name] if isinstance(name, str) else name
    except KeyError:
        meant = difflib.get_close_matches(str(name), list(_REGISTRY), 1)
        hint = f"; is {meant[0]} meant" if meant else ""
        raise ConfigError(f"no evaluator is called {name!r}{hint}; there are: {', '.join(_REGISTRY)}") from None
    try:
        return cls(cls.Config.model_validate(dict(config)), env)
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'config'}: {_said(one, cls.Config)}" for one in error.errors())
        raise ConfigError(f"evaluator {getattr(cls, 'name', cls.__name__)}: {lines}") from error


def _said(problem: Mapping[str, Any], config: type[BaseModel]) -> str:
    """What is wrong with a setting; of an unknown one, the nearest that there is."""
    if problem["type"] != "extra_forbidden":
        return str(problem["msg"])
    meant = difflib.get_close_matches(str(problem["loc"][-1]), sorted(set(_names(config))), 1)
    return "there is no such setting" + (f"; is {meant[0]} meant?" if meant else "")


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield name
        for inner in _models(info.annotation):
            yield from _names(inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those in a type, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
