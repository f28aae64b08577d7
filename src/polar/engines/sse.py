"""Incremental parser of server-sent events. Knows no HTTP and no JSON.

Source: the WHATWG standard, section 9.2.6. Only `data` fields matter here; comments, names and ids are skipped.
"""

from __future__ import annotations


class SseParser:
    """Feed it bytes as they come off the socket: however they are split, inside a line or inside a character, the events are the same."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, its lines joined by a newline."""
        whole = data[:6] == b"data: " and data[-2:] == b"\n\n" and data.find(b"\n") == len(data) - 2 and b"\r" not in data
        if whole and not (self._rest or self._data or self._after_cr):  # one event of one line, read at once, as engines send a token
            return [data[6:-2]]
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if not data:
            return []
        self._after_cr = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
