"""An Anthropic Messages body to a `ChatRequest`. Raises `InvalidRequest` and nothing else, for any JSON object.

As the provider does, neighbouring user messages count as one turn: its tool results first, in order, each a tool message, then one user
message with the rest. Neighbouring assistant messages are one answer, split by its harness, unless both hold text. System messages stay
where they stand; one that is empty (a per-turn `output_config`, say) adds nothing. `clear_at` is ignored: text that vanished later would
take every token sampled after it out of its context.

No thread is held: a request that would continue one, and so lacks its history, is refused in the way that makes the official SDKs send
the whole of it.
"""

from __future__ import annotations

from typing import Any

from polar.chat import ChatRequest, JsonObject, Message, Part, Sampling, join_parts
from polar.dialects.anthropic.content import assistant_message, instruction_text, system_text, user_blocks
from polar.dialects.anthropic.errors import THREAD_NOT_FOUND
from polar.dialects.anthropic.tools import Toolbox, parse_tool_choice, parse_tools, schema_object
from polar.dialects.base import as_list, as_object, as_str, bad, optional_bool, optional_float, optional_int
from polar.errors import InvalidRequest


def parse_request(body: JsonObject, *, counting: bool = False) -> ChatRequest:
    """The canonical request; a token count (`counting`) needs no `max_tokens`.

    `options` may hold `thinking_omitted` (the caller wants signatures without the text), `context_management` (it asked for edits
    and is told that none were made) and `loaded_tools` (deferred tools that stand in the messages instead of in `tools`).
    """
    _check_thread(body.get("thread"))
    toolbox = parse_tools(body.get("tools"))
    tool_choice, parallel_tool_calls = parse_tool_choice(body.get("tool_choice"), toolbox)
    messages, effort = _messages(body, toolbox)
    thinking, options = _thinking(body.get("thinking"))
    if body.get("context_management") is not None:
        options["context_management"] = True
    if toolbox.loaded:
        options["loaded_tools"] = tuple(toolbox.loaded.values())
    if not counting and body.get("compaction") is not None:
        raise bad("no conversation is compacted here; ask for a summary in a message of your own", "compaction")
    if not counting and body.get("max_tokens") is None:
        raise bad("field required", "max_tokens")
    return ChatRequest(
        model=as_str(body.get("model"), "model"),
        messages=messages,
        tools=tuple(toolbox.head.values()),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        sampling=Sampling(
            max_tokens=optional_int(body, "max_tokens", minimum=1),
            temperature=optional_float(body, "temperature", minimum=0.0, maximum=1.0),
            top_p=optional_float(body, "top_p", minimum=0.0, maximum=1.0),
            top_k=optional_int(body, "top_k", minimum=0),
            stop=_stop_sequences(body.get("stop_sequences")),
        ),
        thinking=thinking,
        effort=effort,
        response_format=_response_format(body),
        stream=optional_bool(body, "stream") or False,
        begun=_is_begun(messages),
        options=options,
    )


def _check_thread(value: Any) -> None:
    """`thread` (beta `message-threads-2026-08-12`): one is begun with a whole conversation, which is served as it comes."""
    if value is None:
        return
    kind = as_str(as_object(value, "thread").get("type"), "thread.type")
    if kind == "continue":
        message = 'threads are not held here; send the full conversation, without `thread` or with {"type": "create"}'
        raise InvalidRequest(message, status=404, code=THREAD_NOT_FOUND, param="thread")
    if kind != "create":
        raise bad(f"{kind!r} is not one of create, continue", "thread.type")


def _messages(body: JsonObject, toolbox: Toolbox) -> tuple[tuple[Message, ...], str | None]:
    """The conversation, and the effort asked for: of the last message that says one, else of the request."""
    conversation = _Conversation()
    effort = _effort(body, "output_config")
    if body.get("system") is not None:
        conversation.system(system_text(body["system"]))
    items = as_list(body.get("messages"), "messages")
    if not items:
        raise bad("at least one message is required", "messages")
    for index, item in enumerate(items):
        path = f"messages.{index}"
        message = as_object(item, path)
        role, content = as_str(message.get("role"), f"{path}.role"), message.get("content")
        match role:
            case "user":
                conversation.user(*user_blocks(content, f"{path}.content", toolbox))
            case "assistant":
                conversation.assistant(assistant_message(content, f"{path}.content"))
            case "system":
                effort = _effort(message, f"{path}.output_config") or effort
                conversation.system("" if content is None else instruction_text(content, f"{path}.content", toolbox))
            case _:
                raise bad(f"{role!r} is not one of user, assistant, system", f"{path}.role")
    return conversation.done(), effort


def _is_begun(messages: tuple[Message, ...]) -> bool:
    """Whether a conversation ends in the beginning of an answer: text of the assistant's that nothing else came with."""
    last = messages[-1] if len(messages) > 1 else Message("user")
    return last.role == "assistant" and bool(last.text.strip()) and not last.thinking and not last.tool_calls


class _Conversation:
    """Collects messages; holds the present turn, a user's or an answer, open until another role speaks."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turn: tuple[list[Message], list[Part]] | None = None
        self._answer: list[Message] = []
        self._answer_has_text = False

    def system(self, text: str) -> None:
        if text:
            self._close()
            self._messages.append(Message("system", text))

    def user(self, results: list[Message], parts: list[Part]) -> None:
        if self._turn is None:
            self._close()
            self._turn = ([], [])
        self._turn[0].extend(results)
        self._turn[1].extend(parts)

    def assistant(self, message: Message) -> None:
        if self._turn is not None or (self._answer_has_text and message.content):
            self._close()
        self._answer.append(message)
        self._answer_has_text = self._answer_has_text or bool(message.content)

    def done(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def _close(self) -> None:
        if self._turn is not None:
            results, parts = self._turn
            self._turn = None
            self._messages.extend(results)
            if parts or not results:
                self._messages.append(Message("user", join_parts(parts)))
        elif self._answer:
            pieces, self._answer, self._answer_has_text = self._answer, [], False
            content = next((piece.content for piece in pieces if piece.content), "")
            thinking = tuple(block for piece in pieces for block in piece.thinking)
            self._messages.append(Message("assistant", content, thinking, tuple(call for piece in pieces for call in piece.tool_calls)))


def _thinking(value: Any) -> tuple[bool | None, dict[str, Any]]:
    """The switch, and the option to leave the text out of the answer."""
    if value is None:
        return None, {}
    config = as_object(value, "thinking")
    kind = as_str(config.get("type"), "thinking.type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise bad(f"{kind!r} is not one of enabled, adaptive, between_tools, disabled", "thinking.type")
    return kind != "disabled", {"thinking_omitted": True} if config.get("display") == "omitted" else {}


def _effort(holder: JsonObject, path: str) -> str | None:
    config = holder.get("output_config")
    if config is None:
        return None
    effort = as_object(config, path).get("effort")
    return None if effort is None else as_str(effort, f"{path}.effort")


def _response_format(body: JsonObject) -> JsonObject | None:
    """`output_config.format`, or the older `output_format`, in the OpenAI Chat form."""
    config = body.get("output_config")
    path, value = "output_format", body.get("output_format")
    if config is not None and as_object(config, "output_config").get("format") is not None:
        path, value = "output_config.format", config["format"]
    if value is None:
        return None
    output = as_object(value, path)
    kind = as_str(output.get("type"), f"{path}.type")
    if kind != "json_schema":
        raise bad(f"must be 'json_schema', not {kind!r}", f"{path}.type")
    schema = schema_object(output.get("schema"), f"{path}.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _stop_sequences(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = tuple(as_str(item, f"stop_sequences.{index}") for index, item in enumerate(as_list(value, "stop_sequences")))
    if "" in stops:
        raise bad("must not be empty", f"stop_sequences.{stops.index('')}")
    return stops
