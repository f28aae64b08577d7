"""`contents` and `systemInstruction` as canonical messages.

Decisions, where the protocol leaves a choice:

* Neighbouring model contents are one assistant message: the official SDKs' chats echo a streamed answer chunk by chunk. Its texts
  are joined as they are; texts of a user or system content are joined by a newline.
* One user content gives its function responses first, as tool messages, then the rest as one user message.
* A call without an id gets `gemini_call_N` (N counts the conversation's calls: the same each time the history is sent). A response
  goes to the open call with its id, else to the first open call of its name, else keeps its own id. Calls of an earlier model turn
  are no longer open.
* A function response's text is its one string where the response is `{"output": s}`, `{"result": s}` or `{"content": s}` (with
  or without the function's own `name` beside it), `""` where it is empty, else compact JSON: an `{"error": ...}` stays visible as one.
* Bytes that are text are decoded, images are images, anything else becomes a placeholder that names it.
* A signature on a thought is the thought's own and a reference of the message; on any other part it is a reference only.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import orjson

from polar.chat import Content, Image, JsonObject, Message, Part, Text, Thinking, ToolCall, join_parts
from polar.dialects.base import as_list, as_object, as_str, bad, data_url, json_text, optional_bool

Fields = Mapping[str, Any]

_PART = (
    "text",
    "thought",
    "thoughtSignature",
    "functionCall",
    "functionResponse",
    "inlineData",
    "fileData",
    "executableCode",
    "codeExecutionResult",
)
_RESULT_KEYS = ("output", "result", "content")


def fields(value: Any, param: str, *names: str) -> Fields:
    """The named fields of an object, under their camelCase names, however they were spelled; null is absent."""
    spellings = _spellings(names)
    found: JsonObject = {}
    for key, item in as_object(value, param).items():
        name = spellings.get(key)
        if name is not None and item is not None and (name == key or name not in found):
            found[name] = item
    return found


@cache
def _spellings(names: tuple[str, ...]) -> dict[str, str]:
    """From either spelling to the camelCase name."""
    snake = {re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), name): name for name in names}
    return snake | {name: name for name in names}


def plural(value: Any, param: str) -> list[Any]:
    """A repeated field, which Google also takes as its one element alone."""
    if value is None:
        return []
    return [value] if isinstance(value, dict) else as_list(value, param)


def messages(system: Any, contents: Any) -> tuple[Message, ...]:
    """The system instruction, if any, then the contents' messages in order."""
    result: list[Message] = []
    if system is not None:
        result.append(Message("system", _content(_parts(_instruction(system), "systemInstruction"), "\n")))
    turns = _turns(contents)
    if not turns:
        raise bad("must hold at least one content", "contents")
    pairing = _Pairing()
    for role, parts in turns:
        if role == "model":
            result.append(_model(parts, pairing))
        elif role == "system":
            result.append(Message("system", _content(parts, "\n")))
        else:
            result.extend(_user(parts, pairing))
    return tuple(result)


def _instruction(system: Any) -> Any:
    """A system instruction as a content, where its text, its parts or a part of it were sent in its place."""
    if isinstance(system, str | list):
        return {"parts": [system] if isinstance(system, str) else system}
    return {"parts": system} if isinstance(system, dict) and "text" in system else system


@dataclass(frozen=True, slots=True)
class _RawPart:
    fields: Fields
    param: str


def _turns(contents: Any) -> list[tuple[str, list[_RawPart]]]:
    turns: list[tuple[str, list[_RawPart]]] = []
    for index, value in enumerate(plural(contents, "contents")):
        param = f"contents[{index}]"
        role = fields(value, param, "role").get("role") or "user"
        if role not in ("user", "model", "function", "tool", "system"):
            raise bad(f"must be user or model, not {role!r}", f"{param}.role")
        parts = _parts(value, param)
        if role == "model" and turns and turns[-1][0] == "model":
            turns[-1][1].extend(parts)
        else:
            turns.append((role, parts))
    return turns


def _parts(value: Any, param: str) -> list[_RawPart]:
    listed = fields(value, param, "parts").get("parts")
    return [
        _RawPart({"text": part} if isinstance(part, str) else fields(part, f"{param}.parts[{index}]", *_PART), f"{param}.parts[{index}]")
        for index, part in enumerate(plural(listed, f"{param}.parts"))
    ]


def _model(parts: list[_RawPart], pairing: _Pairing) -> Message:
    pairing.forget()
    thinking: list[Thinking] = []
    calls: list[ToolCall] = []
    refs: list[str] = []
    visible: list[_RawPart] = []
    for part in parts:
        signature = part.fields.get("thoughtSignature")
        if signature is not None:
            refs.append(as_str(signature, f"{part.param}.thoughtSignature"))
        if "functionCall" in part.fields:
            calls.append(_function_call(part.fields["functionCall"], f"{part.param}.functionCall", pairing))
        elif optional_bool(part.fields, "thought"):
            if text := as_str(part.fields.get("text", ""), f"{part.param}.text"):
                thinking.append(Thinking(text, signature))
        else:
            visible.append(part)
    return Message("assistant", _content(visible, ""), thinking=tuple(thinking), tool_calls=tuple(calls), refs=tuple(dict.fromkeys(refs)))


def _user(parts: list[_RawPart], pairing: _Pairing) -> list[Message]:
    responses = [part for part in parts if "functionResponse" in part.fields]
    rest = [part for part in parts if "functionResponse" not in part.fields]
    result = [_function_response(part.fields["functionResponse"], f"{part.param}.functionResponse", pairing) for part in responses]
    if rest or not responses:
        result.append(Message("user", _content(rest, "\n")))
    return result


def _function_call(value: Any, param: str, pairing: _Pairing) -> ToolCall:
    call = fields(value, param, "id", "name", "args")
    name = as_str(call.get("name"), f"{param}.name")
    arguments = _json(as_object(call.get("args", {}), f"{param}.args"), f"{param}.args")
    return ToolCall(pairing.call(name, _id(call, param)), name, arguments)


def _function_response(value: Any, param: str, pairing: _Pairing) -> Message:
    response = fields(value, param, "id", "name", "response", "parts")
    name = as_str(response.get("name"), f"{param}.name")
    text = _result_text(as_object(response.get("response", {}), f"{param}.response"), name, f"{param}.response")
    own_id = _id(response, param)
    call_id = pairing.response(name, own_id)
    content: Content = text
    if attached := _parts(response, param):
        pieces = [piece for part in attached if (piece := _piece(part)) is not None]
        content = join_parts([*([Text(text)] if text else []), *pieces])
    refs = (own_id,) if own_id is not None and own_id != call_id else ()
    return Message("tool", content, tool_call_id=call_id, name=name, refs=refs)


def _result_text(response: JsonObject, name: str, param: str) -> str:
    if not response:
        return ""
    keys = [key for key in response if not (key == "name" and response[key] == name and len(response) == 2)]
    if len(keys) == 1 and keys[0] in _RESULT_KEYS and isinstance(response[keys[0]], str):
        return str(response[keys[0]])
    return _json(response, param)


def _id(value: Fields, param: str) -> str | None:
    return as_str(value["id"], f"{param}.id") or None if "id" in value else None


@dataclass(slots=True)
class _Pairing:
    """Which call a response answers. `open` holds the unanswered ids of the current model turn by function name, in order."""

    calls: int = 0
    responses: int = 0
    open: dict[str, dict[str, None]] = field(default_factory=dict)

    def forget(self) -> None:
        self.open.clear()

    def call(self, name: str, call_id: str | None) -> str:
        call_id = call_id or f"gemini_call_{self.calls}"
        self.calls += 1
        self.open.setdefault(name, {})[call_id] = None
        return call_id

    def response(self, name: str, call_id: str | None) -> str:
        self.responses += 1
        waiting = self.open.get(name, {})
        if call_id is None or call_id not in waiting:
            call_id = next(iter(waiting), call_id or f"gemini_response_{self.responses - 1}")
        waiting.pop(call_id, None)
        return call_id


# --- parts with something to read ------------------------------------------------------------------------------------


def _content(parts: list[_RawPart], separator: str) -> Content:
    return join_parts((piece for part in parts if (piece := _piece(part)) is not None), separator)


def _piece(part: _RawPart) -> Part | None:
    """The text or image of a part; `None` where it has neither (a bare signature, a kind that is not known here)."""
    values, param = part.fields, part.param
    if "text" in values:
        text = as_str(values["text"], f"{param}.text")
        return Text(text) if text else None
    if "inlineData" in values:
        return _inline(values["inlineData"], f"{param}.inlineData")
    if "fileData" in values:
        return _file(values["fileData"], f"{param}.fileData")
    if "executableCode" in values:
        code = fields(values["executableCode"], f"{param}.executableCode", "language", "code")
        return Text(f"```python\n{as_str(code.get('code', ''), f'{param}.executableCode.code')}\n```")
    if "codeExecutionResult" in values:
        result = fields(values["codeExecutionResult"], f"{param}.codeExecutionResult", "output")
        return Text(f"```\n{as_str(result.get('output', ''), f'{param}.codeExecutionResult.output')}\n```")
    for kind in ("functionCall", "functionResponse"):
        if kind in values:
            raise bad("has no place in a content of this role", f"{param}.{kind}")
    return None


def _inline(value: Any, param: str) -> Part:
    """Google takes bytes in the standard or in the URL-safe alphabet (so the official Python SDK), padded or not; what goes on is the
    standard one, padded."""
    blob = fields(value, param, "mimeType", "data")
    mime = as_str(blob.get("mimeType", "application/octet-stream"), f"{param}.mimeType").partition(";")[0].strip().lower()
    data = as_str(blob.get("data", ""), f"{param}.data").replace("-", "+").replace("_", "/")
    data += "=" * (-len(data) % 4)
    if mime.startswith("image/"):
        return Image(data_url(mime, data))
    if mime.startswith("text/") or mime == "application/json":
        try:
            return Text(base64.b64decode(data, validate=True).decode(errors="replace"))
        except (binascii.Error, ValueError) as error:
            raise bad("is not valid base64", f"{param}.data") from error
    return Text(f"[{mime} data: this model cannot read it]")


def _file(value: Any, param: str) -> Part:
    file = fields(value, param, "mimeType", "fileUri")
    uri = as_str(file.get("fileUri"), f"{param}.fileUri")
    mime = as_str(file.get("mimeType", ""), f"{param}.mimeType")
    if mime.startswith("image/") or (not mime and uri.startswith("data:image/")):
        return Image(uri)
    return Text(f"[file {uri} ({mime or 'unknown type'}): this model cannot read it]")


def _json(value: JsonObject, param: str) -> str:
    """Compact JSON text; a value that cannot be written (nested beyond what JSON writers take) is the caller's mistake."""
    try:
        return json_text(value)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise bad(f"cannot be written as JSON ({error})", param) from error
