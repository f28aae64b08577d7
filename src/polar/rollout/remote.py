"""What the service says to nodes, over HTTP. Knows no database: it says how a call ended, callers decide what that means."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import aiohttp
import orjson

from polar.errors import RolloutError
from polar.rollout.cancel import Unwanted
from polar.rollout.schedule import Dispatch

ANSWER_S = 30.0
CONNECT_S = 5.0
PER_NODE = 16
"""Calls of one kind to one node at once, so that one that hangs holds up no other."""

Word = Literal["accepted", "full", "unreachable", "unclear", "locked_out", "refused"]
"""`full`: 503; `unreachable`: it cannot have the session; `unclear`: it may have it, ask again; `locked_out`: our token is not its own (it
will register anew); `refused`: it will not run this session."""


@dataclass(frozen=True, slots=True)
class Said:
    """How a dispatch ended. `wait_s`: for how long the node wants no more."""

    word: Word
    wait_s: float = 1.0
    why: str = ""


class Rooms:
    """`PER_NODE` places for each node. Nothing is kept of one that nobody calls."""

    def __init__(self) -> None:
        self._rooms: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def one(self, node: str) -> AsyncIterator[bool]:
        """A place for a call to that node; whether it had to be waited for."""
        room = self._rooms.setdefault(node, asyncio.Semaphore(PER_NODE))
        self._users[node] += 1
        waits = room.locked()
        try:
            async with room:
                yield waits
        finally:
            self._users[node] -= 1
            if not self._users[node]:
                del self._users[node], self._rooms[node]


class Nodes:
    """Connections to nodes; use between `start` and `aclose`."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, connect=CONNECT_S)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=512, limit_per_host=64))

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None, "Nodes.start was not called"
        return self._http

    async def dispatch(self, dispatch: Dispatch) -> Said:
        headers = {"content-type": "application/json", **_bearer(dispatch.token)}
        try:
            async with self.http.post(f"{dispatch.url}/sessions", data=dispatch.body, headers=headers) as answer:
                if answer.status in (200, 201, 202, 409):
                    return Said("accepted")
                why = f"{answer.status}: {(await answer.text(errors='replace'))[:500]}"
                if answer.status in (429, 503):
                    return Said("full", _seconds(answer.headers.get("retry-after")), why)
                if answer.status in (401, 403):
                    return Said("locked_out", 5.0, why)
                return Said("refused" if answer.status < 500 else "unclear", 1.0, why)
        except aiohttp.ClientConnectorError as error:
            return Said("unreachable", 2.0, str(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            return Said("unclear", 1.0, str(error) or type(error).__name__)

    async def cancel(self, unwanted: Unwanted) -> bool:
        """Whether the node has answered that it does not run it (any more)."""
        url = f"{unwanted.url}/sessions/{unwanted.session}"
        try:
            async with self.http.delete(url, params={"attempt": str(unwanted.attempt)}, headers=_bearer(unwanted.token)) as answer:
                return answer.status in (200, 202, 204, 404, 410)
        except (aiohttp.ClientError, TimeoutError):
            return False

    @asynccontextmanager
    async def get(self, url: str, token: str | None, *, endless: bool = False) -> AsyncIterator[aiohttp.ClientResponse]:
        """A node's answer, to be passed on. Raises `RolloutError`: `node_unreachable` (503), or as the node said."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=None if endless else ANSWER_S)
        try:
            async with self.http.get(url, headers=_bearer(token), timeout=timeout) as answer:
                if answer.status >= 400:
                    raise RolloutError(_message(await answer.read()), code=_code(answer.status), status=answer.status)
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise RolloutError(f"the session's node cannot be reached: {why}", code="node_unreachable", status=503) from error


def _bearer(token: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _seconds(value: str | None) -> float:
    try:
        return min(60.0, max(0.2, float(value or "1")))
    except ValueError:
        return 1.0


def _code(status: int) -> str:
    return {404: "not_found", 410: "gone", 401: "node_unreachable", 403: "node_unreachable"}.get(status, "node_refused")


def _message(raw: bytes) -> str:
    try:
        body = orjson.loads(raw)
        return str(body["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "the node says: " + raw[:300].decode("utf-8", "replace")
