"""One running exec's stdin, stdout and stderr, over a connection of its own to the daemon. Knows no sandbox.

After `POST /exec/{id}/start` the connection is upgraded: what we write is the program's stdin, what we read are frames of
`stream (1 byte), 3 zero bytes, length (4 bytes, big-endian), data` (Docker Engine API, "Attach to a container", stream format). The
library's own stream can't end stdin alone, which any program that reads to the end of its input needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
from collections.abc import AsyncIterator

import aiodocker

from polar.runtime.base import Stream

_HEADER = struct.Struct(">BxxxL")
_DAEMON_NOISE = re.compile(rb"Error: (?:write|read) unixpacket .{0,200}(?:connection reset by peer|broken pipe)\s*\Z", re.DOTALL)
"""What Podman adds to stderr when a program ends without reading all its input. No program wrote it."""


class Attached:
    """Made by `open`; `close` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str, api: str, exec_id: str, *, timeout_s: float = 60.0) -> Attached:
        """Starts the exec. Raises `aiodocker.DockerError` for a refusal, `OSError` and `TimeoutError` where there is no answer."""
        kind, _, rest = address.partition("://")
        async with asyncio.timeout(timeout_s):
            if kind == "unix":
                reader, writer = await asyncio.open_unix_connection(rest)
            else:
                host, _, port = rest.rstrip("/").rpartition(":")
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                body = json.dumps({"Detach": False, "Tty": False}).encode()
                writer.write(
                    f"POST /{api}/exec/{exec_id}/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status = int(head.split(None, 2)[1])
                if status >= 300:
                    raise aiodocker.DockerError(status, await _refusal(reader))
            except BaseException:
                writer.close()
                raise
        return cls(reader, writer)

    async def feed(self, stdin: bytes) -> None:
        """Writes all of stdin and ends it. A program that ended or closed its input takes no more; that is its right."""
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(stdin), 1 << 16):
                self._writer.write(stdin[start : start + (1 << 16)])
                await self._writer.drain()
            self._writer.write_eof()

    async def frames(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """What it prints, as it comes, until every process that holds its stdout or stderr has let go or the connection is lost."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                data = await self._reader.readexactly(length)
                if data and not (number == 2 and length < 300 and _DAEMON_NOISE.match(data)):
                    yield ("stderr" if number == 2 else "stdout"), data

    def close(self) -> None:
        self._writer.close()


async def _refusal(reader: asyncio.StreamReader) -> str:
    """The message in an error's body, whose framing does not matter for it."""
    body = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(2.0):
            while b"}" not in body and (more := await reader.read(1 << 16)):
                body += more
    text = body[body.find(b"{") : body.rfind(b"}") + 1]
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "the daemon refused to start the command"
