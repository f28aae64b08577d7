"""HTTP/1.1 connections on which streamed answers are read the moment their bytes come.

A general client hands bytes to a reader, and the reader to a task a turn of the event loop later; at one token an event that costs more
than the token's own way does. Here the protocol itself gives each piece of a body to `take`, before it returns to the event loop.
Nothing is buffered, so nothing has to be paused. Knows no JSON, no events and no engine.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import cast
from urllib.parse import quote, urlsplit

import httptools

from polar.sockets import probe

MAX_HEAD = 64 * 1024
"""Bytes of a status line with its headers."""
MAX_REFUSAL = 1 << 20
"""Bytes that are kept of an answer that is no success."""
INFLATE = 1 << 20
"""Bytes that a compressed piece becomes at a time."""
STALE_S = 0.25
"""How soon a reused connection that is lost without an answer is taken for one that the server had just closed."""

Take = Callable[[bytes], bool]
"""Given a piece of a body; true once it needs no more of it."""


class Cut(ConnectionError):
    """The connection ended in the middle of an answer, or before it."""


class Unreachable(ConnectionError):
    """There is no connection to be had."""


class NotHttp(ConnectionError):
    """What came is no HTTP answer, or one that was not asked for."""


class Answer:
    """One answer as its bytes come. Of a 2xx the body goes to `take`; of anything else its beginning is kept in `refusal`."""

    def __init__(self, take: Take) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.refusal = b""
        self.begun = False
        self.complete = False
        self.keeps_alive = False
        """Whether the connection may be used again once it is complete."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Once it is complete, `take` needs no more, or it failed."""
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._headed = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._inflater: zlib._Decompress | None = None
        self._raw_deflate = False

    def feed(self, data: bytes) -> None:
        """Raises `NotHttp`, `zlib.error`, and whatever `take` does, to which goes first what was good of `data`."""
        self.begun = True
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            fault = error
        if not self._headed:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                raise NotHttp("the answer's headers have no end")
        pieces = self._pieces
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._inflater is None:
                self._body(body)
            else:
                for piece in self._inflated(body):
                    self._body(piece)
        if fault is not None and not self.complete:
            raise NotHttp(f"what came is no HTTP answer: {fault.__context__ or fault}") from fault
        if self.complete:
            self.keeps_alive = self.keeps_alive and fault is None  # what comes after an answer was not asked for
            self.settle()

    def ends_with_connection(self) -> bool:
        """Whether it has a body without a length, which is whole when the server closes."""
        return self._headed and "content-length" not in self.headers and "transfer-encoding" not in self.headers

    def settle(self, error: BaseException | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def _body(self, data: bytes) -> None:
        if not 200 <= self.status < 300:
            self.refusal = (self.refusal + data)[:MAX_REFUSAL]
        elif not self.done.done() and self._take(data):
            self.settle()

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        assert self._inflater is not None
        if self._raw_deflate and data[0] & 0x0F != 8:  # no zlib header: some servers mean the bare format (RFC 9110, 8.4.1.2)
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._raw_deflate = False
        while data:
            yield self._inflater.decompress(data, INFLATE)
            data = self._inflater.unconsumed_tail

    # --- what the parser calls -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise NotHttp("a second answer to one request")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # 100 Continue and the like: the answer is still to come
            return
        self._headed = True
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
            self._raw_deflate = encoding == "deflate"
        elif encoding not in ("", "identity"):
            raise NotHttp(f"the answer is in an encoding that was not asked for: {encoding}")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = self._headed
        self.keeps_alive = self._parser.should_keep_alive()  # only here: the parser then forgets the headers


class Connection(asyncio.Protocol):
    """One connection to a server. `free` is called whenever it can take another request, `lost` once, at its end."""

    def __init__(self, free: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        self._free = free
        self._lost = lost
        self._answer: Answer | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Sends `request` and waits until the answer is `done`. Anything that ends it early closes the connection, by which the server
        learns of it. Raises what `Answer.feed` does, and `Cut`."""
        assert self._transport is not None
        self.expire_in(None)
        self._answer = answer
        if self._transport.is_closing():
            raise Cut("the connection is closed")
        self._transport.write(request)
        try:
            await answer.done
        except BaseException:
            self.close()
            raise

    def expire_in(self, seconds: float | None) -> None:
        """Closes it then; `None` takes that back."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.close)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # --- what the event loop calls -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            probe(sock)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nothing was asked
            self.close()
            return
        try:
            answer.feed(data)
        except Exception as error:  # the parser's, or that of whoever takes the events: the asking task raises it
            answer.settle(error)
            self.close()
            return
        if answer.complete:
            self._answer = None
            if answer.keeps_alive:
                self._free(self)
            else:
                self.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.expire_in(None)
        self._lost(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if error is None and answer.ends_with_connection():
            answer.complete = True
            answer.settle()
        else:
            answer.settle(Cut(str(error) if error is not None else "the connection was closed"))


class Connections:
    """The connections to one server. One that is free is used again within `keepalive_s`; there is no cap on their number."""

    def __init__(self, headers: Mapping[str, str], *, connect_timeout_s: float, keepalive_s: float) -> None:
        if any("\n" in value or "\r" in value for value in headers.values()):
            raise ValueError("a header's value is one line")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None

    async def post(self, url: str, body: bytes, take: Take) -> Answer:
        """The answer, whole or as far as `take` needed it. Redirects are answers like any other.

        Raises `Unreachable` where there is no connection, or none in time, `Cut`, `NotHttp`, `zlib.error`, and what `take` raises.
        """
        request = self._head(url, len(body)) + body
        began = time.monotonic()
        if self._free:
            answer = Answer(take)
            try:
                return await self._ask(self._free.pop(), request, answer)
            except Cut:
                if answer.begun or time.monotonic() - began > STALE_S:
                    raise
        return await self._ask(await self._connect(url), request, Answer(take))

    async def _ask(self, connection: Connection, request: bytes, answer: Answer) -> Answer:
        await connection.ask(request, answer)
        if not answer.complete:  # its last bytes are on their way; nobody waits for them
            connection.expire_in(self._keepalive_s)
        return answer

    def close(self) -> None:
        """Cuts all of them; who still waits for an answer gets `Cut`."""
        for connection in list(self._all):
            connection.close()

    async def _connect(self, url: str) -> Connection:
        parts = urlsplit(url)
        if parts.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        secure = parts.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._freed, self._gone),
                    parts.hostname or "",
                    parts.port or (443 if secure else 80),
                    ssl=self._tls if secure else None,
                )
        except TimeoutError as error:
            raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from error
        except (OSError, UnicodeError) as error:
            raise Unreachable(str(error)) from error
        self._all.add(connection)
        return connection

    def _head(self, url: str, length: int) -> bytes:
        parts = urlsplit(url)
        name = parts.hostname or ""
        host = f"[{name}]" if ":" in name else name.encode("idna").decode()
        port = "" if parts.port is None else f":{parts.port}"
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{parts.query}" if parts.query else "")
        return (
            f"POST {target} HTTP/1.1\r\nHost: {host}{port}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
            f"{self._headers}Content-Length: {length}\r\n\r\n"
        ).encode()

    def _freed(self, connection: Connection) -> None:
        if not connection.closing:
            connection.expire_in(self._keepalive_s)
            self._free.append(connection)

    def _gone(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
