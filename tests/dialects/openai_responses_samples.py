"""What the Responses tests share: one request with a tool of every kind, answers, and a reader of event streams."""

from __future__ import annotations

from typing import Any

import orjson

from polar.chat import Answer, ChatRequest, FinishReason, Message, Thinking, ToolCall, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.openai_responses import OpenAIResponses

DIALECT = OpenAIResponses()
REF = "0123456789abcdef0123456789"
USAGE = Usage(prompt=100, completion=40, cached=80, thinking=30)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}, "strict": True},
    {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "mcp__fs",
        "description": "files",
        "tools": [{"type": "function", "name": "read"}, {"type": "custom", "name": "exec"}],
    },
    {"type": "shell"},
    {"type": "local_shell"},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
    {"type": "web_search"},
]
CALLS: dict[str, tuple[str, str]] = {
    "function": ("read", '{"p": "a"}'),
    "custom": ("patch", '{"input": "*** Begin Patch\\n"}'),
    "namespaced": ("mcp__fs__read", "{}"),
    "namespaced custom": ("mcp__fs__exec", '{"input":"text(1)"}'),
    "shell": ("shell", '{"commands": ["ls", "pwd"], "timeout_ms": 5}'),
    "local_shell": ("local_shell", '{"command": ["ls", "-a"], "working_directory": "/x", "env": {"A": "b"}}'),
    "apply_patch": ("apply_patch", '{"type": "update_file", "path": "a", "diff": "+x"}'),
    "apply_patch delete": ("apply_patch", '{"type": "delete_file", "path": "a"}'),
    "tool_search": ("tool_search", '{"q": "calendar"}'),
}
"""Arguments as sampled, by kind of tool: (flat name, JSON text)."""


def request(**body: Any) -> ChatRequest:
    return DIALECT.parse({"model": "m", "input": "hi", "tools": TOOLS, **body}, Route(Operation.GENERATE))


def reply(**body: Any) -> Reply:
    return Reply(request=request(**body), ref=REF, created=1_700_000_000)


def answer(
    text: str = "",
    *calls: tuple[str, str],
    thinking: str = "",
    finish: FinishReason | None = None,
    refusal: str | None = None,
) -> Answer:
    made = tuple(ToolCall(f"{REF}{index:02x}", name, arguments) for index, (name, arguments) in enumerate(calls))
    message = Message("assistant", text, (Thinking(thinking),) if thinking else (), made)
    return Answer(message, finish or ("tool_calls" if calls else "stop"), USAGE, refusal=refusal)


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream; checks that each is named by its type, and that the numbers rise from 0."""
    found: list[dict[str, Any]] = []
    for block in stream.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(reply_: Reply, answer_: Answer) -> list[dict[str, Any]]:
    early, late = replay(DIALECT.encoder(reply_), [answer_])
    return events(early + late)


def added_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items, put together from deltas only (calls of structured kinds come whole)."""
    items: dict[int, dict[str, Any]] = {}
    for event in found:
        kind, index = event["type"], event.get("output_index")
        match kind:
            case "response.output_item.added":
                assert index == len(items)
                items[index] = dict(event["item"])
            case "response.content_part.added":
                assert event["content_index"] == len(items[index]["content"])
                items[index]["content"] = [*items[index]["content"], dict(event["part"])]
            case "response.output_text.delta":
                part = items[index]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] = part["logprobs"] + event["logprobs"]
            case "response.refusal.delta":
                items[index]["content"][event["content_index"]]["refusal"] += event["delta"]
            case "response.reasoning_summary_part.added":
                items[index]["summary"] = [*items[index]["summary"], dict(event["part"])]
            case "response.reasoning_summary_text.delta":
                items[index]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[index]["arguments"] += event["delta"]
            case "response.custom_tool_call_input.delta":
                items[index]["input"] += event["delta"]
            case "response.output_item.done":
                done = event["item"]
                assert done["id"] == items[index]["id"]
                for name in ("content", "summary", "input"):
                    assert items[index].get(name) == done.get(name)
                if done["type"] == "function_call":
                    assert items[index]["arguments"] == done["arguments"]
                items[index] = done
        if "item_id" in event:
            assert event["item_id"] == items[index]["id"]
    return [items[index] for index in sorted(items)]
