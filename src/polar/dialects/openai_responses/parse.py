"""A Responses body to a `ChatRequest`.

Decisions:

* `reasoning.effort` `"none"` switches thinking off; any other effort is handed on and leaves the switch at the model's default.
* `store` is true unless the client says otherwise, as the provider documents; a compaction or a count is never stored.
* What would silently lose a conversation is refused: `background`, `conversation`, `prompt`. What only steers the provider's
  service (`truncation`, `max_tool_calls`, `text.verbosity`, cache keys, metadata, ...) is echoed and has no effect.
* A `compaction_trigger` counts only as the last item: earlier in the input it has done its work.
"""

from __future__ import annotations

from typing import Any

from polar.chat import ChatRequest, JsonObject, Message, Sampling, ToolChoice
from polar.dialects.base import Operation, Route, as_list, as_object, as_str, bad, optional_bool, optional_float, optional_int, optional_str
from polar.dialects.openai_responses import compaction
from polar.dialects.openai_responses.items import History
from polar.dialects.openai_responses.tools import Toolset, json_of, read_choice
from polar.errors import InvalidRequest

_REFUSED = {
    "background": "background responses are not served here; leave it out or send false",
    "conversation": "stored conversations are not served here; send the items, or previous_response_id",
    "prompt": "stored prompts are not served here; send instructions and input",
}
_ECHOED = (
    "metadata",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "text",
    "tool_choice",
    "tools",
    "truncation",
    "user",
)
"""What a response repeats of its request and the canonical request doesn't hold (settings of the engine's are taken from there)."""


def parse_request(body: JsonObject, route: Route) -> ChatRequest:
    """Raises `InvalidRequest` and nothing else, for any JSON object."""
    if "cancel" in route.params:
        raise bad("only a background response can be cancelled, and this one is not", "response_id")
    for name, why in _REFUSED.items():
        if body.get(name) not in (None, False):
            raise bad(why, name)
    instructions = optional_str(body, "instructions")
    previous = optional_str(body, "previous_response_id")
    toolset = Toolset()
    if body.get("tools") is not None:
        toolset.declare(body["tools"], "tools")
    history = History(toolset)
    items = _input(body, required=previous is None and route.operation is not Operation.COUNT)
    triggered = bool(items) and isinstance(items[-1], dict) and items[-1].get("type") == "compaction_trigger"
    history.read(items[:-1] if triggered else items)
    messages = history.messages()
    if instructions:
        messages = (Message("system", instructions), *messages)
    effort = history.effort or _effort(body)
    options: dict[str, Any] = {"echo": _echo(body)}
    if instructions:
        options["instructions"] = instructions
    if toolset.loaded:
        options["loaded"] = toolset.wire()
    if history.references:
        options["references"] = tuple(history.references)
    request = ChatRequest(
        model=optional_str(body, "model") or "",
        messages=messages,
        tools=tuple(toolset.visible.values()),
        tool_choice=read_choice(body.get("tool_choice"), toolset.visible),
        parallel_tool_calls=optional_bool(body, "parallel_tool_calls"),
        sampling=_sampling(body),
        thinking=False if effort == "none" else None,
        effort=None if effort == "none" else effort,
        response_format=_response_format(body),
        stream=bool(optional_bool(body, "stream")) and route.operation is Operation.GENERATE,
        top_logprobs=_top_logprobs(body),
        previous=previous,
        store=optional_bool(body, "store") is not False and route.operation is Operation.GENERATE,
        options=options,
    )
    if triggered or route.operation is Operation.COMPACT:
        return _compacting(request, "endpoint" if route.operation is Operation.COMPACT else "trigger")
    return request


def _compacting(request: ChatRequest, how: str) -> ChatRequest:
    """Asks for the summary instead of the next turn. The tools stay, so that the prompt extends the conversation's."""
    return ChatRequest(
        model=request.model,
        messages=(*request.messages, Message("user", compaction.REQUEST)),
        tools=request.tools,
        tool_choice=ToolChoice("none"),
        sampling=request.sampling,
        thinking=request.thinking,
        effort=request.effort,
        stream=request.stream,
        previous=request.previous,
        options={**request.options, "compaction": how},
    )


def _input(body: JsonObject, *, required: bool) -> list[Any]:
    value = body.get("input")
    if value is None:
        if "messages" in body:
            raise InvalidRequest(
                "Unsupported parameter: 'messages'. In the Responses API, this parameter has moved to 'input'.", param="input"
            )
        if required:
            raise InvalidRequest("Missing required parameter: 'input'.", param="input")
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return as_list(value, "input")


def _effort(body: JsonObject) -> str | None:
    reasoning = body.get("reasoning")
    if reasoning is None:
        return None
    effort = as_object(reasoning, "reasoning").get("effort")
    return None if effort is None else as_str(effort, "reasoning.effort")


def _sampling(body: JsonObject) -> Sampling:
    return Sampling(
        max_tokens=optional_int(body, "max_output_tokens", minimum=1, maximum=2**53),
        temperature=optional_float(body, "temperature", minimum=0.0, maximum=2.0),
        top_p=optional_float(body, "top_p", minimum=0.0, maximum=1.0),
        presence_penalty=optional_float(body, "presence_penalty", minimum=-2.0, maximum=2.0),
        frequency_penalty=optional_float(body, "frequency_penalty", minimum=-2.0, maximum=2.0),
    )


def _top_logprobs(body: JsonObject) -> int | None:
    """Asked for by `include`, or by a positive `top_logprobs`; its documented default 0 alone asks for nothing."""
    top = optional_int(body, "top_logprobs", minimum=0, maximum=20)
    include = body.get("include")
    asked = include is not None and "message.output_text.logprobs" in as_list(include, "include")
    return (top or 0) if asked or top else None


def _response_format(body: JsonObject) -> JsonObject | None:
    text = body.get("text")
    form = None if text is None else as_object(text, "text").get("format")
    if form is None:
        return None
    form = as_object(form, "text.format")
    kind = as_str(form.get("type"), "text.format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise bad(f"must be text, json_object or json_schema, not {kind!r}", "text.format.type")
    as_object(form.get("schema"), "text.format.schema")
    as_str(form.get("name", "response"), "text.format.name")
    kept = {key: form[key] for key in ("description", "schema", "strict") if form.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": form.get("name", "response"), **kept}}


def _echo(body: JsonObject) -> JsonObject:
    echo = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    json_of(echo, "body")
    return echo
