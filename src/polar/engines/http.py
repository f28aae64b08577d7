"""The HTTP client that all engines share, and the JSON that goes through it.

Knows no engine's fields. One aiohttp session per engine object, and connections of our own for streams (`polar.engines.connection`),
without a cap on either. Cancelling a call closes its connection, which is how an engine learns to stop sampling.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import numpy as np
import orjson

from polar.engines.base import Chunk, Engine, EngineInfo, TokensRequest
from polar.engines.connection import STALE_S, Connections, Unreachable
from polar.engines.refusals import error_for, raise_error_body, told
from polar.engines.sse import SseParser
from polar.errors import CallError, EngineRejected, EngineTimeout, EngineUnavailable
from polar.sockets import probing

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Below uvicorn's 5 seconds (vLLM, SGLang), so that an idle connection is never reused while the server is closing it."""


class HttpEngine(Engine):
    """An engine behind HTTP. `url` may end with `/v1` or not. A user and password in it are sent (unless there is an `api_key`), but are
    not in `self.url`, which stands in records, health and errors."""

    _session: aiohttp.ClientSession | None = None
    _connections: Connections | None = None

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1800.0) -> None:
        url, self._login = split_login(url)
        super().__init__(url.rstrip("/").removesuffix("/v1"), api_key=api_key, timeout_s=timeout_s)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=probing),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                headers=self._headers(),
                cookie_jar=aiohttp.DummyCookieJar(),  # nothing of one session's call may go out with another's
                read_bufsize=1 << 20,
            )
        return self._session

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        elif self._login is not None:
            headers["Authorization"] = self._login
        return headers

    async def get(self, path: str, *, timeout_s: float = 10.0) -> Any:
        """The parsed answer of a GET. Raises as `post` does."""
        return loads(await self._call("GET", path, None, timeout_s))

    async def listed(self, path: str = "/v1/models") -> EngineInfo:
        """What the server's list of models says, in OpenAI's form: all names, and of the first one its length and where it was loaded from.
        What has another form is taken for not told (Ollama without a model: `"data": null`)."""
        listing = await self.get(path)
        data = listing.get("data") if isinstance(listing, dict) else None
        cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
        first = cards[0] if cards else {}
        context, root = first.get("max_model_len"), first.get("root")
        return EngineInfo(
            tuple(str(card["id"]) for card in cards if "id" in card),
            context if type(context) is int else None,
            root=root if isinstance(root, str) else None,
        )

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None, parse: Callable[[bytes], Any] | None = None
    ) -> Any:
        """The answer of a POST, parsed by `parse` or `loads`; an empty one is `None`. numpy arrays in `body` are serialised as lists.

        Raises `EngineError` and `ContextOverflow` as `error_for` maps them (an error body under status 200, too), `EngineUnavailable`
        where there is no connection (in time) or the body is cut, `EngineTimeout` for an answer that does not come in time.
        """
        raw = await self._call("POST", path, dumps(body), timeout_s)
        answer = (parse or loads)(raw) if raw else None
        raise_error_body(answer, raw)
        return answer

    async def post_if_there(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> bool:
        """As `post`; `False`: the server has no such endpoint."""
        try:
            await self.post(path, body, timeout_s=timeout_s)
        except EngineRejected as error:
            if error.status in (404, 405):
                return False
            raise
        return True

    async def _call(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> bytes:
        started = time.monotonic()
        try:
            return await self._once(method, path, data, timeout_s)
        except aiohttp.ServerDisconnectedError as error:
            if time.monotonic() - started > STALE_S:
                raise EngineUnavailable(f"{self.url} closed the connection before its answer") from error
        # A kept-alive connection that the server had just closed: nothing was answered, so once more on a fresh one.
        try:
            return await self._once(method, path, data, timeout_s)
        except aiohttp.ServerDisconnectedError as error:
            raise EngineUnavailable(f"{self.url} closed the connection before its answer") from error

    async def _once(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> bytes:
        total_s = timeout_s or self.timeout_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_connect_s(total_s))
        try:
            async with self._client().request(method, self.url + path, data=data, timeout=timeout, allow_redirects=False) as response:
                raw = await response.read()
                self._refuse_redirect(response.status, response.headers.get("Location"))
                if response.status >= 400:
                    raise error_for(response.status, raw, response.headers)
                return raw
        except aiohttp.ServerDisconnectedError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error, timeout_s) from error

    async def events(self, path: str, body: Mapping[str, Any], take: Callable[[list[Any]], bool | None]) -> None:
        """Gives the JSON events of a streamed POST to `take`, those that came together at a time, the moment they come: up to `[DONE]`, or
        until `take` says true.

        Raises as `post` does, and what `take` raises; any other end is a cut body.
        """
        if self._connections is None:
            self._connections = Connections(self._headers(), connect_timeout_s=CONNECT_TIMEOUT_S, keepalive_s=KEEPALIVE_S)
        reader = _EventReader(take)
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._connections.post(self.url + path, dumps(body), reader.feed)
        except (OSError, UnicodeError, zlib.error) as error:
            raise self._lost(error, self.timeout_s) from error
        self._refuse_redirect(answer.status, answer.headers.get("location"))
        if answer.status >= 400:
            retry_after = answer.headers.get("retry-after")
            raise error_for(answer.status, answer.refusal, {} if retry_after is None else {"Retry-After": retry_after})
        if not reader.ended:
            raise EngineUnavailable(f"{self.url} ended its stream in the middle")

    async def stream(self, request: TokensRequest) -> AsyncGenerator[Chunk, None]:
        """`stream_into`, for who would rather ask for the next chunk."""
        came: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def take(chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                came.put_nowait(chunk)

        task = asyncio.create_task(self.stream_into(request, take))
        task.add_done_callback(lambda _: came.put_nowait(None))
        try:
            while (chunk := await came.get()) is not None:
                yield chunk
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _refuse_redirect(self, status: int, target: str | None) -> None:
        """A redirected POST arrives as a GET, and the gateway's key would go wherever it points."""
        if 300 <= status < 400:
            raise EngineUnavailable(f"{self.url} redirects to {told(target) or 'nowhere'}: give the engine's own URL")

    def _lost(self, error: BaseException, timeout_s: float | None) -> CallError:
        if isinstance(error, aiohttp.ClientConnectorError):
            return EngineUnavailable(f"no engine answers at {self.url}: {error.os_error}")
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return EngineUnavailable(f"no engine answers at {self.url}: no connection within {_connect_s(timeout_s or self.timeout_s):g} s")
        if isinstance(error, Unreachable):
            return EngineUnavailable(f"no engine answers at {self.url}: {error}")
        if isinstance(error, asyncio.TimeoutError):
            return EngineTimeout(f"{self.url} did not answer within {timeout_s or self.timeout_s:g} s")
        return EngineUnavailable(f"{self.url} went away in the middle: {str(error) or type(error).__name__}")

    async def aclose(self) -> None:
        if self._connections is not None:
            self._connections.close()
        if self._session is not None:
            await self._session.close()


def _connect_s(total_s: float) -> float:
    """Less than the whole time, so that a host that takes no connection is told from an engine that does not answer."""
    return min(CONNECT_TIMEOUT_S, 0.8 * total_s)


class _EventReader:
    """A streamed body on its way to `take`, as parsed events."""

    def __init__(self, take: Callable[[list[Any]], bool | None]) -> None:
        self.ended = False
        self._take = take
        self._parser = SseParser()

    def feed(self, data: bytes) -> bool:
        """True once `[DONE]` has come, or `take` needs no more. An error among the events is raised when those before it are given away."""
        events: list[Any] = []
        try:
            for event in self._parser.feed(data):
                if event == b"[DONE]":
                    self.ended = True
                    break
                parsed = loads(event)
                if isinstance(parsed, dict) and "error" in parsed:
                    raise_error_body(parsed, event)
                events.append(parsed)
        finally:
            if events and self._take(events):
                self.ended = True
        return self.ended


def split_login(url: str) -> tuple[str, str | None]:
    """A URL without its user and password, and the `Authorization` header that they make (RFC 7617)."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, None
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return bare, "Basic " + base64.b64encode(pair.encode()).decode()


MISREAD = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading an answer raises that has not the form of its API."""


@contextmanager
def reading(url: str) -> Iterator[None]:
    """An answer that has not the form of its API is the engine's failure, never an internal error of the gateway."""
    try:
        yield
    except MISREAD as error:
        raise misread(url, error) from error


def misread(url: str, error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"{url} gave an answer that has not the form of its API: {type(error).__name__}: {error}")


def dumps(body: Mapping[str, Any]) -> bytes:
    """A request's JSON. What orjson has no form for (integers past 64 bits, nesting past 254 levels, lone surrogates: all of them can
    stand in a harness's schemas) is written by the standard library."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json.dumps(body, separators=(",", ":"), default=_as_list).encode()


def _as_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot stand in a request")


def loads(raw: bytes) -> Any:
    """Parses a server's JSON, the NaN and Infinity literals of careless ones included (B95); half a surrogate pair becomes U+FFFD."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            text = json.dumps(json.loads(raw), ensure_ascii=False)
            return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError as error:
            raise EngineUnavailable(f"the engine's answer is not JSON: {raw[:200].decode(errors='replace')!r}") from error
