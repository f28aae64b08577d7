"""How the command writes: results to stdout, progress and errors to stderr, logs as one JSON object a line."""

from __future__ import annotations

import logging
import sys
import traceback

import orjson
from rich.console import Console

PLAIN_WIDTH = 160
"""Columns where there is no terminal to ask: tables in a file or a pipe are for reading, too."""

out = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True)

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


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
