"""The only way out of a sandbox without network: a listener on its own loopback address, joined from outside to the model API.

The listener is made by a short-lived process that enters the sandbox's network namespace, binds, and hands the socket out; the bytes are
moved by this process. Nothing is installed inside, and nothing inside can name another target.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket

from polar.errors import SandboxError
from polar.runtime.nursery import nursery

log = logging.getLogger("polar.runtime")

PORT = 8100
MOST = 512
"""Connections that are joined at once; more wait to be accepted. Each takes three descriptors of this machine's, and a program inside may
open as many as it likes: what it would use up is every other session's too."""
_CHUNK = 1 << 16
_RETRY_S = 1.0
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Relay:
    """From `open` to `close`. `url` is what a program inside uses."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._target = target
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener = listener
        self._accepting: asyncio.Task[None] | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MOST)

    @classmethod
    async def open(cls, pid: int, target: tuple[str, int], *, port: int = PORT) -> Relay:
        """Listens on `127.0.0.1:port` in the network namespace of the process `pid` (as this machine numbers it), and joins every
        connection to `target` on this machine. Raises `SandboxError`."""
        relay = cls(await asyncio.to_thread(_listener, pid, port), target)
        relay._accepting = asyncio.create_task(relay._accept())
        return relay

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._open)

    async def close(self) -> None:
        """Closes the listener and every connection."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors left, or a connection that broke off before it was accepted
                self._room.release()
                log.warning("a sandbox's connection was not accepted", extra={"why": str(error)})
                await asyncio.sleep(_RETRY_S if error.errno in _FULL else 0)
                continue
            task = asyncio.create_task(self._joined(connection))
            self._open.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._room.release()

    async def _joined(self, connection: socket.socket) -> None:
        with connection:
            reader, writer = await asyncio.open_connection(sock=connection)
            await self._join(reader, writer)

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
