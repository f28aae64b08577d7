"""Several gateway processes over one store: a session lives in exactly one of them, told by its key.

A session's base URL names its own worker's port, so that nothing stands between. A request that comes to another worker (with its key as an
API key, or by a public address) is handed over as it is. Knows no dialect and no session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from polar.chat import JsonObject
from polar.errors import CallError, EngineOverloaded, EngineUnavailable
from polar.gateway.body import read_body

log = logging.getLogger("polar.gateway")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"content-length", b"host"}


@dataclass(frozen=True, slots=True)
class Worker:
    """Where one worker listens."""

    model_url: str
    admin_url: str


class Shards:
    """This worker's view of all of them. `index` is its own."""

    def __init__(self, index: int, workers: list[Worker], token: str) -> None:
        self.index = index
        self.workers = workers
        self._token = token
        self._client: aiohttp.ClientSession | None = None
        self._passing: set[asyncio.Future[None]] = set()

    def owner(self, key_hash: bytes) -> int:
        """The worker that a session belongs to."""
        return int.from_bytes(key_hash[:8], "big") % len(self.workers)

    def others(self) -> list[int]:
        return [index for index in range(len(self.workers)) if index != self.index]

    async def hand_over(self, owner: int, scope: MutableMapping[str, Any], receive: Receive, send: Send, limit: int) -> None:
        """Passes a request to its worker and the answer back, chunk by chunk. A client that leaves ends the handed-over call, too.

        Raises `TooLarge` for a body over `limit` bytes, `ClientLeft`, and `EngineUnavailable` where the worker gives no answer. An answer
        that breaks off in the middle ends the connection.
        """
        path = scope.get("raw_path") or quote(scope["path"]).encode()
        url = self.workers[owner].model_url + path.decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"] if name.lower() not in HOP_BY_HOP]
        body = await read_body(receive, limit)
        gone = asyncio.ensure_future(_until_gone(receive))
        passing = asyncio.ensure_future(self._pass(scope["method"], url + ("?" + query if query else ""), headers, body, send))
        self._passing.add(passing)
        try:
            await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            gone.cancel()
            passing.cancel()
            await asyncio.gather(gone, passing, return_exceptions=True)
            self._passing.discard(passing)

    async def control(self, index: int, method: str, path: str, body: JsonObject | None = None) -> tuple[int, JsonObject]:
        """One call of another worker's control API."""
        data = None if body is None else orjson.dumps(body)
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        try:
            async with self._session().request(method, self.workers[index].admin_url + path, data=data, headers=headers) as answer:
                return answer.status, orjson.loads(await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"worker {index} does not answer: {error}") from error

    async def all_metrics(self, own: bytes) -> bytes:
        """The sum of all workers' metrics, in Prometheus text."""
        texts = [own.decode()]
        for index in self.others():
            headers = {"authorization": f"Bearer {self._token}"}
            try:
                async with self._session().get(self.workers[index].admin_url + "/metrics?own=1", headers=headers) as answer:
                    texts.append(await answer.text())
            except (aiohttp.ClientError, TimeoutError) as error:  # a sum without it would look like counters that were reset
                raise EngineUnavailable(f"worker {index} does not answer: {error}") from error
        return summed(texts)

    async def aclose(self, wait_s: float) -> None:
        """Ends the connections to the others once no answer is passed on by them, or `wait_s` have gone."""
        if self._passing:
            await asyncio.wait(self._passing, timeout=wait_s)
        if self._client is not None:
            await self._client.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._client is not None and self._client.closed:
            raise EngineOverloaded("the gateway is shutting down; try again", retry_after="5")
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        return self._client

    async def _pass(self, method: str, url: str, headers: list[tuple[str, str]], body: bytes, send: Send) -> None:
        started = False
        address = URL(url, encoded=True)  # as it came: normalising "..", say, would make another request of it
        try:
            async with self._session().request(method, address, headers=headers, data=body or None, allow_redirects=False) as answer:
                lines = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
                kept = [line for line in lines if line[0] not in HOP_BY_HOP or line[0] == b"content-length"]
                started = True
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for chunk in _chunks(answer):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientError as error:
            if started:
                log.warning("a worker's answer broke off", extra={"why": str(error)})
                return
            raise EngineUnavailable(f"the worker of this session does not answer: {error}") from error


def summed(texts: list[str]) -> bytes:
    """Adds up equal series of several expositions."""
    heads: dict[str, str] = {}
    values: dict[str, dict[str, float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            heads[family.name] = family.type
            series = values.setdefault(family.name, {})
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                series[name] = series.get(name, 0.0) + sample.value
    lines = []
    for family_name, series in values.items():
        lines.append(f"# TYPE {family_name} {heads[family_name]}")
        lines += [f"{name} {value!r}" for name, value in series.items()]
    return ("\n".join(lines) + "\n").encode()


def merged_health(own: JsonObject, others: Mapping[int, tuple[int, JsonObject] | CallError]) -> JsonObject:
    """One worker's health with the others' beside it: red if any is."""
    workers: dict[str, Any] = {}
    status = own["status"]
    for index, answer in others.items():
        if isinstance(answer, CallError):
            workers[str(index)] = {"status": "unreachable", "error": str(answer)}
        else:
            workers[str(index)] = answer[1]
        if workers[str(index)]["status"] != "ok":
            status = "unhealthy"
    return {**own, "status": status, "workers": workers}


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for chunk in answer.content.iter_any():
        yield chunk


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
