"""The only way out of a sandbox without network: a listener on its own loopback address, joined from outside to the model API.

The listener is made by a short-lived process that enters the sandbox's network namespace, binds, and hands the socket out; the bytes are
moved by this process. Nothing is installed inside, and nothing inside can name another target.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from polar.errors import SandboxError
from polar.runtime.nursery import nursery

PORT = 8100
_CHUNK = 1 << 16


class Relay:
    """From `open` to `close`. `url` is what a program inside uses."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._target = target
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, pid: int, target: tuple[str, int], *, port: int = PORT) -> Relay:
        """Listens on `127.0.0.1:port` in the network namespace of the process `pid` (as this machine numbers it), and joins every
        connection to `target` on this machine. Raises `SandboxError`."""
        relay = cls(await asyncio.to_thread(_listener, pid, port), target)
        relay._server = await asyncio.start_server(relay._accepted, sock=relay._listener, backlog=4096)
        return relay

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._open)

    async def close(self) -> None:
        """Closes the listener and every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._listener.close()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._join(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            answers, far = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, far))
                both.create_task(_pump(answers, writer))
        except* OSError:  # the model API cannot be reached, or either side broke off: the other one hears the same
            for one in (writer, far):
                if one is not None:
                    one.transport.abort()
        finally:
            for one in (writer, far):
                if one is not None:
                    one.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Moves bytes as they come, no faster than they are taken, and then says that this direction is over (the other may go on)."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        with contextlib.suppress(OSError):
            writer.write_eof()


def _listener(pid: int, port: int) -> socket.socket:
    try:
        listener = nursery().listener(pid, port)
    except OSError as error:
        raise SandboxError(f"no listener could be opened in the network of process {pid}: {error}") from error
    listener.setblocking(False)
    return listener
