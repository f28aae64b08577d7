"""The renderer seam: canonical messages to the `renderers` library's, prompts to ids, and bridges from one turn to the next.

One `Rendering` is one renderer with fixed template arguments (the thinking switch, the effort). It holds no conversation and is safe to use
from several threads. Law 2 is enforced here: a bridge whose result does not start with exactly the ids it was given is refused.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from renderers import create_renderer
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name

from polar.chat import ChatRequest, JsonObject, Message, Tool
from polar.errors import ConfigError, InvalidRequest
from polar.records import Ids
from polar.tokens import fingerprint
from polar.tokens.tokenizer import FoldingTokenizer, PlainTokenizer, unfolded

_TAIL_ONLY = frozenset({"qwen3", "qwen3.5", "qwen3.6", "qwen3.8"})
"""Renderers whose bridge reads nothing of the earlier prompt but its last, open turn (renderers 0.1.12, read and tested): they get only
that."""
_SEPARABLE = frozenset({"qwen3"})
"""Renderers that encode the system and tools block by itself, whatever follows: its ids are kept across sessions."""
_FOLDABLE = frozenset({"qwen3"})
"""Renderers that hand on the ids of a text as they come from the tokenizer, without a look at them (renderers 0.1.12, read and tested)."""
_TAGGED = frozenset({"qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"})
"""Renderers of answers marked by single tokens `<think> </think> <tool_call> </tool_call>`: these can be read as they stream."""
_KNOWN_TEMPLATES = {"87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5": "qwen3"}
_HEADS_KEPT = 256
_EFFORT_CHARS = 32
"""No provider's word for an effort is longer; whatever else a harness sends there is not kept."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The single tokens that structure an answer."""

    think: int
    think_end: int
    call: int
    call_end: int
    stop: frozenset[int]


def renderer_name(tokenizer: Any, *, model: str, renderer: str | None) -> str:
    """The renderer to use: as named, else by the model's exact name, else by a chat template known to the last character.

    Raises `ConfigError` where it cannot be told: a renderer for the wrong template would train on prompts that the engine never saw.
    """
    if renderer is not None and renderer != "auto":
        try:
            config = config_from_name(renderer)
        except ValueError as error:
            raise ConfigError(f"--renderer {renderer}: {error}") from error
        if renderer == "default" or config is None:
            raise ConfigError("--renderer default cannot extend a prompt; name the model's renderer, or use mode messages")
        return renderer
    for name in (model, getattr(tokenizer, "name_or_path", "")):
        if name in MODEL_RENDERER_MAP:
            return str(MODEL_RENDERER_MAP[name])
    known = _KNOWN_TEMPLATES.get(getattr(tokenizer, "template_hash", None) or "")
    if known is not None:
        return known
    raise ConfigError(f"no renderer is known for model {model!r}; name one with --renderer, or use mode messages")


def template_arguments(name: str, request: ChatRequest) -> JsonObject:
    """The template arguments that this request's thinking switch and effort set, as far as the renderer knows them."""
    known = request.effort is None or len(request.effort) <= _EFFORT_CHARS
    return dict((_arguments if known else _arguments.__wrapped__)(name, request.thinking, request.effort))


@lru_cache(maxsize=256)
def _arguments(name: str, thinking: bool | None, effort: str | None) -> tuple[tuple[str, Any], ...]:
    default = config_from_name(name)
    assert default is not None
    fields = type(default).template_field_names()
    wanted: JsonObject = {}
    if thinking is not None and "enable_thinking" in fields:
        wanted["enable_thinking"] = thinking
    if effort is not None and "reasoning_effort" in fields:
        with suppress(ValueError):  # pydantic's: an effort of another provider, which this model has no word for
            type(default)(**wanted, reasoning_effort=effort)
            wanted["reasoning_effort"] = effort
    return tuple(wanted.items())


class Rendering:
    """One renderer under fixed settings. `settings` is its whole configuration, as recorded and as hashed into roots."""

    def __init__(self, tokenizer: Any, name: str, *, thinking_retention: str, arguments: JsonObject) -> None:
        default = config_from_name(name)
        assert default is not None
        retention = {} if thinking_retention == "template" else {"thinking_retention": thinking_retention}
        try:
            config = type(default)(**retention, **arguments)
            self._tokenizer = FoldingTokenizer(tokenizer) if name in _FOLDABLE else PlainTokenizer(tokenizer)
            self._renderer: Any = create_renderer(self._tokenizer, config)
        except (ValueError, AssertionError, TypeError) as error:
            raise ConfigError(f"renderer {name} does not fit the tokenizer {tokenizer.name_or_path}: {error}") from error
        self.name = name
        self.settings: JsonObject = config.model_dump(mode="json")
        self.settings_part = fingerprint.part(fingerprint.canonical_value(self.settings))
        """What a root says of the settings."""
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._stops = self.stop_token_ids or (-1,)
        self.markers = self._find_markers()
        self._heads: OrderedDict[bytes, Ids] = OrderedDict()
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """int32[n]: the whole prompt as the model's template writes it, up to where the next answer begins.

        Raises `InvalidRequest` where the template itself would raise (no messages, no user message, ...).
        """
        schemas = [tool.schema() for tool in tools]
        dicts = to_renderer(messages)
        if self.name in _SEPARABLE and any(_opens_with_newline(one) for one in dicts):
            # the library encodes an assistant's text apart from the newline before it, the template's text merges both
            whole = self._tokenizer.decode(self._render(dicts, schemas))
            return self._ids(self._tokenizer.encode(whole))
        if self.name not in _SEPARABLE or not (schemas or (dicts and dicts[0]["role"] == "system")):
            return self._ids(self._render(dicts, schemas))
        body = dicts[1:] if dicts and dicts[0]["role"] == "system" else dicts
        if not body or body[0]["role"] == "system":
            return self._ids(self._render(dicts, schemas))
        head = self._head(dicts[: len(dicts) - len(body)], schemas)
        return np.concatenate([head, self._ids(self._render(body, []))])

    def bridge(
        self, prompt: Ids, sampled: Ids, new: Sequence[Message], tools: Sequence[Tool], answer: Message | None = None
    ) -> tuple[Ids | None, str]:
        """The next prompt, int32[n], which starts with `prompt + sampled` to the last id; or `None` and why it cannot be had.

        `prompt`, `sampled`: int32[n] as the engine saw and sent them. `new` are the messages since, none of them an assistant's;
        `answer` is the message that was sampled, whose calls name the tools that `new` answers (some templates write the name).
        """
        if not new:
            return None, "nothing new after the answer"
        if any(message.role == "assistant" for message in new):
            return None, "assistant text among the new messages"
        start = self._last_turn(prompt) if self.name in _TAIL_ONLY else 0
        tail = prompt[start:].tolist()
        known = tail + sampled.tolist()
        names = {} if answer is None else {call.id: call.name for call in answer.tool_calls}
        schemas = [tool.schema() for tool in tools]
        messages = to_renderer(new, names)
        try:
            with self._tokenizer.folding() as texts:
                result = self._renderer.bridge_to_next_turn(tail, known[len(tail) :], messages, tools=schemas or None)
        except ValueError as error:
            return None, f"the model's template refuses these messages: {error}"
        if result is None:
            return None, self._refusal(prompt, known[len(tail) :])
        ids = unfolded(result.token_ids, texts)
        if ids[: len(known)] != known:
            return None, "the renderer cuts the sampled ids after their end token"
        return np.concatenate([prompt, sampled, self._ids(ids[len(known) :])]), ""

    def parse(self, ids: list[int], tools: Sequence[Tool], prompt: Ids | None) -> Any:
        """The library's `ParsedResponse` of sampled ids."""
        schemas: Any = [tool.schema() for tool in tools] or None
        return self._renderer.parse_response(ids, tools=schemas, prompt_ids=self.tail(prompt))

    def tail(self, prompt: Ids | None) -> list[int] | None:
        """The ids of a prompt that say in which state an answer begins."""
        if prompt is None:
            return None
        ids: list[int] = prompt[self._last_turn(prompt) if self.name in _TAIL_ONLY else 0 :].tolist()
        return ids

    def opens_thinking(self, prompt: Ids | None) -> bool:
        """Whether the prompt itself opened a thinking block that the answer continues (tagged formats only)."""
        if self.markers is None or prompt is None:
            return False
        tail = prompt[self._last_turn(prompt) :].tolist()
        opened = max((place for place, one in enumerate(tail) if one == self.markers.think), default=-1)
        closed = max((place for place, one in enumerate(tail) if one == self.markers.think_end), default=-1)
        return opened > closed

    def _render(self, dicts: list[JsonObject], schemas: list[JsonObject]) -> list[int]:
        try:
            with self._tokenizer.folding() as texts:
                ids: list[int] = self._renderer.render_ids(dicts, tools=schemas or None, add_generation_prompt=True)
        except ValueError as error:
            raise InvalidRequest(f"the model's template refuses this conversation: {error}", param="messages") from error
        return unfolded(ids, texts)

    def _head(self, system: list[JsonObject], schemas: list[JsonObject]) -> Ids:
        """The ids of the system and tools block alone, cached by its exact text."""
        text = json.dumps([system, schemas], ensure_ascii=True, default=str).encode()
        key = blake2b(text, digest_size=16).digest()
        with self._lock:
            known = self._heads.get(key)
            if known is not None:
                self._heads.move_to_end(key)
                return known
        ids: list[int] = self._renderer.render_ids(
            system or [{"role": "user", "content": ""}], tools=schemas or None, add_generation_prompt=False
        )
        if not system:
            # the renderer wants a message: take what it writes for an empty one off again
            ids = ids[: len(ids) - len(self._renderer.render_ids([{"role": "user", "content": ""}], add_generation_prompt=False))]
        head = self._ids(ids)
        head.setflags(write=False)
        with self._lock:
            self._heads[key] = head
            while len(self._heads) > _HEADS_KEPT:
                self._heads.popitem(last=False)
        return head

    def _last_turn(self, prompt: Ids) -> int:
        """The index of the last stop token, where the prompt's last, open turn begins; 0 without one."""
        for end in range(len(prompt), 0, -512):
            block = prompt[max(0, end - 512) : end]
            found = block == self._stops[0]
            for stop in self._stops[1:]:
                found |= block == stop
            places = found.nonzero()[0]
            if len(places):
                return max(0, end - 512) + int(places[-1])
        return 0

    def _refusal(self, prompt: Ids, answer: list[int]) -> str:
        opened = self.markers is not None and (self.opens_thinking(prompt) or self.markers.think in answer)
        if opened and self.markers is not None and self.markers.think_end not in answer:
            return "an end token inside open thinking"
        return "the renderer cannot append these messages to what was sampled"

    def _find_markers(self) -> Markers | None:
        if self.name not in _TAGGED:
            return None
        found = [self._tokenizer.convert_tokens_to_ids(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
        if not all(isinstance(one, int) and one != self._tokenizer.unk_token_id for one in found):
            return None
        think, think_end, call, call_end = found
        return Markers(think, think_end, call, call_end, frozenset(self.stop_token_ids))

    @staticmethod
    def _ids(ids: list[int]) -> Ids:
        return np.array(ids, dtype=np.int32)


def to_renderer(messages: Sequence[Message], names: Mapping[str, str] | None = None) -> list[JsonObject]:
    """Canonical messages in the library's form. Arguments become the objects that a template's `tojson` expects, where they parse.

    `names` maps ids of earlier calls to their tools.
    """
    names = dict(names or {})
    return [_message(message, names) for message in messages]


def _message(message: Message, names: dict[str, str]) -> JsonObject:
    value: JsonObject = {"role": message.role, "content": message.text}
    if message.role == "assistant":
        if message.reasoning or "</think>" in message.text:
            # present even if empty where the text has a marker, which templates would take for thinking otherwise
            value["reasoning_content"] = message.reasoning
        if message.tool_calls:
            value["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments_value(call.arguments)}}
                for call in message.tool_calls
            ]
            names.update((call.id, call.name) for call in message.tool_calls)
    elif message.role == "tool":
        if message.tool_call_id is not None:
            value["tool_call_id"] = message.tool_call_id
        name = message.name or names.get(message.tool_call_id or "")
        if name is not None:
            value["name"] = name
    return value


def _opens_with_newline(message: JsonObject) -> bool:
    """Whether an assistant's text opens with whitespace that merges with the newline before it."""
    text: str = message["content"]
    lead = text[: len(text) - len(text.lstrip())]
    return message["role"] == "assistant" and ("\n" in lead or (lead != "" and lead == text))


def arguments_value(text: str) -> Any:
    """The parsed arguments, or the text itself where they are no JSON object."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
