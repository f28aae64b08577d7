"""A Chat Completions body as a canonical request. Raises `InvalidRequest` and nothing else.

Decisions, where the protocol leaves a choice or a self-hosted model cannot follow it:

* `content` null, `""` and missing are one and the same: empty text.
* Text parts of one message are joined by a newline.
* Audio, video, and files that are neither image nor text, become a placeholder that names them: the model is told, never silently cut off.
* `functions`/`function_call` become tools; the calls of such a history get ids made from their position.
* A hosted tool that only OpenAI can run is left out of the tools; a choice that names it falls back to `auto`.
* `n`, `stop`, `max_completion_tokens` and the sampling parameters of vLLM (`top_k`, `min_p`, ...) are taken as written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polar.chat import ChatRequest, JsonObject, Sampling
from polar.dialects.base import as_list, as_object, as_str, bad, optional_bool, optional_float, optional_int, optional_str
from polar.dialects.openai_chat.messages import parse_messages
from polar.dialects.openai_chat.reading import as_json, object_at, str_at
from polar.dialects.openai_chat.tools import parse_tool_choice, parse_tools


def parse_request(body: JsonObject) -> ChatRequest:
    """See the module's docstring. `options` may hold `include_usage` and `legacy_functions`, both true where they stand."""
    tools, dropped, legacy = parse_tools(body)
    stream = optional_bool(body, "stream") or False
    options: JsonObject = {}
    if stream and object_at(body, "stream_options") and optional_bool(body["stream_options"], "include_usage"):
        options["include_usage"] = True
    if legacy:
        options["legacy_functions"] = True
    thinking, effort = _thinking(body)
    return ChatRequest(
        model=optional_str(body, "model") or "",
        messages=parse_messages(body),
        tools=tools,
        tool_choice=parse_tool_choice(body, tools, dropped, legacy),
        parallel_tool_calls=False if legacy else optional_bool(body, "parallel_tool_calls"),
        sampling=_sampling(body),
        thinking=thinking,
        effort=effort,
        response_format=_response_format(body),
        stream=stream,
        n=optional_int(body, "n", minimum=1, maximum=128) or 1,
        top_logprobs=_top_logprobs(body),
        options=options,
    )


def _sampling(body: JsonObject) -> Sampling:
    max_tokens = optional_int(body, "max_completion_tokens", minimum=1)
    if max_tokens is None:
        max_tokens = optional_int(body, "max_tokens", minimum=1)
    top_k = optional_int(body, "top_k", minimum=-1)
    return Sampling(
        max_tokens=max_tokens,
        temperature=optional_float(body, "temperature", minimum=0, maximum=2),
        top_p=optional_float(body, "top_p", minimum=0, maximum=1),
        top_k=top_k if top_k and top_k > 0 else None,
        min_p=optional_float(body, "min_p", minimum=0, maximum=1),
        presence_penalty=optional_float(body, "presence_penalty", minimum=-2, maximum=2),
        frequency_penalty=optional_float(body, "frequency_penalty", minimum=-2, maximum=2),
        repetition_penalty=optional_float(body, "repetition_penalty", minimum=0, maximum=1000),
        seed=optional_int(body, "seed"),
        stop=_stop(body.get("stop")),
        logit_bias=_logit_bias(body),
    )


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else as_list(value, "stop")
    stops = tuple(as_str(item, f"stop[{index}]") for index, item in enumerate(values))
    if "" in stops:
        raise bad("a stop sequence must not be empty", "stop")
    return stops


def _logit_bias(body: JsonObject) -> Mapping[str, float] | None:
    bias = {f"logit_bias.{token}": value for token, value in object_at(body, "logit_bias").items()}
    values = {name.removeprefix("logit_bias."): optional_float(bias, name, minimum=-100, maximum=100) for name in bias}
    return {token: value for token, value in values.items() if value is not None} or None


def _top_logprobs(body: JsonObject) -> int | None:
    asked = optional_bool(body, "logprobs")
    top = optional_int(body, "top_logprobs", minimum=0, maximum=20)
    if asked:
        return top or 0
    if top:
        raise bad("needs logprobs to be true", "top_logprobs")
    return None


def _response_format(body: JsonObject) -> JsonObject | None:
    layout = object_at(body, "response_format")
    if not layout:
        return None
    kind = as_str(layout.get("type"), "response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise bad(f"must be text, json_object or json_schema, not {kind!r}", "response_format.type")
    param = "response_format.json_schema"
    value = as_object(layout.get(kind), param)
    schema = object_at(value, "schema", param)
    as_json(schema, f"{param}.schema")
    result: JsonObject = {"name": str_at(value, "name", param) or "response", "schema": schema}
    if (strict := optional_bool(value, "strict")) is not None:
        result["strict"] = strict
    return {"type": kind, kind: result}


def _thinking(body: JsonObject) -> tuple[bool | None, str | None]:
    """The switch and the effort. The most explicit spelling wins: template argument, `enable_thinking`, `thinking`, effort."""
    reasoning = body["reasoning"] if isinstance(body.get("reasoning"), dict) else {}
    effort = optional_str(body, "reasoning_effort") or str_at(reasoning, "effort", "reasoning")
    arguments = object_at(body, "chat_template_kwargs")
    switches: Iterable[bool | None] = (
        optional_bool(arguments, "enable_thinking"),
        optional_bool(arguments, "thinking"),
        optional_bool(body, "enable_thinking"),
        _thinking_type(body.get("thinking")),
        optional_bool(reasoning, "enabled"),
        False if effort == "none" else None,
    )
    return next((switch for switch in switches if switch is not None), None), None if effort == "none" else effort


def _thinking_type(value: Any) -> bool | None:
    """`{"type": "enabled" | "disabled"}`, as several compatible servers spell it, or a plain boolean."""
    if value is None or isinstance(value, bool):
        return value
    kind = str_at(as_object(value, "thinking"), "type", "thinking")
    return {"enabled": True, "disabled": False}.get(kind or "")
