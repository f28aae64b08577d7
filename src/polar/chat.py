"""The canonical conversation: what every dialect is parsed into and every answer is encoded from.

Knows no provider, no tokens and no I/O. A dialect turns a provider's body into a `ChatRequest`; an engine's
answer becomes an `Answer`; `deltas` replays an `Answer` as the same `ChatDelta`s that a live stream yields, so each
dialect needs one encoder only.

Invariants that the other rooms rely on:

* `Message.content` is a `str` whenever it holds text only; a tuple of parts only where an image is among them.
* `ToolCall.arguments` is JSON *text*, exactly as it was sampled or sent; nobody re-serialises it on the way.
* An assistant message is ordered thinking, content, tool calls, whatever order its provider's blocks had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "stop_sequence", "length", "tool_calls", "content_filter"]
ToolKind = Literal["function", "custom", "shell", "local_shell", "apply_patch", "tool_search"]
JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text inside a mixed content."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image by URL; base64 bytes are a `data:` URL."""

    url: str
    detail: str | None = None


Part = Text | Image
Content = str | tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Thinking:
    """A reasoning block as a harness echoes it.

    `signature` is whatever opaque string came with it (an Anthropic signature, a Responses `encrypted_content`, a
    Google thoughtSignature); only the token path decides whether it is one that this gateway issued. A block with a
    foreign signature is dropped there, one without any is kept as plain reasoning.
    """

    text: str = ""
    signature: str | None = None
    redacted: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool with the flat name `name`; `arguments` is JSON text, never re-serialised."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `refs` holds further ids seen on it (item ids and the like) that may be pointers."""

    role: Role
    content: Content = ""
    thinking: tuple[Thinking, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    refs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the content, images left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """The visible text of all thinking blocks."""
        return "".join(block.text for block in self.thinking)

    @property
    def images(self) -> tuple[Image, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the model sees it (`name`, `description`, `parameters`) and as its harness knows it.

    `name` is flat and unique within a request. `kind`, `namespace` and `wire_name` say how a call of it is written
    back in the harness's dialect (a Responses custom or namespaced tool, say); the model never sees them.
    """

    name: str
    description: str | None = None
    parameters: JsonObject = field(default_factory=lambda: {"type": "object", "properties": {}})
    kind: ToolKind = "function"
    namespace: str | None = None
    wire_name: str | None = None

    def schema(self) -> JsonObject:
        """The OpenAI Chat Completions form, in the key order that engines render.

        A missing description is written as an empty one: vLLM would write it as null, SGLang not at all, and the prompt shall not
        depend on the engine.
        """
        return {"type": "function", "function": {"name": self.name, "description": self.description or "", "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`auto`, `none`, `required` (any tool) or `named` (the tool called `name`)."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as asked for; `None` means that the caller did not say. `max_tokens` counts new tokens."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[str, float] | None = None

    def as_dict(self) -> JsonObject:
        """Only what is set; for the record and for the engine's request."""
        names = self.__slots__
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None and value != ()
        }


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A model call in canonical form.

    `thinking` is the switch (`None`: the model's default), `effort` the provider's word for how much.
    `response_format` is the OpenAI Chat form (`{"type": "json_schema", ...}`). `top_logprobs` is set only if the
    *client* asked for log-probabilities (0: chosen tokens only). `previous` names a stored response whose
    conversation this request continues (Responses `previous_response_id`). `begun`: the last message is the beginning of the answer, which
    the model shall go on with (Anthropic's prefill). `options` carries what only the same
    dialect's encoder needs (`include_usage`, `legacy_functions`, a Responses body to echo, ...).
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool | None = None
    sampling: Sampling = Sampling()
    thinking: bool | None = None
    effort: str | None = None
    response_format: JsonObject | None = None
    stream: bool = False
    n: int = 1
    top_logprobs: int | None = None
    previous: str | None = None
    begun: bool = False
    store: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def tool(self, name: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    @property
    def has_images(self) -> bool:
        return any(message.images for message in self.messages)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `thinking` is the part of `completion` spent on reasoning, `cached` the part of `prompt` reused."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    thinking: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability for a client that asked: finite or -9999.0 (OpenAI's floor), never NaN."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer of the model. `message.tool_calls[i].id` is bare: the dialect adds its own prefix."""

    message: Message
    finish: FinishReason
    usage: Usage = Usage()
    stop_sequence: str | None = None
    refusal: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


# --- deltas: what an encoder is fed, live or replayed, always in this order -----------------------------------


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class RefusalDelta:
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A whole call: name and arguments come together, when its block has closed."""

    index: int
    call: ToolCall
    choice: int = 0


@dataclass(frozen=True, slots=True)
class LogprobsDelta:
    """Only where the client asked; belongs to the text deltas of its choice."""

    logprobs: tuple[TokenLogprob, ...]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class FinishDelta:
    """The end of one choice. The gateway feeds it only once the completion is durable (law 4)."""

    finish: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    choice: int = 0


ChatDelta = ThinkingDelta | TextDelta | RefusalDelta | ToolCallDelta | LogprobsDelta | FinishDelta


def deltas(answer: Answer, choice: int = 0) -> Iterator[ChatDelta]:
    """Replays a finished answer; the last delta is its `FinishDelta`."""
    message = answer.message
    if message.reasoning:
        yield ThinkingDelta(message.reasoning, choice)
    if answer.logprobs is not None:
        yield LogprobsDelta(answer.logprobs, choice)
    if message.text:
        yield TextDelta(message.text, choice)
    if answer.refusal:
        yield RefusalDelta(answer.refusal, choice)
    for index, call in enumerate(message.tool_calls):
        yield ToolCallDelta(index, call, choice)
    yield FinishDelta(answer.finish, answer.usage, answer.stop_sequence, choice)


def merged(stream: Iterable[ChatDelta]) -> list[ChatDelta]:
    """The same deltas with neighbouring pieces of one text or one thinking joined."""
    joined: list[ChatDelta] = []
    for delta in stream:
        last = joined[-1] if joined else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta) and last.choice == delta.choice:
            joined[-1] = TextDelta(last.text + delta.text, delta.choice)
        elif isinstance(delta, ThinkingDelta) and isinstance(last, ThinkingDelta) and last.choice == delta.choice:
            joined[-1] = ThinkingDelta(last.text + delta.text, delta.choice)
        else:
            joined.append(delta)
    return joined


def join_parts(parts: Iterable[Part], separator: str = "\n") -> Content:
    """Folds parts into a content: one `str` if all is text, else a tuple with neighbouring texts joined."""
    folded: list[Part] = []
    run: list[str] = []
    for part in parts:
        if isinstance(part, Text):
            run.append(part.text)
            continue
        if run:
            folded.append(Text(separator.join(run)))
            run = []
        folded.append(part)
    if not folded:
        return separator.join(run)
    return (*folded, Text(separator.join(run))) if run else tuple(folded)
