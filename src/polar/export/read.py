"""Rows out of files: JSON lines of rows or of whole trajectories, and Parquet as `polar export --as rl` writes it. Streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.trajectory.text import loads

_IN_METADATA = ("session_id", "rollout_id", "group_id", "role", "task", "repository", "harness")
_JSON = ("prompt_messages", "response_messages", "tools", "metadata")


class Unreadable(Exception):
    """A line that is no JSON."""


def rows_in(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row in the JSON form of `Trace`, with its place for people: `line 3`, `line 3, row 2 of its trajectory`, `row 7`.

    In place of a line that cannot be read stands an `Unreadable`. `-` is standard input. Raises `ConfigError` for a file that
    cannot be read at all.
    """
    try:
        if str(path) == "-":
            yield from _lines(sys.stdin.buffer)
        elif path.is_dir():
            for part in sorted((path / "data").glob("*.parquet")) or sorted((path / "data").glob("*.jsonl")):
                for place, row in rows_in(part):
                    yield f"{part.name}, {place}", row
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            with path.open("rb") as file:
                yield from _lines(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _lines(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = loads(line)
        except ValueError as error:
            yield f"line {number}", Unreadable(str(error))
            continue
        if isinstance(value, dict) and isinstance(value.get("traces"), list):
            for index, row in enumerate(value["traces"]):
                yield f"line {number}, row {index} of its trajectory", row
        else:
            yield f"line {number}", value


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install -e '.[export]' (in Polar's folder)") from error
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error
    with file:
        number = 0
        for batch in file.iter_batches(batch_size=16):
            for row in batch.to_pylist():
                yield f"row {number}", _from_columns(row)
                number += 1


def _from_columns(row: JsonObject) -> Any:
    """A row of an RL table in the JSON form of `Trace`; any other row as it is."""
    if not isinstance(row.get("metadata"), str):
        return row
    found = {name: value for name, value in row.items() if name not in _IN_METADATA}
    try:
        found |= {name: orjson.loads(row[name]) for name in _JSON if row.get(name) is not None}
    except ValueError as error:
        return Unreadable(f"a column of JSON text is none: {error}")
    if isinstance(found["metadata"], dict):
        found["metadata"] |= {name: row[name] for name in _IN_METADATA if row.get(name) is not None}
    return found
