"""Canonical deltas to the event sequence of a Responses stream, and to the response that the events add up to.

Order of events: created, in_progress; then each output item from `output_item.added` through its parts and deltas to
`output_item.done`, one item at a time; then completed, incomplete or failed. `sequence_number` counts from 0 over all events.
Reasoning goes out as the item's summary, which is what clients show and keep; its `encrypted_content` is the completion's
reference, by which the token path finds the reasoning again.

The last open item is closed by the `FinishDelta`, so nothing tells a client that its text is whole before the completion is
durable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polar.chat import (
    ChatDelta,
    FinishDelta,
    JsonObject,
    LogprobsDelta,
    RefusalDelta,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from polar.dialects.base import Encoder, Reply, sse
from polar.dialects.openai_responses import compaction
from polar.dialects.openai_responses.body import (
    compacted_object,
    incomplete_reason,
    loaded_tools,
    logprob_objects,
    response_id,
    response_object,
)
from polar.dialects.openai_responses.calls import call_item, find_tool
from polar.dialects.openai_responses.errors import stream_error
from polar.dialects.openai_responses.listing import items_of
from polar.errors import CallError

Event = tuple[str, JsonObject]
"""An event's type, and its fields but for `type` and `sequence_number`."""

SEALED = "enc_"
"""The prefix of a reasoning item's `encrypted_content`; the completion's reference follows."""


class _Reasoning:
    """An open reasoning item with one summary part."""

    def __init__(self, ref: str, item_id: str, index: int) -> None:
        self._sealed = SEALED + ref
        self._at: JsonObject = {"item_id": item_id, "output_index": index, "summary_index": 0}
        self._item: JsonObject = {"id": item_id, "type": "reasoning", "summary": [], "encrypted_content": self._sealed}
        self._texts: list[str] = []

    def open(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._at["output_index"], "item": self._item}
        yield "response.reasoning_summary_part.added", {**self._at, "part": {"type": "summary_text", "text": ""}}

    def add(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield "response.reasoning_summary_text.delta", {**self._at, "delta": text}

    def close(self, *, cut: bool) -> Iterator[Event]:
        text = "".join(self._texts)
        part = {"type": "summary_text", "text": text}
        yield "response.reasoning_summary_text.done", {**self._at, "text": text}
        yield "response.reasoning_summary_part.done", {**self._at, "part": part}
        item = {**self._item, "summary": [part]}
        if cut:
            item["status"] = "incomplete"
        yield "response.output_item.done", {"output_index": self._at["output_index"], "item": item}


class _Message:
    """An open message item; its parts are a text, a refusal, or a text and then a refusal."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._parts: list[JsonObject] = []
        self._texts: list[str] = []
        self._logprobs: list[JsonObject] = []

    def open(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self._item("in_progress")}

    def add_text(self, text: str, logprobs: list[JsonObject]) -> Iterator[Event]:
        yield from self._part("output_text")
        self._logprobs += logprobs
        self._texts.append(text)
        yield "response.output_text.delta", {**self._at(), "delta": text, "logprobs": logprobs}

    def add_refusal(self, text: str) -> Iterator[Event]:
        yield from self._part("refusal")
        self._texts.append(text)
        yield "response.refusal.delta", {**self._at(), "delta": text}

    def close(self, *, cut: bool) -> Iterator[Event]:
        yield from self._end_part()
        yield "response.output_item.done", {"output_index": self._index, "item": self._item("incomplete" if cut else "completed")}

    def _part(self, kind: str) -> Iterator[Event]:
        if self._parts and self._parts[-1]["type"] == kind:
            return
        yield from self._end_part()
        part: JsonObject = {"type": "refusal", "refusal": ""}
        if kind == "output_text":
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
        self._parts.append(part)
        yield "response.content_part.added", {**self._at(), "part": dict(part)}

    def _end_part(self) -> Iterator[Event]:
        if not self._parts:
            return
        text, part = "".join(self._texts), self._parts[-1]
        self._texts = []
        if part["type"] == "output_text":
            part["text"], part["logprobs"] = text, self._logprobs
            yield "response.output_text.done", {**self._at(), "text": text, "logprobs": self._logprobs}
        else:
            part["refusal"] = text
            yield "response.refusal.done", {**self._at(), "refusal": text}
        yield "response.content_part.done", {**self._at(), "part": part}

    def _at(self) -> JsonObject:
        return {"item_id": self._id, "output_index": self._index, "content_index": len(self._parts) - 1}

    def _item(self, status: str) -> JsonObject:
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": list(self._parts)}


class ResponsesEncoder(Encoder):
    """The stream of an ordinary response. `final` is the whole response once the `FinishDelta` was fed."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.final: JsonObject = {}
        self._sequence = 0
        self._output: list[JsonObject] = []
        self._open: _Reasoning | _Message | None = None
        self._made: dict[str, int] = {}
        self._logprobs: list[TokenLogprob] = []

    def start(self) -> bytes:
        response = response_object(self.reply, "in_progress")
        return self._send([("response.created", {"response": response}), ("response.in_progress", {"response": response})])

    def feed(self, delta: ChatDelta) -> bytes:
        return self._send(self._events(delta))

    def end(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return b": ping\n\n"

    def error(self, error: CallError) -> bytes:
        code, message, body = stream_error(error)
        flat = {"code": code, "message": message, "param": body["param"]}
        failed = response_object(self.reply, "failed", self._output, error={"code": code, "message": message})
        return self._send([("error", {**flat, "error": body}), ("response.failed", {"response": failed})])

    def _send(self, events: Any) -> bytes:
        out: list[bytes] = []
        for kind, fields in events:
            out.append(sse({"type": kind, "sequence_number": self._sequence, **fields}, event=kind))
            self._sequence += 1
            if kind == "response.output_item.done":
                self._output.append(fields["item"])
        return b"".join(out)

    def _events(self, delta: ChatDelta) -> Iterator[Event]:
        match delta:
            case ThinkingDelta(text=text):
                if not isinstance(self._open, _Reasoning):
                    yield from self._close()
                    self._open = _Reasoning(self.reply.ref, self._id("rs_"), len(self._output))
                    yield from self._open.open()
                yield from self._open.add(text)
            case TextDelta(text=text):
                message = yield from self._message()
                yield from message.add_text(text, self._take_logprobs())
            case RefusalDelta(text=text):
                message = yield from self._message()
                self._logprobs = []  # a refusal's part has no place for them
                yield from message.add_refusal(text)
            case LogprobsDelta(logprobs=more):
                self._logprobs += more
            case ToolCallDelta(index=index, call=call):
                yield from self._close()
                yield from self._call(index, call)
            case FinishDelta():
                yield from self._finish(delta)

    def _message(self) -> Any:
        if not isinstance(self._open, _Message):
            yield from self._close()
            self._open = _Message(self._id("msg_"), len(self._output))
            yield from self._open.open()
        return self._open

    def _close(self, *, cut: bool = False) -> Iterator[Event]:
        if self._open is not None:
            if self._logprobs and isinstance(self._open, _Message):  # in a live stream all of them may come after the last of their text
                yield from self._open.add_text("", self._take_logprobs())
            yield from self._open.close(cut=cut)
            self._open = None

    def _take_logprobs(self) -> list[JsonObject]:
        taken, self._logprobs = logprob_objects(self._logprobs), []
        return taken

    def _id(self, prefix: str) -> str:
        """The completion's reference for its first item of a kind, with a two-digit index for further ones."""
        count = self._made.get(prefix, 0)
        self._made[prefix] = count + 1
        return prefix + self.reply.ref + (f"{count:02x}" if count else "")

    def _call(self, index: int, call: ToolCall) -> Iterator[Event]:
        tool = find_tool(call.name, self.reply.request.tools, loaded_tools(self.reply.request))
        item = call_item(call, tool, f"{self.reply.ref}{index:02x}")
        where = len(self._output)
        opening, between = call_events(item, where)
        yield "response.output_item.added", {"output_index": where, "item": opening}
        yield from between
        yield "response.output_item.done", {"output_index": where, "item": item}

    def _finish(self, delta: FinishDelta) -> Iterator[Event]:
        reason = incomplete_reason(delta.finish)
        if self._open is None and not self._output:
            # Empty, yet a turn: a client that keeps its items can only send this one back if there is an item.
            message = yield from self._message()
            yield from message.add_text("", self._take_logprobs())
        yield from self._close(cut=reason is not None)
        status = "completed" if reason is None else "incomplete"
        self.final = response_object(self.reply, status, self._output, usage=delta.usage, reason=reason)
        yield f"response.{status}", {"response": self.final}


class CompactionEncoder(ResponsesEncoder):
    """The answer to a compaction: the model's text becomes the one output item, its reasoning stays behind."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def _events(self, delta: ChatDelta) -> Iterator[Event]:
        match delta:
            case TextDelta(text=text) | RefusalDelta(text=text):
                self._texts.append(text)
            case ThinkingDelta(text=text):
                self._thoughts.append(text)
            case ToolCallDelta(call=call):
                self._texts.append(f"{call.name}({call.arguments})")
            case FinishDelta():
                yield from self._finish(delta)

    def _finish(self, delta: FinishDelta) -> Iterator[Event]:
        summary = "".join(self._texts) or "".join(self._thoughts)
        ref = self.reply.ref
        item: JsonObject = {"id": f"cmp_{ref}", "type": "compaction", "encrypted_content": compaction.seal(summary, ref)}
        yield "response.output_item.added", {"output_index": 0, "item": {**item, "encrypted_content": ""}}
        yield "response.compaction.compacting", {"output_index": 0, "item_id": item["id"]}
        yield "response.output_item.done", {"output_index": 0, "item": item}
        reason = incomplete_reason(delta.finish)
        status = "completed" if reason is None else "incomplete"
        if self.reply.request.options.get("compaction") == "endpoint":
            self.final = compacted_object(self.reply, [*self._kept(), item], delta.usage)
        else:
            self.final = response_object(self.reply, status, [item], usage=delta.usage, reason=reason)
        yield f"response.{status}", {"response": self.final}

    def _kept(self) -> list[JsonObject]:
        """The user's own messages, which the compact endpoint hands back before the summary."""
        said = [message for message in self.reply.request.messages if message.role == "user"]
        if said and said[-1].text.endswith(compaction.REQUEST):
            said.pop()
        return items_of(said, (), {})


def call_events(item: JsonObject, index: int) -> tuple[JsonObject, list[Event]]:
    """What comes before the finished `item` of a call at `output_index` `index`: the item as it opens, and the events between."""
    at: JsonObject = {"item_id": item["id"], "output_index": index}
    opening = {**item, "status": "in_progress"}
    events: list[Event] = []
    match item["type"]:
        case "function_call":
            opening["arguments"] = ""
            events = _text_events("response.function_call_arguments", "arguments", item["arguments"], at)
            # the reference had it as required for a year, and clients made from that (openai-java, async-openai) fail without it
            events[-1][1]["name"] = item["name"]
        case "custom_tool_call":
            opening["input"] = ""
            events = _text_events("response.custom_tool_call_input", "input", item["input"], at)
        case "tool_search_call":
            opening["arguments"] = {}
        case "local_shell_call":
            opening["action"] = {"type": "exec", "command": [], "env": {}}
        case "shell_call":
            opening["action"] = {"commands": [], "timeout_ms": None, "max_output_length": None}
            for number, command in enumerate(item["action"]["commands"]):
                place = {"output_index": index, "command_index": number}
                events.append(("response.shell_call_command.added", {**place, "command": ""}))
                events.append(("response.shell_call_command.delta", {**place, "delta": command}))
                events.append(("response.shell_call_command.done", {**place, "command": command}))
        case "apply_patch_call" if "diff" in item["operation"]:
            opening["operation"] = {**item["operation"], "diff": ""}
            events = _text_events("response.apply_patch_call_operation_diff", "diff", item["operation"]["diff"], at)
    return opening, events


def _text_events(kind: str, name: str, text: str, at: JsonObject) -> list[Event]:
    delta: list[Event] = [(f"{kind}.delta", {**at, "delta": text})] if text else []
    return [*delta, (f"{kind}.done", {**at, name: text})]


def encoder_for(reply: Reply) -> ResponsesEncoder:
    return CompactionEncoder(reply) if "compaction" in reply.request.options else ResponsesEncoder(reply)


__all__ = ["SEALED", "CompactionEncoder", "ResponsesEncoder", "call_events", "encoder_for", "response_id"]
