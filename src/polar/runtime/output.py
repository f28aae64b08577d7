"""One output stream of a command: passed on as it comes, its end kept."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time

from polar.runtime.base import OnOutput, Stream

_QUIET_S = 0.2
"""How long an output may be quiet after its command's end before it is no more listened to."""
_AFTER_S = 2.0
"""How long what comes after its command's end is listened to at most: what that left running may never be quiet."""


class Output:
    """A pipe. Give `writing` to the command, then `begin`; `close` at the end in any case."""

    def __init__(self, name: Stream, on_output: OnOutput | None, keep_bytes: int) -> None:
        self.name = name
        self.total = 0
        self._on_output = on_output
        self._keep = keep_bytes
        self._data = bytearray()
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._end = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None

    def begin(self) -> None:
        """Closes our end of what the command writes to, and reads on."""
        os.close(self.writing)
        self.writing = -1
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    @property
    def ended(self) -> bool:
        return self._end.is_set()

    @property
    def truncated(self) -> bool:
        return self.total > self._keep

    @property
    def unread(self) -> int:
        """Bytes that are written, and not yet read here."""
        if self._closed or self.ended:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(self._reading, termios.FIONREAD, bytes(4)))[0])

    async def wait(self) -> None:
        """Until the stream ends."""
        await self._end.wait()

    def check(self) -> None:
        """Raises what `on_output` raised."""
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            data = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._reading)
            self._end.set()
            return
        self.note(data)
        if self._on_output is not None and self._error is None:
            try:
                self._on_output(self.name, data)
            except Exception as error:  # raised where the command is awaited, not in the event loop
                self._error = error

    def note(self, data: bytes) -> None:
        """Keeps it, without passing it on."""
        self.total += len(data)
        self._data += data
        if len(self._data) > 2 * self._keep + 65536:
            del self._data[: len(self._data) - self._keep]

    def kept(self) -> bytes:
        return bytes(self._data[-self._keep :]) if self._keep else b""

    def text(self) -> str:
        return self.kept().decode(errors="replace").strip()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.writing >= 0:
            os.close(self.writing)
        elif not self._end.is_set():
            asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)


async def drained(*outputs: Output) -> None:
    """Called at a command's end: reads all that was written by then. What the command left running may hold its outputs open: they are
    listened to until they are quiet, and no longer than `_AFTER_S`. Raises what an `on_output` raised."""
    written = [one.total + one.unread for one in outputs]
    ends = time.monotonic() + _AFTER_S
    seen = -1
    while not all(one.ended for one in outputs):
        total = sum(one.total for one in outputs)
        # none unread: what is missing was read away by a program inside (`cat /dev/stdout`)
        whole = all(one.ended or one.total >= bytes_ or not one.unread for one, bytes_ in zip(outputs, written, strict=True))
        if whole and (total == seen or time.monotonic() > ends):
            break
        seen = total
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                for one in outputs:
                    await one.wait()
    for one in outputs:
        one.check()
