"""Tokenizer, chat template and incremental detokenisation of the engine server, without torch or transformers.

Templates are rendered as transformers renders them (the same Jinja environment, the same `tojson`), so that prompt ids equal
`apply_chat_template`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from polar.engine.api import ApiError, JsonObject, Tokenizer
from polar.tokens.tokenizer import Tokenizer as ModelTokenizer
from polar.tokens.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class JinjaTemplate:
    """A Hugging Face chat template. `specials` are the variables `bos_token`, `eos_token`, ... of the tokenizer."""

    def __init__(self, source: str, specials: dict[str, str] | None = None) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._template = environment.from_string(source)
        self._specials = specials or {}

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None, **kwargs: Any) -> str:
        values = {"add_generation_prompt": True, **self._specials, **kwargs}
        try:
            return self._template.render(messages=list(messages), tools=list(tools) if tools else None, **values)
        except Exception as error:  # whatever a template raises is about the caller's messages
            raise ApiError(400, f"The chat template refused the messages: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise ValueError(message)


class FastTokenizer:
    """A model's own tokenizer, with the end tokens that its generation configuration names."""

    def __init__(self, tokenizer: ModelTokenizer, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)


class ByteTokenizer:
    """Round-trips any UTF-8 text: one id per byte, and the ChatML markers as ids 256 to 259. For tests without a vocabulary."""

    specials = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>")
    eos_ids: tuple[int, ...] = (257,)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        rest = text
        while rest:
            found = [(at, name) for name in self.specials if (at := rest.find(name)) >= 0]
            if not found:
                ids.extend(rest.encode())
                break
            at, name = min(found)
            ids.extend(rest[:at].encode())
            ids.append(256 + self.specials.index(name))
            rest = rest[at + len(name) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        out = bytearray()
        for token in ids:
            if token < 256:
                out.append(token)
            elif not skip_special and token - 256 < len(self.specials):
                out.extend(self.specials[token - 256].encode())
        return out.decode(errors="replace")


def load_text(directory: Path) -> tuple[FastTokenizer, JinjaTemplate]:
    """Tokenizer and template of a model directory. Raises `ConfigError` where there is no tokenizer.json."""
    tokenizer = load_tokenizer(directory)
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(directory / name).get("eos_token_id")
        ids += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    specials = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in tokenizer.config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return FastTokenizer(tokenizer, list(dict.fromkeys(ids))), JinjaTemplate(tokenizer.chat_template or CHATML, specials)


def _json(path: Path) -> JsonObject:
    if not path.exists():
        return {}
    loaded: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def normalise_messages(messages: Any) -> list[JsonObject]:
    """Chat messages as templates expect them: text parts joined by a newline, tool-call arguments parsed, reasoning under
    both keys. Raises `ApiError` 400 for what is no message, and for images, which this server has no model for."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list that is not empty.", param="messages")
    out: list[JsonObject] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{index}] must be an object with a role.", param="messages")
        copy = dict(message)
        copy["content"] = _content(message.get("content"), index)
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:
            copy["reasoning"] = copy["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            copy["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        else:
            copy.pop("tool_calls", None)
        out.append(copy)
    return out


def _content(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ApiError(400, f"messages[{index}].content holds a part that is no text; this model reads text only.", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any) -> JsonObject:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ApiError(400, "every tool call must have a function.", param="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise ApiError(400, f"tool call arguments are not JSON: {error}", param="messages") from error
    return {**call, "function": function}


class Detokenizer:
    """Turns sampled ids into text piece by piece: `push` returns the text that is final so far, in amortised constant time."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """The new text; empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._prefix : self._read], skip_special=self._skip)
        now = self._tokenizer.decode(self._ids[self._prefix :], skip_special=self._skip)
        if len(now) <= len(before) or now.endswith("�"):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, incomplete characters replaced."""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read], skip_special=self._skip)
        now = self._tokenizer.decode(self._ids[self._prefix :], skip_special=self._skip)
        self._prefix = self._read = len(self._ids)
        return now[len(before) :]


__all__ = ["CHATML", "ByteTokenizer", "Detokenizer", "FastTokenizer", "JinjaTemplate", "load_text", "normalise_messages"]
