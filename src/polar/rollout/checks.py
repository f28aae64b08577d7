"""What is wrong with a task, said at its submission and not after an agent has worked for an hour. What only a node can know (its images,
plug-ins that are installed there alone) is left to it."""

from __future__ import annotations

import ipaddress
import math
from typing import Any
from urllib.parse import urlsplit

from polar.errors import ConfigError
from polar.rollout.models import TaskRequest

DEEPEST = 100
"""Levels of lists and objects in a task: readers of JSON have limits of their own, and a task travels inside of other JSON."""


def check_task(request: TaskRequest) -> TaskRequest:
    """The task as it is kept: with our spelling of a preset that the reference spells otherwise (`claude_code`). Raises `ConfigError`."""
    _check_json(request.model_dump(), "", 0)
    backend = None if request.runtime is None else request.runtime.backend
    for name, said in (("agent.import_path", request.agent.import_path), ("runtime.backend", backend)):
        if said is not None and not said.isprintable():
            raise ConfigError(f"{name}: {said!r} is no name")
    if request.callback_url is not None and not is_http_url(request.callback_url):
        raise ConfigError("callback_url must be an http or https URL")
    if request.session_callbacks and request.callback_url is None:
        raise ConfigError("session_callbacks needs a callback_url")
    if request.early_stop is not None and request.early_stop.min_usable > request.num_samples:
        raise ConfigError(f"early_stop.min_usable is more than the {request.num_samples} sessions of the task")
    _check_builder(request)
    _check_evaluator(request)
    checked = _with_harness(request)
    _check_agent(checked)
    return checked


def is_http_url(text: str) -> bool:
    """Whether an HTTP client can call it."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and text.isprintable() and " " not in url.netloc
    except ValueError:  # a port beyond 65535, half an IPv6 address
        return False


def is_loopback(url: str) -> bool:
    """Whether a URL is of this machine itself, which no proxy of the environment (`HTTP_PROXY`) can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_json(value: Any, name: str, depth: int) -> None:
    """A task is kept and sent as JSON, which has no NaN and no infinity: they would come back as nulls, and a field that takes no null
    makes a task that nobody can read any more. Raises `ConfigError` for them, for integers past 64 bits, and past `DEEPEST` levels."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: {value} is no number that JSON has")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"{name}: whole numbers have 64 bits here")
    if not isinstance(value, dict | list | tuple):
        return
    if depth > DEEPEST:
        raise ConfigError(f"{name[:200]}: more than {DEEPEST} levels deep")
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        _check_json(one, f"{name}.{key}" if name else str(key), depth + 1)


def preset(name: str) -> str:
    """The name of a harness in our spelling. Raises `ConfigError` for one that nobody knows."""
    from polar.harness import named, registered

    ours = name if name in registered() else name.replace("_", "-")
    if ours not in registered():
        named(name)
    return ours


def _with_harness(request: TaskRequest) -> TaskRequest:
    name = request.agent.harness
    if name is None or (ours := preset(name)) == name:
        return request
    return request.model_copy(update={"agent": request.agent.model_copy(update={"harness": ours})})


def _check_builder(request: TaskRequest) -> None:
    from polar.trajectory.builders import builder

    builder(request.builder.strategy, request.builder.config)


def _check_evaluator(request: TaskRequest) -> None:
    spec = request.evaluator
    if spec is not None and ":" not in spec.strategy:
        from polar.evaluator import from_spec

        from_spec(spec)


def _check_agent(request: TaskRequest) -> None:
    """An agent of one's own (`import_path`) may be known to nodes only."""
    if request.agent.import_path is None:
        from polar.harness.agent import AgentRun

        AgentRun(request.agent, task_folder=None)
