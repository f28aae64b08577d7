"""What the HTTP side of the engine server and the thing that samples tokens say to each other.

Knows no HTTP framework, no torch and no text: a `Backend` gets token ids and yields `Step`s. The transformers worker is one
backend, the scripted one of `polar.testing` another, and both speak the same wire through `polar.engine.server`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

JsonObject = dict[str, Any]
Finish = Literal["stop", "length", "abort"]
MAX_TOP_LOGPROBS = 20


class ApiError(Exception):
    """An error answer. `body` replaces the usual JSON body, byte for byte; `headers` are added."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        self.body = body

    def json(self) -> JsonObject:
        """The error object that vLLM sends."""
        kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
        kind = kinds.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


class Drop(Exception):
    """A backend's order to cut the connection without an answer (fault injection)."""


@dataclass(frozen=True, slots=True)
class Params:
    """Sampling parameters, all set. `top_k` 0 is off, `temperature` 0 is greedy, `top_logprobs` counts alternatives."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    top_logprobs: int = 0

    @property
    def neutral(self) -> bool:
        """Whether the distribution is the model's own but for the temperature."""
        return (
            self.top_p >= 1.0
            and self.top_k <= 0
            and self.min_p <= 0.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One sampled token. `logprob` is of the distribution that it was sampled from. `finish` is set on the last one;
    `stop` is the stop token id that ended it where that is not the model's own end token."""

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()
    finish: Finish | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One continuation to sample. `body` is the wire request that it came from; `index` counts the choices of one call."""

    prompt_ids: Sequence[int]
    params: Params
    mode: Literal["tokens", "messages"] = "tokens"
    body: JsonObject = field(default_factory=dict)
    index: int = 0


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. `encode` adds no special tokens but recognises them in the text."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class Template(Protocol):
    """Renders Chat Completions messages and tools to prompt text, generation prompt included unless switched off."""

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None, **kwargs: Any) -> str: ...


class Backend(Protocol):
    """Samples. `context` is the longest prompt plus answer, in tokens; `name` is the served model's."""

    name: str
    root: str
    context: int
    cached_tokens: int
    """How many prompt tokens, over all jobs so far, were not computed again."""

    def run(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yields steps until one has `finish`. Closing the generator cancels the job."""
        ...

    async def reload(self, path: str | None) -> None:
        """Loads weights from `path` (`None`: where they came from) in place, and forgets every cached prefix."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    def metrics(self) -> Mapping[str, float]: ...

    async def aclose(self) -> None: ...


def overflow_error(prompt_tokens: int, context: int) -> ApiError:
    """In vLLM 0.32's words, which clients parse."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, your prompt contains {prompt_tokens} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
    )


def parse_params(body: Mapping[str, Any], prompt_tokens: int, context: int, default_max_tokens: int | None, top_logprobs: int) -> Params:
    """Reads sampling parameters from a wire body; null means default. `max_tokens` is cut to the room left, as vLLM does.

    Raises `ApiError` 400 for a value of the wrong type or range, and where the prompt alone fills the context.
    """
    room = context - prompt_tokens
    if room <= 0:
        raise overflow_error(prompt_tokens, context)
    wanted = body.get("max_completion_tokens")
    if wanted is None:
        wanted = body.get("max_tokens")
    if wanted is None:
        wanted = default_max_tokens
    max_tokens = room if wanted is None else int(_number(wanted, "max_tokens", 1, None))
    if max_tokens > context:
        raise ApiError(
            400,
            f"max_tokens={max_tokens} cannot be greater than max_model_len={context}. Please request fewer output tokens.",
            param="max_tokens",
        )
    penalty = _number(body.get("repetition_penalty"), "repetition_penalty", 0.0, None, 1.0)
    if not penalty:  # logits are divided by it
        raise ApiError(400, "repetition_penalty must be greater than 0.", param="repetition_penalty")
    top_k = int(_number(body.get("top_k"), "top_k", -1, None, 0))
    seed = body.get("seed")
    return Params(
        max_tokens=min(max_tokens, room),
        temperature=_number(body.get("temperature"), "temperature", 0.0, None, 1.0),
        top_p=_number(body.get("top_p"), "top_p", 0.0, 1.0, 1.0),
        top_k=max(top_k, 0),
        min_p=_number(body.get("min_p"), "min_p", 0.0, 1.0, 0.0),
        presence_penalty=_number(body.get("presence_penalty"), "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=_number(body.get("frequency_penalty"), "frequency_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=penalty,
        seed=None if seed is None else int(_number(seed, "seed", None, None)),
        stop=_strings(body.get("stop"), "stop"),
        stop_token_ids=tuple(int(_number(item, "stop_token_ids", 0, None)) for item in body.get("stop_token_ids") or ()),
        logit_bias=_bias(body.get("logit_bias")),
        ignore_eos=bool(body.get("ignore_eos") or False),
        top_logprobs=top_logprobs,
    )


def _number(value: Any, name: str, low: float | None, high: float | None, default: float | None = None) -> float:
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"{name} must be a number, got {value!r}.", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        raise ApiError(400, f"{name} must be between {low} and {high}, got {value}.", param=name)
    return value


def _strings(value: Any, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise ApiError(400, f"{name} must be a string or a list of strings that are not empty.", param=name)
    return tuple(items)


def _bias(value: Any) -> dict[int, float]:
    if not value:
        return {}
    try:
        return {int(key): float(bias) for key, bias in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ApiError(400, "logit_bias must map token ids to numbers.", param="logit_bias") from error
