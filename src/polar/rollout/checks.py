"""What is wrong with a task, said at its submission and not after an agent has worked for an hour. What only a node can know (its images,
plug-ins that are installed there alone) is left to it."""

from __future__ import annotations

from urllib.parse import urlsplit

from polar.errors import ConfigError
from polar.rollout.models import TaskRequest


def check_task(request: TaskRequest) -> TaskRequest:
    """The task as it is kept: with our spelling of a preset that the reference spells otherwise (`claude_code`). Raises `ConfigError`."""
    if request.callback_url is not None:
        url = urlsplit(request.callback_url)
        if url.scheme not in ("http", "https") or not url.hostname:
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


def _with_harness(request: TaskRequest) -> TaskRequest:
    from polar.harness import named, registered

    name = request.agent.harness
    if name is None or name in registered():
        return request
    ours = name.replace("_", "-")
    if ours not in registered():
        named(name)
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
