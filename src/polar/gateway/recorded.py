"""What the store keeps of a call: its wire form and its way through as one `Completion` a choice. Knows no task and no client."""

from __future__ import annotations

from dataclasses import dataclass, field

from polar.chat import ChatRequest, JsonObject
from polar.engines.base import Generation
from polar.gateway.sampling import Sampled
from polar.gateway.served import Served
from polar.records import Completion
from polar.tokens.plan import Plan, Reading


@dataclass(slots=True)
class Incoming:
    """A parsed request with what is recorded of its wire form."""

    dialect: str
    request: ChatRequest
    digest: bytes
    hints: JsonObject = field(default_factory=dict)
    live: bool = False


def completion_of(
    plan: Plan,
    sampled: Sampled,
    generation: Generation,
    reading: Reading,
    *,
    incoming: Incoming,
    served: Served,
    session: str,
    number: int,
    choice: int,
    version: str | None,
    started: float,
    ended: float,
) -> Completion:
    """`version`: the policy's as the generation began, for an engine that tells none. `started` and `ended`: seconds since 1970."""
    request = incoming.request
    prompt_ids = plan.prompt_ids if plan.mode == "tokens" else generation.prompt_ids
    completion = Completion(
        session=session,
        number=number,
        status="complete",
        dialect=incoming.dialect,
        mode=plan.mode,
        messages=plan.request.messages,
        answer=reading.message,
        finish=reading.answer.finish,
        parent=plan.parent,
        shared=plan.shared,
        choice=choice,
        tools=plan.request.tools,
        prompt_ids=prompt_ids,
        sampled_ids=generation.token_ids,
        logprobs=generation.logprobs,
        root=plan.keys.root,
        turn=reading.turn,
        loose=reading.loose,
        thinking_hash=reading.thinking_hash,
        request_digest=incoming.digest,
        model_requested=request.model,
        model=served.model,
        policy_version=generation.policy_version or version,
        sampling=sampled.sampling.as_dict(),
        asked=sampled.asked,
        stop_sequence=reading.answer.stop_sequence,
        cached_tokens=generation.cached_tokens,
        thinking_tokens=reading.thinking_tokens,
        routed_experts=generation.routed_experts,
        broken=plan.broken,
        tags=frozenset(plan.tags | reading.tags | sampled.tags),
        provenance=served.provenance_at(sampled.engine),
        hints=incoming.hints,
        stored=request.store,
        options=dict(request.options) if request.store else {},
        started=started,
        ended=ended,
    )
    completion.untrainable = generation.untrainable or served.untrainable(completion)
    return completion
