"""A whole gateway around a scripted engine, in process: real dialects, token path and store; only the sampling is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.served import Served
from polar.records import Completion, Session
from polar.testing.asgi import AsgiClient
from polar.testing.engine import Script, ScriptedEngine


@dataclass(slots=True)
class ScriptedGateway:
    """`client` speaks to the model API; `session()` gives a client of a fresh session; `completions()` reads what was recorded."""

    gateway: Gateway
    engine: ScriptedEngine

    @property
    def client(self) -> AsgiClient:
        return AsgiClient(self.gateway.api)

    async def session(self, **options: Any) -> tuple[Session, AsgiClient]:
        record, key = await self.gateway.sessions.create(**options)
        headers = {"authorization": f"Bearer {key}", "x-api-key": key, "x-goog-api-key": key}
        return record, AsgiClient(self.gateway.api, headers)

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
    **settings: Any,
) -> AsyncIterator[ScriptedGateway]:
    """`engine` are options of the `ScriptedEngine`, `served` of its `EngineConfig`, `settings` of the `GatewayConfig`."""
    scripted = ScriptedEngine(script, tokenizer_dir=tokenizer_dir, **(engine or {}))
    options = {"urls": [], "mode": mode, "tokenizer": str(tokenizer_dir), "renderer": renderer, **(served or {})}
    engine_config = EngineConfig.model_validate(options)
    config = GatewayConfig.model_validate({"engines": {"default": engine_config}, "store": str(folder / "polar.db"), **settings})
    gateway = Gateway(config, served={"default": Served("default", engine_config, [scripted])})
    async with gateway:
        yield ScriptedGateway(gateway, scripted)
