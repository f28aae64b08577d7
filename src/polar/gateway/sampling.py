"""Which sampling parameters a call is really made with, and which facts about them are recorded.

A `train` session forces the trainer's distribution, so that log-probabilities and importance ratios mean something; an `eval`
session keeps the harness's own. Both are recorded. `max_tokens` is clamped to the room left in the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from polar.chat import ChatRequest, JsonObject, Sampling
from polar.errors import ContextOverflow, InvalidRequest
from polar.gateway.config import GatewayConfig, TrainSampling, problems
from polar.records import Session
from polar.tokens.plan import Plan

GREEDY_BELOW = 1e-2
"""A temperature that is not sampled at: SGLang takes the likeliest token below 1e-6, vLLM samples at 0.01 instead of anything between. Some
clients write 1e-8 for 0."""


@dataclass(slots=True)
class Sampled:
    """The parameters of one call. `engine` is filled in once one has been picked."""

    sampling: Sampling
    asked: JsonObject
    tags: set[str] = field(default_factory=set)
    engine: str = ""


def settle_sampling(
    plan: Plan, request: ChatRequest, session: Session, config: GatewayConfig, context: int | None, left: int | None = None
) -> Sampled:
    """Raises `ContextOverflow` only if the prompt itself leaves no room for a single token. `left` is what the session may still sample,
    over all choices of the call.

    A `train` session has no seed: with one, all samples of a group would be the same.
    """
    sampled = Sampled(request.sampling, asked(request))
    if session.kind == "train":
        sampled.sampling = replace(sampled.sampling, seed=None, **forced(session.settings, config.train_sampling).model_dump())
    if sampled.sampling.temperature is not None and sampled.sampling.temperature < GREEDY_BELOW:
        sampled.tags.add("greedy")
    if sampled.sampling.logit_bias or request.response_format or request.tool_choice.mode in ("required", "named"):
        sampled.tags.add("constrained")
    if left is not None:
        left = max(1, left // request.n)
    room = left
    if plan.prompt_ids is not None and context is not None:
        free = context - len(plan.prompt_ids)
        if free < 1:
            raise overflow(len(plan.prompt_ids), context)
        room = free if left is None else min(free, left)
    if room is not None:
        wanted = sampled.sampling.max_tokens
        if wanted is not None and wanted > room:
            sampled.tags.add("clamped")
        sampled.sampling = replace(sampled.sampling, max_tokens=room if wanted is None else min(wanted, room))
    return sampled


def forced(settings: JsonObject, default: TrainSampling) -> TrainSampling:
    """The trainer's sampling for a session: the gateway's, with the session's own settings over it. Raises `InvalidRequest`."""
    wanted = settings.get("sampling")
    if wanted is None:
        return default
    try:
        return TrainSampling.model_validate({**default.model_dump(), **wanted})
    except ValidationError as error:
        raise InvalidRequest(f"settings.sampling: {problems(error)}", param="settings.sampling") from error
    except TypeError as error:
        raise InvalidRequest("settings.sampling must be an object", param="settings.sampling") from error


def asked(request: ChatRequest) -> JsonObject:
    """What the harness asked for, as recorded."""
    record: JsonObject = {"sampling": request.sampling.as_dict(), "stream": request.stream}
    if request.thinking is not None:
        record["thinking"] = request.thinking
    if request.effort is not None:
        record["effort"] = request.effort
    if request.tool_choice.mode != "auto":
        record["tool_choice"] = request.tool_choice.name or request.tool_choice.mode
    if request.parallel_tool_calls is not None:
        record["parallel_tool_calls"] = request.parallel_tool_calls
    if request.response_format is not None:
        record["response_format"] = request.response_format
    if request.n != 1:
        record["n"] = request.n
    return record


def overflow(prompt_tokens: int, limit: int) -> ContextOverflow:
    return ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {prompt_tokens} input tokens. "
        "Please reduce the length of the input messages.",
        prompt_tokens=prompt_tokens,
        limit=limit,
    )
