"""Sampled ids back to a canonical answer. Law 7: no sampled text is ever swallowed.

Rules, the same for a whole answer and for a live one:

* Thinking is the first region only, without outer whitespace; what follows it starts after its newlines.
* Text is as sampled. Before a tool call its trailing whitespace is the template's and goes; text between and after calls is kept, each
piece on
  a line of its own after the text before them.
* If any call cannot be read (no closing mark, no JSON, no name, arguments that are no object), the whole part from the first mark on is
text,
  exactly as decoded: half of a broken pair must not run, and nothing of the other half may vanish. The finish is then that of text.
* A matched stop string and what comes after it are left out, as every provider does.

Knows no history and no dialect.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar.chat import Answer, FinishReason, Message, Thinking, TokenLogprob, Tool, ToolCall, Usage
from polar.engines.base import Generation
from polar.records import Ids
from polar.tokens.calls import is_object, read_call
from polar.tokens.rendering import Markers, Rendering

LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class Parsed:
    """What an answer's ids say. `calls` are (name, arguments as JSON text)."""

    thinking: str = ""
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thinking_tokens: int = 0
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Regions:
    """Where the parts of an answer lie in its ids: thinking `[start, end)`, text from `body`, tool part from `calls` (or `None`) to
    `stop`."""

    thinking: tuple[int, int] | None
    open: bool
    body: int
    calls: int | None
    stop: int


def regions(ids: list[int], markers: Markers, *, prefilled: bool, decode: Any) -> Regions:
    """Cuts a tagged answer. The first `<think>` counts only if nothing but whitespace is before it; a tool call ends thinking that is
    never closed."""
    stop = next((place for place, one in enumerate(ids) if one in markers.stop), len(ids))
    opening = _index(ids, markers.think, 0, stop)
    explicit = opening is not None and not decode(ids[:opening]).strip()
    if not explicit and not prefilled:
        return Regions(None, False, 0, _index(ids, markers.call, 0, stop), stop)
    start = opening + 1 if explicit and opening is not None else 0
    close = _index(ids, markers.think_end, start, stop)
    if close is not None:
        return Regions((start, close), False, close + 1, _index(ids, markers.call, close + 1, stop), stop)
    call = _index(ids, markers.call, start, stop)
    if call is not None:
        return Regions((start, call), False, call, call, stop)
    return Regions((start, stop), True, stop, None, stop)


def parse(
    rendering: Rendering,
    tokenizer: Any,
    ids: list[int],
    *,
    prompt: Ids | None,
    tools: tuple[Tool, ...],
    stop_string: str | None,
    calls_allowed: bool = True,
) -> Parsed:
    """Reads sampled ids under the renderer that made their prompt. Calls that the request forbade (no tools, or `none`) are text."""
    if rendering.markers is None:
        return _parse_generic(rendering, tokenizer, ids, prompt, tools, stop_string, calls_allowed)
    markers, decode = rendering.markers, tokenizer.decode
    cut = regions(ids, markers, prefilled=rendering.opens_thinking(prompt), decode=decode)
    thinking, tokens = "", 0
    if cut.thinking is not None:
        start, end = cut.thinking
        thinking = decode([one for one in ids[start:end] if one != markers.think])
        tokens = min(cut.body, cut.stop) if cut.calls != cut.body else end
    if cut.open:
        return Parsed(_before(thinking, stop_string).strip(), "", (), tokens, frozenset({"thinking_open"}))
    whole = decode(ids[cut.body : cut.stop])
    if stop_string is not None and stop_string not in whole and stop_string in thinking:
        return Parsed(_before(thinking, stop_string).strip(), "", (), tokens)
    text = whole if cut.calls is None else decode(ids[cut.body : cut.calls])
    calls: tuple[tuple[str, str], ...] = ()
    tags: frozenset[str] = frozenset()
    if cut.calls is not None:
        stopped = stop_string is not None and stop_string in whole
        read = None if stopped or not calls_allowed else _calls(rendering, decode, ids, cut, prompt, tools)
        if read is not None:
            calls, rest = read
            text = "\n".join(piece for piece in (text.rstrip(), *rest) if piece)
        else:
            before_calls = stopped and stop_string is not None and stop_string in text
            text = whole
            tags = tags if before_calls else _as_text(calls_allowed)
    if stop_string is not None:
        text = _before(text, stop_string)
    if cut.thinking is not None:
        text = text.lstrip("\n")
    return Parsed(thinking.strip(), text, calls, tokens, tags)


def _calls(
    rendering: Rendering, decode: Any, ids: list[int], cut: Regions, prompt: Ids | None, tools: tuple[Tool, ...]
) -> tuple[tuple[tuple[str, str], ...], list[str]] | None:
    """The calls of the tool part and the texts between and after them; `None` if any cannot be read."""
    attempts = rendering.parse(ids, tools, prompt).tool_calls
    calls: list[tuple[str, str]] = []
    between: list[str] = []
    at = cut.calls
    for attempt in attempts:
        read = read_call(attempt, tools)
        if read is None or attempt.token_span is None or at is None or attempt.token_span[0] < at:
            return None
        between.append(decode(ids[at : attempt.token_span[0]]).strip())
        calls.append(read)
        at = attempt.token_span[1]
    if not calls:
        return None
    between.append(decode(ids[at : cut.stop]).strip())
    return tuple(calls), between


def message_from(parsed: Parsed, ref: str) -> Message:
    """The canonical answer; the id of call `i` is `ref` and two hex digits of `i`."""
    calls = tuple(ToolCall(f"{ref}{index:02x}", name, arguments) for index, (name, arguments) in enumerate(parsed.calls))
    thinking = (Thinking(parsed.thinking),) if parsed.thinking else ()
    return Message("assistant", parsed.text, thinking=thinking, tool_calls=calls)


def finish_of(generation: Generation, message: Message) -> FinishReason:
    """The canonical stop reason: a matched stop string and a full length stand, else calls make `tool_calls`, else it is a plain stop."""
    if isinstance(generation.stop, str):
        return "stop_sequence"
    if generation.finish in ("length", "content_filter"):
        return "length" if generation.finish == "length" else "content_filter"
    return "tool_calls" if message.tool_calls else "stop"


def answer_from(
    generation: Generation, message: Message, *, prompt: Ids | None, parsed: Parsed, logprobs: tuple[TokenLogprob, ...] | None
) -> Answer:
    """The answer to encode, with usage from the ids where they are there."""
    usage = Usage(
        prompt=len(prompt) if prompt is not None else generation.prompt_tokens,
        completion=len(generation.token_ids) if generation.token_ids is not None else generation.completion_tokens,
        cached=generation.cached_tokens,
        thinking=parsed.thinking_tokens,
    )
    stop = generation.stop if isinstance(generation.stop, str) else None
    return Answer(message, finish_of(generation, message), usage, stop, generation.refusal, logprobs)


def client_logprobs(generation: Generation, tokenizer: Any, stops: frozenset[int], most: int) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities as a client that asked for them gets them: per sampled token but the stop token, floored, never NaN. Alternatives
    are the `most` likely in their order, whatever else an engine lists (vLLM puts the sampled token before them)."""
    if generation.token_ids is None or generation.logprobs is None or tokenizer is None:
        return None
    entries: list[TokenLogprob] = []
    for place, (one, value) in enumerate(zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)):
        if one in stops:
            break
        top = generation.top[place] if generation.top is not None and place < len(generation.top) else []
        likely = sorted(((_finite(score), name) for name, score in top), key=lambda scored: scored[0], reverse=True)[:most]
        shown = tuple((tokenizer.decode([name]) if isinstance(name, int) else name, score) for score, name in likely)
        entries.append(TokenLogprob(tokenizer.decode([one]), _finite(value), shown))
    return tuple(entries)


def read_engine_message(generation: Generation, tokenizer: Any | None, *, calls_allowed: bool = True) -> Parsed:
    """Mode `messages`: the engine's own reading, checked. Calls that no harness could run, or that were forbidden, become text, as decoded
    where ids and tokenizer are there."""
    message = generation.message or Message("assistant")
    tokens = _reasoning_tokens(generation, message, tokenizer)
    calls = tuple((call.name, call.arguments if call.arguments.strip() else "{}") for call in message.tool_calls)
    if (calls_allowed or not calls) and all(name.strip() and is_object(arguments) for name, arguments in calls):
        unread = not calls and "<tool_call>" in message.text
        blank = bool(calls or message.reasoning) and not message.text.strip()  # the template's, between thinking and call
        shown = "" if blank else message.text
        return Parsed(message.reasoning, shown, calls, tokens, _as_text(calls_allowed) if unread else frozenset())
    text = None
    if tokenizer is not None and generation.token_ids is not None:
        decoded = tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=False)
        eos = getattr(tokenizer, "eos_token", None)
        text = decoded.removesuffix(eos) if eos else decoded
        text = text.split("</think>", 1)[-1].lstrip("\n") if message.reasoning else text
    if text is None:
        pieces = [message.text, *(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls)]
        text = "\n".join(piece for piece in pieces if piece)
    return Parsed(message.reasoning, text, (), tokens, _as_text(calls_allowed))


def _reasoning_tokens(generation: Generation, message: Message, tokenizer: Any | None) -> int:
    """How many of the sampled tokens are reasoning: by the mark that ends it, where it is among them, else as the engine counts."""
    if not message.reasoning:
        return 0
    if tokenizer is not None and generation.token_ids is not None:
        ends = np.flatnonzero(generation.token_ids == (tokenizer.convert_tokens_to_ids("</think>") or -1))
        if len(ends):
            return int(ends[0]) + 1
    return min(generation.reasoning_tokens, generation.completion_tokens)


def _as_text(calls_allowed: bool) -> frozenset[str]:
    """The tag of a tool call that is shown as text: it could not be read, or it was not asked for."""
    return frozenset({"tool_call_malformed" if calls_allowed else "tool_call_unasked"})


def _finite(value: float) -> float:
    return value if LOGPROB_FLOOR < value < float("inf") else LOGPROB_FLOOR


def _parse_generic(
    rendering: Rendering,
    tokenizer: Any,
    ids: list[int],
    prompt: Ids | None,
    tools: tuple[Tool, ...],
    stop_string: str | None,
    calls_allowed: bool,
) -> Parsed:
    """Formats without single-token marks: the library's own reading, with the raw text kept where it cannot read a call. Text between
    calls is left to the library here: what is markup there and what is text only it knows."""
    stop = next((place for place, one in enumerate(ids) if one in rendering.stop_token_ids), len(ids))
    parsed = rendering.parse(ids, tools, prompt)
    thinking = parsed.reasoning_content or ""
    if parsed.reasoning_complete is False:
        return Parsed(_before(thinking, stop_string).strip(), "", (), stop, frozenset({"thinking_open"}))
    tokens = len(tokenizer.encode(thinking)) if thinking else 0
    read = [read_call(attempt, tools) for attempt in parsed.tool_calls]
    calls = tuple(call for call in read if call is not None)
    if len(calls) == len(read) and (calls_allowed or not calls):
        return Parsed(thinking, _before(parsed.content, stop_string), calls, tokens)
    whole = tokenizer.decode(ids[:stop])
    text = whole.split(thinking, 1)[-1] if thinking else whole
    for close in ("</think>", "[/THINK]"):
        text = text.lstrip().removeprefix(close)
    return Parsed(thinking, _before(text, stop_string), (), tokens, _as_text(calls_allowed))


def _before(text: str, stop: str | None) -> str:
    return text if stop is None else text.split(stop, 1)[0]


def _index(ids: list[int], one: int, start: int, stop: int) -> int | None:
    try:
        return ids.index(one, start, stop)
    except ValueError:
        return None
