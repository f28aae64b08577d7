"""The gateway's settings. Every one has a working default but the engine's URL."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar.folders import state_dir


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EngineConfig(_Strict):
    """One served model and the servers that serve it."""

    urls: list[str]
    """Servers of this model, with or without `/v1`; a session stays with its own, a dead one is left."""
    kind: str = "vllm"
    """Which wire the servers speak; `polar engine` speaks vLLM's."""
    model: str | None = None
    """The name at the engine; `None`: the first one that it serves."""
    api_key: str | None = None
    """The gateway's own key at the servers, sent as a bearer token."""
    mode: Literal["auto", "tokens", "messages"] = "auto"
    """`auto`: `tokens` where a renderer fits and the engine takes ids, else `messages`."""
    tokenizer: str | None = None
    """A directory with tokenizer.json and tokenizer_config.json; `None`: where the engine says it loaded the model from."""
    renderer: str | None = None
    """A name of the `renderers` library; `None`: found from the model's name and chat template."""
    thinking_retention: Literal["all", "template"] = "all"
    """Reasoning of earlier turns stays in the prompt (`all`), or goes where the model's template drops it (breaks prefixes)."""
    bridging: bool = True
    """False renders every prompt afresh, to measure what bridging saves."""
    text_only: bool = True
    """Whether images become an explicit placeholder, since the model cannot see."""
    timeout_s: float = 1800.0
    """The longest wait for one answer of a server."""
    trained: bool = True
    """False: completions of this engine are recorded as untrainable (a helper model for titles, say)."""


class Budgets(_Strict):
    """Per-session limits; `None`: none. A call beyond one is refused by its name."""

    max_turns: int | None = Field(default=None, ge=0)
    """Model calls."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Sampled tokens."""
    max_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Since the session's first call."""


class TrainSampling(_Strict):
    """What a `train` session forces, whatever its harness asks for."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)


class GatewayConfig(_Strict):
    engines: dict[str, EngineConfig]
    """The served models by a name of your choice."""
    default_engine: str | None = None
    """`None`: the first of `engines`."""
    models: dict[str, str] = Field(default_factory=dict)
    """Requested model name (or a pattern with `*`) to engine name; any other name goes to the default engine."""
    host: str = "127.0.0.1"
    """Address of the model API, which sandboxes see."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port of the model API; 0 takes a free one."""
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """`None`: `port` + 1. Control routes exist on this listener only, and on loopback only."""
    render_process: bool = False
    """Whether long prompts are rendered in a process of their own, which keeps other calls quick (`polar gateway` switches it on)."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes; each session lives in one of them, told by its key."""
    public_url: str | None = None
    """What base URLs of sessions begin with, where sandboxes reach the gateway by another address."""
    store: str | None = None
    """A path or a database URL; `None`: `polar.db` in the state directory."""
    admin_token: str | None = None
    """`None`: one is generated at start."""
    stream: Literal["replay", "live"] = "replay"
    """`replay` sends a stream when the answer is complete and on disk; `live` sends text as it is sampled."""
    first_ping_s: float = 8.0
    """How long an answer may take before the status is fixed at 200 and pings begin."""
    ping_s: float = 8.0
    """Time between two pings."""
    grace_s: float = 3.0
    """How long a generation outlives its client, so that a byte-equal retry adopts it."""
    max_body_mb: int = 64
    """The largest request, after decompression."""
    budgets: Budgets = Budgets()
    """Limits of a session that sets none of its own."""
    train_sampling: TrainSampling = TrainSampling()
    """What `train` sessions sample with; a session's `settings.sampling` goes over it."""
    engine_wait_s: float = Field(default=0.0, ge=0)
    """How long engines that do not answer yet are waited for at start: they may be loading their model. `polar gateway`, `serve` and
    `serve_gateway` wait 600 s where this is not set."""
    check: bool = True
    """Whether engines are checked at start; without it nothing is called trainable."""
    shutdown_s: float = 30.0
    """How long calls in flight may go on after a signal to stop."""
    cache_mb: int = 256
    """Memory for recent completions (the next turn's parents)."""

    @property
    def store_url(self) -> str:
        return self.store or str(state_dir() / "polar.db")

    @property
    def model_url(self) -> str:
        """Where sandboxes reach the model API: as configured, else by an address of this machine."""
        return self.public_url or f"http://{reachable(self.host)}:{self.port}"

    @property
    def control_port(self) -> int:
        return self.port + 1 if self.admin_port is None else self.admin_port


def reachable(host: str) -> str:
    """A listener's address as a client on this machine writes it in a URL: "every address" is none to connect to, IPv6 has brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def problems(error: ValidationError) -> str:
    """What is wrong with settings, one line each: which setting, and why."""
    lines = []
    for problem in error.errors():
        name, why = ".".join(str(part) for part in problem["loc"]), problem["msg"]
        if problem["type"] == "extra_forbidden":
            meant = difflib.get_close_matches(str(problem["loc"][-1]), sorted(_NAMES), 1)
            why = "there is no such setting" + (f"; is {meant[0]} meant?" if meant else "")
        elif problem["type"] == "missing":
            why = "is missing"
        lines.append(f"{name}: {why}")
    return "\n".join(lines)


_NAMES = {name for model in (GatewayConfig, EngineConfig, Budgets, TrainSampling) for name in model.model_fields}
