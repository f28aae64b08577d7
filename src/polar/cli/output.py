"""How the command writes: results to stdout, progress and errors to stderr, logs as one JSON object a line."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import orjson
from rich.console import Console

from polar.errors import ConfigError

PLAIN_WIDTH = 160
"""Columns where there is no terminal to ask: tables in a file or a pipe are for reading, too."""

INTERRUPTED = 130
"""The exit code after a Ctrl-C (or SIGTERM, where it is heard) that left something undone: shells' own, 128 + SIGINT."""

out = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH)

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def say(line: str, style: str | None = None) -> None:
    """A line of progress or an error: to stderr, as it is, and never wrapped: a path that is cut in two cannot be copied."""
    err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def written(path: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that appears under its name when it is complete. Raises `ConfigError` where it cannot be written."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder")
    if path.exists() and not path.is_file():  # a pipe or a device: there is nothing to put in its place
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        file = temporary.open("wb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Callers pass facts by `extra`; keys and content are never among them."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname.lower()}
        line["logger"] = record.name
        line["event"] = record.getMessage()
        line.update({name: value for name, value in record.__dict__.items() if name not in _STANDARD})
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return orjson.dumps(line, default=str).decode()


def configure_logging(level: str = "warning") -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(max(root.level, logging.WARNING))
