"""A whole gateway around a scripted engine, in process: real dialects, token path and store; only the sampling is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.served import Served
from polar.records import Completion, Session
from polar.store.base import Store
from polar.testing.asgi import AsgiClient, Exchange
from polar.testing.engine import Script, ScriptedEngine
from polar.tokens.tokenizer import Tokenizer, load_tokenizer


class CachedServed(Served):
    """A served model whose tokenizer is read once a process, since a test makes a gateway of its own."""

    def _load_tokenizer(self) -> Tokenizer | None:
        return None if self.config.tokenizer is None else _tokenizer(self.config.tokenizer)


@lru_cache(maxsize=4)
def _tokenizer(directory: str) -> Tokenizer:
    return load_tokenizer(directory)


class SessionClient(AsgiClient):
    """A client of one session: its key stands in the URL, as in a harness's base URL."""

    def __init__(self, app: Callable[..., Any], key: str) -> None:
        super().__init__(app)
        self.key = key

    def start(self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Exchange:
        return super().start(method, f"/s/{self.key}{url}", body, headers)


@dataclass(slots=True)
class ScriptedGateway:
    """`client` speaks to the model API; `session()` gives a client of a fresh session; `completions()` reads what was recorded."""

    gateway: Gateway
    engine: ScriptedEngine
    engines: list[ScriptedEngine]

    @property
    def client(self) -> AsgiClient:
        return AsgiClient(self.gateway.api)

    async def session(self, **options: Any) -> tuple[Session, AsgiClient]:
        """A fresh session and a client that is bound to it by the base URL, whatever dialect it speaks."""
        record, key = await self.gateway.sessions.create(**options)
        return record, SessionClient(self.gateway.api, key)

    async def completions(self, session: Session) -> list[Completion]:
        return [completion async for completion in self.gateway.store.completions(session.id)]


@asynccontextmanager
async def scripted_gateway(
    script: Script,
    folder: Path,
    *,
    tokenizer_dir: str | Path,
    mode: str = "tokens",
    renderer: str = "qwen3",
    engine: dict[str, Any] | None = None,
    served: dict[str, Any] | None = None,
    store: Store | None = None,
    engines: int = 1,
    **settings: Any,
) -> AsyncIterator[ScriptedGateway]:
    """`engine` are options of the `ScriptedEngine`s, `served` of their `EngineConfig`, `settings` of the `GatewayConfig`. `engines` of
    them serve one model by the same script."""
    scripted = [ScriptedEngine(script, tokenizer_dir=tokenizer_dir, **(engine or {})) for _ in range(engines)]
    for number, one in enumerate(scripted):
        one.url = f"scripted:{number}"
    options = {"urls": [], "mode": mode, "tokenizer": str(tokenizer_dir), "renderer": renderer, **(served or {})}
    engine_config = EngineConfig.model_validate(options)
    config = GatewayConfig.model_validate({"engines": {"default": engine_config}, "store": str(folder / "polar.db"), **settings})
    gateway = Gateway(config, store=store, served={"default": CachedServed("default", engine_config, scripted)})
    async with gateway:
        yield ScriptedGateway(gateway, scripted[0], scripted)
