"""What a command prints: passed on as it comes, its end kept, and whether the command began at all."""

from __future__ import annotations

import time

from polar.runtime.base import ExecResult, OnOutput, Stream

BEGIN = ("/bin/sh", "-c", 'printf %s "$1"; shift; exec "$@"', "sh")
"""With a secret word and a program behind it: prints the word and becomes the program. Only so is it known that a command began, since its
exit code and its words it can choose; and whose fault a failure is depends on it."""

BEGIN_AND_DRAIN = (
    "/bin/sh",
    "-c",
    'printf %s "$1"; shift; { (exec "$@" 2>&3 3>&-); code=$?; } 3>&2 2> /dev/null; cat > /dev/null 2>&1; exit $code',
    "sh",
)
"""The same for a program with a stdin, whose rest is read here: Podman drops all that a program printed where it ended before its stdin was
handed over to its end."""


class Tail:
    """The last `keep_bytes` of each stream, while everything goes to `on_output`. `word` is cut off the beginning of stdout: `began` says
    whether it was there."""

    def __init__(self, keep_bytes: int, on_output: OnOutput | None, word: str) -> None:
        self._word = word.encode()
        self._head: bytearray | None = bytearray()
        self.began = False
        self._keep = keep_bytes
        self._on_output = on_output
        self._kept: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.truncated = False
        self.out_of_memory = False

    def add(self, stream: Stream, data: bytes) -> None:
        if stream == "stdout" and self._head is not None:
            self._head += data
            if len(self._head) < len(self._word):
                return
            data, self._head = bytes(self._head), None
            self.began = data.startswith(self._word)
            data = data.removeprefix(self._word)
        if data:
            self._add(stream, data)

    def _add(self, stream: Stream, data: bytes) -> None:
        kept = self._kept[stream]
        kept += data
        if len(kept) > 2 * self._keep + (1 << 16):  # cut seldom: every cut moves what is kept
            self._cut(kept)
        if self._on_output is not None:
            self._on_output(stream, data)

    def _cut(self, kept: bytearray) -> None:
        if len(kept) > self._keep:
            del kept[: len(kept) - self._keep]
            self.truncated = True

    def result(self, exit_code: int, began: float, *, timed_out: bool = False) -> ExecResult:
        if self._head:  # shorter than the word: no command wrote it
            rest, self._head = bytes(self._head), None
            self._add("stdout", rest)
        for kept in self._kept.values():
            self._cut(kept)
        out, err = (bytes(self._kept[name]) for name in ("stdout", "stderr"))
        return ExecResult(exit_code, out, err, time.monotonic() - began, timed_out, self.truncated, self.out_of_memory)
