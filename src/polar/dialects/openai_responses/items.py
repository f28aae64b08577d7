"""Input items to canonical messages. The way back is in `listing`.

Rules, where the provider's items and canonical messages differ:

* The reasoning, text and calls of one turn are items of their own; here they become one assistant message. A turn ends where
  an item of another party begins, or where an id shows that another completion wrote the item.
* Parts of a content that stand among the items, in no message, are a user's.
* Images in a tool's output go into a user message right after the run of tool outputs they belong to.
* Calls of hosted tools (`web_search_call`, `mcp_call`, ...) and items of unknown type stand for nothing: this gateway runs no
  hosted tools, so another server made them. They are never an error.
* An `item_reference` leaves its id in `Message.refs` and in `History.references`; what it stands for is for the gateway to restore.
"""

from __future__ import annotations

import base64
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polar.chat import Content, Image, JsonObject, Message, Part, Role, Text, Thinking, ToolCall, join_parts
from polar.dialects.base import as_list, as_object, as_str, bad
from polar.dialects.openai_responses import compaction
from polar.dialects.openai_responses.calls import ID_PREFIX, arguments_of, name_of
from polar.dialects.openai_responses.tools import Toolset, json_of

_REF = re.compile(r"(?:[a-z0-9]+_)+([0-9a-f]{26})(?:[0-9a-f]{2})?")
_ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ENCRYPTED = "gAAAA"
"""How a Fernet token begins: what the provider itself did encrypt."""
_IMAGES_FOLLOW = "Images from the tool output above:"


def reference(identifier: str | None) -> str | None:
    """The completion's reference inside an id of the form that this gateway issues (its signature is not checked here)."""
    match = _REF.fullmatch(identifier) if identifier else None
    return None if match is None else match.group(1)


@dataclass(slots=True)
class _Turn:
    """An assistant message in the making."""

    ref: str | None = None
    texts: list[str] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    thinking: list[Thinking] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    refs: list[str] = field(default_factory=list)

    def message(self) -> Message:
        text = "\n\n".join(text for text in self.texts if text)
        content: Content = text if not self.images else join_parts([*([Text(text)] if text else []), *self.images])
        return Message("assistant", content, tuple(self.thinking), tuple(self.calls), refs=tuple(self.refs))


class History:
    """Reads `input` item by item. Raises `InvalidRequest`, naming the item, and nothing else."""

    def __init__(self, tools: Toolset) -> None:
        self.effort: str | None = None
        """The effort of the last `configuration_update`."""
        self.references: list[str] = []
        """The ids of all `item_reference`s: an item that is sent whole has its id in `Message.refs`, too, however empty it is."""
        self._tools = tools
        self._done: list[Message | _Turn] = []
        self._turn: _Turn | None = None
        self._images: list[Image] = []
        self._bare: list[Part] = []
        self._call_ids: dict[str, str] = {}
        self._unanswered: set[str] = set()
        self._in_order: deque[str] = deque()
        """All calls since the oldest unanswered one."""

    def read(self, items: Sequence[Any], param: str = "input") -> None:
        for index, item in enumerate(items):
            where = f"{param}[{index}]"
            value = as_object(item, where)
            kind = value.get("type")
            if kind is None:
                if "role" not in value and "id" not in value:
                    raise bad("is required", f"{where}.type")
                kind = "message" if "role" in value else "item_reference"
            handler = _HANDLERS.get(as_str(kind, f"{where}.type"))
            if handler is None:
                continue
            if self._bare and handler is not History._bare_part:
                self._end_run()
            handler(self, value, where)

    def messages(self) -> tuple[Message, ...]:
        """All messages read so far."""
        self._end_run()
        return tuple(entry.message() if isinstance(entry, _Turn) else entry for entry in self._done)

    # --- the three parties -------------------------------------------------------------------------------------

    def _assistant(self, item: JsonObject, param: str, *identifiers: str | None) -> _Turn:
        """The turn that an item of the model's belongs to; `identifiers` are its further ids."""
        own = item.get("id")
        if own is not None:
            as_str(own, f"{param}.id")
        ref = reference(own)
        for name in identifiers:
            ref = ref or reference(name)
        if self._turn is None:
            earlier = next((entry for entry in reversed(self._done) if isinstance(entry, _Turn) or entry.role != "tool"), None)
            if ref is not None and isinstance(earlier, _Turn) and earlier.ref == ref:
                self._turn = earlier
            else:
                self._begin(ref)
        elif ref is not None and self._turn.ref not in (None, ref):
            self._begin(ref)
        turn = self._turn
        assert turn is not None
        turn.ref = turn.ref or ref
        if own:
            turn.refs.append(own)
        return turn

    def _begin(self, ref: str | None) -> None:
        self._end_run()
        self._turn = _Turn(ref)
        self._done.append(self._turn)

    def _say(self, message: Message) -> None:
        self._end_run()
        self._done.append(message)

    def _answer(self, item: JsonObject, param: str, content: Content) -> None:
        """An output of no call is something that the harness lets its agent know (Codex's messages from thread to thread)."""
        self._turn = None
        call_id = self._answered(item, param)
        if call_id is None:
            self._say(Message("user", content))
            return
        message = Message("tool", content, tool_call_id=call_id)
        self._images += message.images
        text = message.text or ("[image]" if message.images else "")
        self._done.append(Message("tool", text, tool_call_id=call_id))

    def _answered(self, item: JsonObject, param: str) -> str | None:
        """The call that an output belongs to: by call id, by item id (`local_shell_call_output`), else the oldest open one. `None` if there
        is none, or if the output names a tool instead of a call."""
        call_id = item.get("call_id")
        if call_id is not None:
            as_str(call_id, f"{param}.call_id")
        elif isinstance(item.get("id"), str):
            call_id = self._call_ids.get(item["id"])
        if call_id is None:
            while self._in_order and self._in_order[0] not in self._unanswered:
                self._in_order.popleft()
            call_id = self._in_order[0] if self._in_order and "name" not in item else None
        self._unanswered.discard(call_id)
        return call_id

    def _end_run(self) -> None:
        """Ends the current turn or run of tool outputs or of parts."""
        self._turn = None
        if self._images:
            self._done.append(Message("user", (Text(_IMAGES_FOLLOW), *self._images)))
            self._images = []
        if self._bare:
            self._done.append(Message("user", join_parts(self._bare)))
            self._bare = []

    # --- items -------------------------------------------------------------------------------------------------

    def _message(self, item: JsonObject, param: str) -> None:
        name = item.get("role")
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise bad(f"must be user, assistant, system or developer, not {name!r}", f"{param}.role")
        separator = "" if role == "assistant" else "\n"
        content = read_content(item.get("content"), f"{param}.content", separator)
        if role == "assistant":
            turn = self._assistant(item, param)
            message = Message("assistant", content)
            turn.texts.append(message.text)
            turn.images += message.images
        else:
            self._say(Message(role, content))

    def _bare_part(self, item: JsonObject, param: str) -> None:
        """A part of a content that stands among the items is the user's; neighbouring ones are one message."""
        parts = _part(item, param)
        if not self._bare:
            self._end_run()
        self._bare += parts

    def _reasoning(self, item: JsonObject, param: str) -> None:
        sealed = item.get("encrypted_content")
        if sealed is not None:
            as_str(sealed, f"{param}.encrypted_content")
        text = "".join(_texts(item.get("content"), f"{param}.content")) or "\n\n".join(_texts(item.get("summary"), f"{param}.summary"))
        turn = self._assistant(item, param, sealed)
        if text or sealed:
            turn.thinking.append(Thinking(text, sealed or None, redacted=not text))

    def _call(self, item: JsonObject, param: str) -> None:
        identifier = item.get("id")
        call_id = item.get("call_id")
        if call_id is None:
            call_id = identifier
        call_id = as_str(call_id, f"{param}.call_id")
        turn = self._assistant(item, param, call_id)
        turn.calls.append(ToolCall(call_id, name_of(item, param), arguments_of(item, param)))
        self._unanswered.add(call_id)
        self._in_order.append(call_id)
        if identifier:
            self._call_ids[identifier] = call_id

    def _output(self, item: JsonObject, param: str) -> None:
        self._answer(item, param, read_content(item.get("output"), f"{param}.output", "\n"))

    def _shell_output(self, item: JsonObject, param: str) -> None:
        output = item.get("output")
        if not isinstance(output, list):
            return self._output(item, param)
        lines: list[str] = []
        for index, entry in enumerate(output):
            where = f"{param}.output[{index}]"
            chunk = as_object(entry, where)
            lines += [text for text in (as_str(chunk.get(name) or "", f"{where}.{name}") for name in ("stdout", "stderr")) if text]
            outcome = chunk.get("outcome")
            if isinstance(outcome, dict):
                exited = outcome.get("type") == "exit"
                lines.append(f"[exit code {json_of(outcome.get('exit_code'), where)}]" if exited else "[timed out]")
        return self._answer(item, param, "\n".join(lines))

    def _patch_output(self, item: JsonObject, param: str) -> None:
        status = as_str(item.get("status") or "completed", f"{param}.status")
        output = as_str(item.get("output") or "", f"{param}.output")
        self._answer(item, param, f"{status}: {output}" if output else status)

    def _search_output(self, item: JsonObject, param: str) -> None:
        found = self._tools.load(item.get("tools", []), f"{param}.tools")
        self._answer(item, param, json_of([tool.schema()["function"] for tool in found], f"{param}.tools"))

    def _additional_tools(self, item: JsonObject, param: str) -> None:
        self._tools.declare(item.get("tools", []), f"{param}.tools")

    def _agent_message(self, item: JsonObject, param: str) -> None:
        """A message between a harness's agents."""
        author = as_str(item.get("author") or "another agent", f"{param}.author")
        content = read_content(item.get("content"), f"{param}.content", "")
        parts = (Text(content),) if isinstance(content, str) else content
        self._say(Message("user", join_parts([Text(f"Message from {author}:\n"), *parts], "")))

    def _compaction(self, item: JsonObject, param: str) -> None:
        sealed, own = item.get("encrypted_content"), item.get("id")
        if sealed is not None:
            as_str(sealed, f"{param}.encrypted_content")
        self._say(compaction.restored(sealed, (own,) if isinstance(own, str) else ()))

    def _configuration(self, item: JsonObject, param: str) -> None:
        reasoning = item.get("reasoning")
        if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
            self.effort = as_str(reasoning["effort"], f"{param}.reasoning.effort")

    def _reference(self, item: JsonObject, param: str) -> None:
        identifier = as_str(item.get("id"), f"{param}.id")
        if reference(identifier) is None:
            raise bad(f"item {identifier!r} is not stored here; send the item itself", f"{param}.id")
        self.references.append(identifier)
        self._assistant(item, param)


_HANDLERS: Mapping[str, Callable[[History, JsonObject, str], None]] = {
    "message": History._message,
    **dict.fromkeys(("input_text", "input_image", "input_file"), History._bare_part),
    "reasoning": History._reasoning,
    **dict.fromkeys(ID_PREFIX, History._call),
    "function_call_output": History._output,
    "custom_tool_call_output": History._output,
    "local_shell_call_output": History._output,
    "shell_call_output": History._shell_output,
    "apply_patch_call_output": History._patch_output,
    "tool_search_output": History._search_output,
    "additional_tools": History._additional_tools,
    "agent_message": History._agent_message,
    "compaction": History._compaction,
    "compaction_summary": History._compaction,
    "context_compaction": History._compaction,
    "configuration_update": History._configuration,
    "item_reference": History._reference,
}


# --- content ---------------------------------------------------------------------------------------------------


def read_content(value: Any, param: str, separator: str) -> Content:
    """A message's content or a tool's output: a string, a list of parts, or nothing."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        # Nearly all content of a long history is one text: don't build parts for it.
        text = value[0].get("text")
        if isinstance(text, str) and value[0].get("type") in _TEXTS:
            return text
    parts = [part for index, item in enumerate(as_list(value, param)) for part in _part(item, f"{param}[{index}]")]
    return join_parts(parts, separator)


def _part(item: Any, param: str) -> list[Part]:
    if isinstance(item, str):
        return [Text(item)]
    part = as_object(item, param)
    kind = part.get("type")
    if kind in ("input_image", "image_url"):  # the second is the other OpenAI protocol's name for it
        return [_image(part, param)]
    if kind == "input_file":
        return [Text(_file(part, param))]
    if kind == "input_audio":
        return [Text("[audio]")]
    if part.get("encrypted_content") is not None:
        # Codex has the provider encrypt what one agent writes to another (`"encrypted": true` in the tool's schema); this gateway
        # encrypts nothing, so what comes back is the text as it was written
        sealed = as_str(part["encrypted_content"], f"{param}.encrypted_content")
        return [] if sealed.startswith(_ENCRYPTED) else [Text(sealed)]
    if kind == "refusal":
        return [Text(as_str(part.get("refusal", ""), f"{param}.refusal"))]
    if kind in _TEXTS:
        return [Text(as_str(part.get("text"), f"{param}.text"))]
    if isinstance(part.get("text"), str):
        return [Text(part["text"])]
    return [Text(f"[{kind}]")] if isinstance(kind, str) else []


def _image(part: JsonObject, param: str) -> Part:
    source, detail = part.get("image_url"), part.get("detail")
    if isinstance(source, dict):
        detail = source.get("detail", detail)
        source = source.get("url")
    if source is None and isinstance(part.get("file_id"), str):
        return Text(f"[image {part['file_id']}]")
    if detail is not None:
        as_str(detail, f"{param}.detail")
    return Image(as_str(source, f"{param}.image_url"), detail)


def _file(part: JsonObject, param: str) -> str:
    """A text file's text; of any other file its name, so that the model knows of it."""
    for key in ("filename", "file_data", "file_url", "file_id"):
        if part.get(key) is not None:
            as_str(part[key], f"{param}.{key}")
    name = part.get("filename") or part.get("file_url") or part.get("file_id") or "unnamed"
    head, _, payload = (part.get("file_data") or "").partition(",")
    if head.startswith(("data:text/", "data:application/json")) and head.endswith(";base64"):
        try:
            return f"[file {name}]\n{base64.b64decode(payload).decode()}"
        except ValueError:
            return f"[file {name}]"
    return f"[file {name}]"


def _texts(value: Any, param: str) -> Iterable[str]:
    if value is None:
        return
    for index, item in enumerate(as_list(value, param)):
        text = as_object(item, f"{param}[{index}]").get("text")
        if text is not None:
            yield as_str(text, f"{param}[{index}].text")
