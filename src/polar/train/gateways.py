"""The control calls of a weight update, as the trainer makes them: of one gateway, of one node, or of a rollout service, which
makes them of all its nodes. The routes are the same (`/admin/inference/*`, `/admin/policy`), and so is the client.

Knows no engine and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import httpx
import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError, SyncFailed
from polar.rollout.checks import is_loopback

ANSWER_S = 90.0
"""Longer than a service waits for its nodes, and a node for the calls that it interrupts: whatever they say is heard."""
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineAt:
    """An inference server whose weights are to be changed. `mount`: (a folder of this machine, the same folder as the server sees it),
    where the two differ."""

    url: str
    kind: str = "vllm"
    api_key: str | None = None
    mount: tuple[str, str] | None = None

    def path(self, folder: str) -> str:
        """`folder` as the server sees it. Raises `ConfigError` for one outside the mount."""
        if self.mount is None:
            return folder
        here, there = (part.rstrip("/") for part in self.mount)
        if folder != here and not folder.startswith(here + "/"):
            raise ConfigError(f"engine {self.url}: {folder} is not under {here}, the folder that the engine sees as {there}")
        return there + folder[len(here) :]


@dataclass(frozen=True, slots=True)
class Paused:
    """`drained`: no call is in the engines. `interrupted`: calls that were ended for that, and begin anew after the pause."""

    drained: bool
    interrupted: int = 0


class Gateways(Protocol):
    """What feeds the engines with calls. Every method raises `SyncFailed` where it cannot be reached, or not in all its parts."""

    name: str

    async def pause(self, timeout_s: float, *, interrupt: bool) -> Paused:
        """Holds new calls and waits for those in flight, for `timeout_s`; then interrupts them, if told to."""
        ...

    async def resume(self) -> None: ...

    async def set_version(self, version: int) -> None:
        """What completions are recorded with from now on."""
        ...

    async def engines(self) -> Sequence[EngineAt]:
        """The trained engines behind it, as it knows them."""
        ...

    async def models(self) -> set[str]:
        """The names by which it asks its trained engines."""
        ...

    async def aclose(self) -> None: ...


class Control:
    """`url`, `token`: of a gateway's control API, or of a rollout service."""

    def __init__(self, url: str, token: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.name = url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=self.name, headers=headers, timeout=ANSWER_S, transport=transport, trust_env=not is_loopback(self.name)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def pause(self, timeout_s: float, *, interrupt: bool) -> Paused:
        query = {"timeout_seconds": f"{timeout_s:g}", "interrupt": "true" if interrupt else "false"}
        status, said = await self._call("POST", "/admin/inference/pause", query=query, timeout_s=timeout_s + ANSWER_S, expected=(200, 504))
        return Paused(status == 200, int(said.get("interrupted") or 0))

    async def resume(self) -> None:
        await self._call("POST", "/admin/inference/resume")

    async def set_version(self, version: int) -> None:
        await self._call("POST", "/admin/policy", body={"policy_version": version})

    async def engines(self) -> list[EngineAt]:
        trained = await self._trained()
        if len({one.get("model") for one in trained}) > 1:
            names = ", ".join(sorted({str(one.get("model")) for one in trained}))
            raise SyncFailed(f"{self.name} serves several models that can be trained ({names}); name the engines in the trainer's settings")
        return [EngineAt(url, one.get("kind", "vllm")) for one in trained for url in one["urls"]]

    async def models(self) -> set[str]:
        return {str(one["model"]) for one in await self._trained() if one.get("model")}

    async def _trained(self) -> list[JsonObject]:
        _, said = await self._call("GET", "/admin/inference/status")
        served = said.get("engines")
        if not isinstance(served, list):
            raise SyncFailed(f"{self.name} does not say which engines it has; name them in the trainer's settings")
        return [one for one in served if one.get("trained", True)]

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: JsonObject | None = None,
        timeout_s: float = ANSWER_S,
        expected: tuple[int, ...] = (200,),
    ) -> tuple[int, JsonObject]:
        content = None if body is None else orjson.dumps(body)
        try:
            answer = await self._http.request(
                method, path, params=query, content=content, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S)
            )
        except httpx.HTTPError as error:
            raise SyncFailed(f"{self.name} cannot be reached ({str(error) or type(error).__name__})") from error
        try:
            said = orjson.loads(answer.content)
        except orjson.JSONDecodeError:
            said = {}
        if answer.status_code not in expected:
            raise SyncFailed(f"{self.name} refuses {path} ({answer.status_code}): {_words(said) or answer.text[:300]}")
        if not isinstance(said, dict):
            raise SyncFailed(f"{self.name} does not answer {path} as a gateway or a rollout service does")
        return answer.status_code, said


def _words(said: object) -> str | None:
    error = said.get("error") if isinstance(said, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else None
