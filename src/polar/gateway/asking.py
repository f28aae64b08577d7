"""What the engine is asked, made from the plan. Knows no history and no client."""

from __future__ import annotations

from polar.chat import Sampling
from polar.engines.base import MessagesRequest, TokensRequest
from polar.gateway.served import Served
from polar.tokens.plan import Plan


def tokens_request(plan: Plan, sampling: Sampling, served: Served, session: str) -> TokensRequest:
    """Mode `tokens`: the plan's prompt ids, and the ids at which the model's answer ends."""
    assert plan.prompt_ids is not None
    request = plan.request
    return TokensRequest(
        model=served.model,
        prompt_ids=plan.prompt_ids,
        sampling=sampling,
        stop_token_ids=served.path.stop_token_ids,
        response_format=request.response_format,
        top_logprobs=request.top_logprobs,
        n=request.n,
        session=session,
    )


def messages_request(plan: Plan, sampling: Sampling, served: Served, session: str) -> MessagesRequest:
    """Mode `messages`: the plan's messages, in which stored originals stand for what the harness sent back."""
    request = plan.request
    return MessagesRequest(
        model=served.model,
        messages=request.messages,
        tools=request.tools,
        tool_choice=request.tool_choice,
        sampling=sampling,
        parallel_tool_calls=request.parallel_tool_calls,
        thinking=request.thinking,
        effort=request.effort,
        response_format=request.response_format,
        top_logprobs=request.top_logprobs,
        n=request.n,
        session=session,
    )
