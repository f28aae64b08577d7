"""An answer as it is being sampled: text and thinking as soon as they are certain, never half a character, half a mark or half a stop
string.

What was emitted is always a prefix of what `TokenPath.read` makes of the whole; `finish` emits the rest. From the first tool call on,
all is held until the end: whether the calls are calls is known only when the last one has closed (see `polar.tokens.reading`), and a
call that has been emitted cannot be taken back. Formats without single-token marks emit everything at the end. Knows no engine and no
dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from polar.chat import ChatDelta, FinishDelta, LogprobsDelta, RefusalDelta, TextDelta, ThinkingDelta, ToolCallDelta
from polar.errors import PolarError
from polar.tokens.plan import Reading
from polar.tokens.rendering import Markers

Phase = Literal["start", "thinking", "thinking_call", "text", "held"]
_UNDECODED = "\ufffd"


class LiveReader:
    """Feed it ids as they come, then `finish` with the reading of all of them. Linear in the number of tokens."""

    def __init__(self, tokenizer: Any, markers: Markers | None, *, prefilled: bool, stop: Sequence[str] = ()) -> None:
        self._markers = markers
        self._marks = frozenset() if markers is None else markers.stop | {markers.think, markers.think_end, markers.call}
        self._phase: Phase = "held" if markers is None else "thinking" if prefilled else "start"
        self._decode = tokenizer.decode if tokenizer is not None else None
        self._waiting: list[int] = []
        self._thinking = _Flow(tokenizer, strip=None, stop=tuple(stop))
        self._text = _Flow(tokenizer, strip="", stop=tuple(stop))

    def feed(self, ids: Sequence[int]) -> list[ChatDelta]:
        """The deltas that these sampled ids make certain."""
        if self._phase in ("thinking", "text") and self._marks.isdisjoint(ids):  # nearly always: told at a glance, not id by id
            if self._phase == "text":
                piece = self._text.flush(ids)
                return [TextDelta(piece)] if piece else []
            piece = self._thinking.flush(ids)
            return [ThinkingDelta(piece)] if piece else []
        thinking: list[str] = []
        text: list[str] = []
        for one in ids:
            self._take(int(one), thinking, text)
        if self._phase == "thinking":
            thinking.append(self._thinking.flush())
        elif self._phase == "text":
            text.append(self._text.flush())
        made: list[ChatDelta] = []
        if any(thinking):
            made.append(ThinkingDelta("".join(thinking)))
        if any(text):
            made.append(TextDelta("".join(text)))
        return made

    def finish(self, reading: Reading) -> list[ChatDelta]:
        """What is left of the answer, its `FinishDelta` last (law 4: to be encoded only once the completion is durable)."""
        answer, message = reading.answer, reading.answer.message
        made: list[ChatDelta] = []
        if rest := _rest(message.reasoning, self._thinking.emitted):
            made.append(ThinkingDelta(rest))
        if answer.logprobs is not None:
            made.append(LogprobsDelta(answer.logprobs))
        if rest := _rest(message.text, self._text.emitted):
            made.append(TextDelta(rest))
        if answer.refusal:
            made.append(RefusalDelta(answer.refusal))
        made.extend(ToolCallDelta(index, call) for index, call in enumerate(message.tool_calls))
        made.append(FinishDelta(answer.finish, answer.usage, answer.stop_sequence))
        return made

    def _take(self, one: int, thinking: list[str], text: list[str]) -> None:
        markers = self._markers
        if markers is None or self._phase == "held":
            return
        if one in markers.stop:
            self._phase = "held"
        elif self._phase == "start":
            self._begin(one, markers)
        elif self._phase in ("thinking", "thinking_call"):
            if one == markers.think_end:
                thinking.append(self._thinking.flush())
                self._text.strip = "\n"
                self._phase = "text"
            elif one != markers.think:
                self._thinking.push(one)
                if one == markers.call:
                    # thinking if a closing mark follows, the beginning of the tool part if none does
                    self._phase = "thinking_call"
        elif one == markers.call:
            text.append(self._text.flush())
            self._phase = "held"
        else:
            self._text.push(one)

    def _begin(self, one: int, markers: Markers) -> None:
        """Until the first character that is not whitespace, the answer may still open with thinking."""
        if one == markers.think:
            self._phase = "thinking"
            self._waiting = []
            return
        if one == markers.call:
            self._phase = "held"
            return
        self._waiting.append(one)
        assert self._decode is not None
        if self._decode(self._waiting).strip():
            for held in self._waiting:
                self._text.push(held)
            self._waiting = []
            self._phase = "text"


class _Flow:
    """One channel's ids on their way to text. Keeps back what is not certain: a broken character, trailing whitespace, a possible stop
    string."""

    def __init__(self, tokenizer: Any, *, strip: str | None, stop: tuple[str, ...]) -> None:
        self._decode = None if tokenizer is None else tokenizer.decode
        self._in_pieces: bool = getattr(tokenizer, "decodes_in_pieces", False)
        self.strip = strip
        """Leading characters to leave out; `None` for any whitespace, "" for none."""
        self._stop = stop
        self._ids: list[int] = []
        self._read = 0
        self._retry = 0
        self._base = ""
        self._kept = ""
        self._stopped = False
        self.emitted = ""

    def push(self, one: int) -> None:
        self._ids.append(one)

    def flush(self, ids: Sequence[int] = ()) -> str:
        """The text that has become certain since the last time, `ids` pushed before."""
        self._ids += ids
        if self._stopped or len(self._ids) < self._retry or self._read == len(self._ids):
            return ""
        assert self._decode is not None
        decoded: str = self._decode(self._ids)
        if decoded.endswith(_UNDECODED):
            # an unfinished character needs a token or three more; an endless run of broken bytes is tried ever more rarely
            self._retry = len(self._ids) + 1 + (len(self._ids) - self._read) // 8
            return ""
        self._kept += decoded[len(self._base) :]
        if self._in_pieces:
            self._ids = []
        else:  # keep the last piece as context for the next one: some decoders treat the start of a text specially
            self._ids = self._ids[self._read :]
            self._base = self._decode(self._ids)
        self._read, self._retry = len(self._ids), 0
        return self._release()

    def _release(self) -> str:
        text = self._kept
        end = len(text.rstrip())
        if self._stop:
            text, end = self._before_stop(text, end)
        lead = len(text) - len(text.lstrip(self.strip)) if self.strip != "" and not self.emitted else 0
        certain = text[lead:end]
        if certain:
            self._kept = text[end:]
            self.emitted += certain
        return certain

    def _before_stop(self, text: str, end: int) -> tuple[str, int]:
        """The text without a stop string and what follows it, and where its certain part ends."""
        found = [text.index(stop) for stop in self._stop if stop in text]
        if found:  # of several that end here only the engine knows which one counts: what is before all of them is certain
            text, self._stopped = text[: min(found)], True
            return text, len(text.rstrip())
        return text, min(end, len(text) - _possible(text, self._stop))


def _possible(text: str, stops: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    sizes = (size for stop in stops for size in range(1, min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:size]))
    return max(sizes, default=0)


def _rest(whole: str, emitted: str) -> str:
    if not whole.startswith(emitted):
        raise PolarError(
            f"the live reader emitted {emitted[-40:]!r}, which is not how the answer reads: please report this with the model's name"
        )
    return whole[len(emitted) :]
