"""What an inference server is to Polar: token ids or messages in, sampled ids and log-probabilities out.

Knows no dialect, no session and no history. A new engine is one file beside this one: subclass `Engine`, decorate it with
`@register`. Law 1 lives here: ids and log-probabilities are handed on exactly as the server sent them; what it did not send is
`None` (a missing array) or NaN (a missing log-probability), never guessed.

Errors: everything an engine raises is an `EngineError` or a `ContextOverflow` of `polar.errors`, with the server's own
words and Retry-After kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from polar.chat import JsonObject, Message, Sampling, Tool, ToolChoice
from polar.errors import ConfigError, EngineError

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mode = Literal["tokens", "messages"]
EngineFinish = Literal["stop", "length", "abort", "content_filter", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokensRequest:
    """Mode `tokens`: the server continues `prompt_ids: int32[n]` and stops at any of `stop_token_ids`."""

    model: str
    prompt_ids: Ids
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    response_format: JsonObject | None = None
    top_logprobs: int | None = None
    n: int = 1
    session: str | None = None
    """The session's id, for an engine that routes by it; never its key."""
    return_prompt_ids: bool = False
    """Whether the server shall send the prompt ids back, to be compared; costs time in proportion to the prompt."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """Mode `messages`: the server renders and parses."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    sampling: Sampling
    parallel_tool_calls: bool | None = None
    thinking: bool | None = None
    effort: str | None = None
    response_format: JsonObject | None = None
    top_logprobs: int | None = None
    n: int = 1
    session: str | None = None


@dataclass(slots=True)
class Generation:
    """One sampled continuation.

    `prompt_ids`, `token_ids`: int32[n], `None` where the server sent none. `logprobs`: float32[len(token_ids)], NaN where
    one is missing (the server sent null, or a non-finite value), `None` where there are none at all. `message` is set in
    mode `messages` only: the server's own parse, tool-call ids as the server made them. `stop` is the matched stop string or
    token id, where the server says. `reasoning_tokens`: how many of the sampled tokens the server counts as reasoning, in mode `messages`
    where it says. `policy_version` is the server's weight version, where it says. `top`: per token, the
    alternatives that a client asked for, as (id or text, log-probability). `max_tokens`: the longest answer that this server gives, where
    it was asked for no more than that in place of what the request said.
    """

    prompt_ids: Ids | None
    token_ids: Ids | None
    logprobs: Floats | None
    finish: EngineFinish
    message: Message | None = None
    stop: str | int | None = None
    refusal: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    policy_version: str | None = None
    top: list[list[tuple[int | str, float]]] | None = None
    max_tokens: int | None = None
    routed_experts: str | None = None
    """As `polar.records.Completion` has it."""
    untrainable: str | None = None
    """Why this must not be trained, where the server's own numbers contradict each other (ids missing, counts that differ)."""


@dataclass(slots=True)
class Chunk:
    """A piece of a live stream in mode `tokens`: ids and log-probabilities as they come; the last one has `finish` set."""

    token_ids: list[int]
    logprobs: list[float]
    finish: EngineFinish | None = None
    stop: str | int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    policy_version: str | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server says of itself. `context` is its maximum length in tokens (prompt and answer)."""

    models: tuple[str, ...]
    context: int | None = None
    version: str | None = None
    root: str | None = None
    """The path or name that the model was loaded from, where the server tells."""


class Engine(ABC):
    """A client of one inference server at one URL."""

    name: ClassVar[str]
    takes_tokens: ClassVar[bool] = False
    """Whether the server continues token ids (mode `tokens`)."""
    returns_tokens: ClassVar[bool] = False
    """Whether the server returns ids and log-probabilities with chat completions (mode `messages`, trainable)."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.timeout_s = timeout_s

    @abstractmethod
    async def info(self) -> EngineInfo:
        """Asks the server what it serves. Raises `EngineUnavailable` where nothing answers."""

    @abstractmethod
    async def chat(self, request: MessagesRequest) -> list[Generation]:
        """One unstreamed chat completion: `n` generations of one prompt. Cancelling the task cancels the generation."""

    async def generate(self, request: TokensRequest) -> list[Generation]:
        """One unstreamed continuation of token ids."""
        raise NotImplementedError(f"{self.name} takes no token ids")

    def stream(self, request: TokensRequest) -> AsyncGenerator[Chunk, None]:
        """A live continuation of token ids (`n` is 1). Closing the iterator cancels the generation."""
        raise NotImplementedError(f"{self.name} streams no token ids")

    async def stream_into(self, request: TokensRequest, take: Callable[[Sequence[Chunk]], object]) -> None:
        """As `stream`, but the engine calls: `take` is given the chunks that came together, the moment they come, and does not wait. What
        it raises ends the generation and is raised; so does cancelling the task."""
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                take((chunk,))

    async def tokenize(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool | None = None) -> Ids | None:
        """The server's own rendering of a prompt, generation prompt included, for comparison; `None` if it can't tell."""
        return None

    # --- weights: what `polar.train.sync` needs ------------------------------------------------------------------
    #
    # A `ConfigError` means that the server was left as it was: it cannot do this, or has refused. After an `EngineError` nobody knows which
    # weights it has.

    async def update_weights(self, folder: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Puts the Hugging Face checkpoint `folder`, a path as the server sees it, in place of the served weights, forgets every prefix
        that was computed with the old ones, and tells the server that these are `version`. Nothing may be in flight."""
        raise ConfigError(
            f"{self.url}: an engine of kind {self.name} has no way to change its weights; serve the model with vLLM or SGLang"
        )

    async def load_adapter(self, folder: str, name: str, version: str, *, timeout_s: float = 600.0) -> None:
        """The same for a LoRA adapter (peft's format), which is then served as the model `name`, in place of an earlier one of it."""
        raise ConfigError(f"{self.url}: an engine of kind {self.name} has no way to load an adapter; serve the model with vLLM or SGLang")

    async def reset_prefix_cache(self, *, patience_s: float = 10.0) -> None:
        """Forgets the keys and values of all prompts. Raises `EngineError` if the server does not, though asked for `patience_s`."""
        raise EngineError(f"{self.url}: an engine of kind {self.name} has no way to forget its cache")

    async def weight_version(self) -> str | None:
        """The version that the server was last told its weights are; `None` where it was told none, or has no such thing."""
        return None

    async def pause(self, *, abort: bool = False, timeout_s: float = 600.0) -> bool:
        """Holds new requests at the server and waits for those in flight, or ends them (`abort`; they finish as `abort` with what they have
        sampled). False where the server has no such thing."""
        return False

    async def resume(self) -> None:  # noqa: B027 - a server that cannot be paused needs no resuming
        """Ends a pause; harmless where there is none."""

    async def aclose(self) -> None:  # noqa: B027 - an engine may have nothing to close
        """Closes connections."""


_REGISTRY: dict[str, type[Engine]] = {}
E = TypeVar("E", bound=type[Engine])


def register(cls: E) -> E:
    """Makes an engine known by its name."""
    _REGISTRY[cls.name] = cls
    return cls


def registered() -> Mapping[str, type[Engine]]:
    return _REGISTRY
