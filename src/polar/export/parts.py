"""The files of an export. A part appears under its name only when it is complete and synced; until then it is `NAME.tmp`.

Rows wait in memory for a row group's worth of bytes, whatever the number of rows. Knows columns and bytes, no trace and no plan.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.export.columns import COLUMNS, schema
from polar.export.rows import Row
from polar.export.spec import FileFormat, Form
from polar.export.state import Part

FOLDER = "data"
GROUP_BYTES = 8 << 20
"""Rows of a Parquet row group, before compression."""


class Writer(ABC):
    """One part being written."""

    def __init__(self, folder: Path, form: Form, split: str, number: int) -> None:
        self.form = form
        self.split = split
        self.number = number
        self.file = f"{FOLDER}/{split}-{number:05d}.{self.suffix}"
        self.path = folder / self.file
        self.rows = 0
        self.size = 0
        self.path.parent.mkdir(exist_ok=True)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._open(self._temporary)

    suffix: str

    def add(self, row: Row) -> None:
        self.rows += 1
        self.size += row.size
        self._add(row)

    def finish(self) -> Part:
        """Ends the part and makes it durable under its name."""
        self._close()
        digest = hashlib.sha256()
        with self._temporary.open("rb+") as file:
            while block := file.read(1 << 20):
                digest.update(block)
            os.fsync(file.fileno())
        self._temporary.replace(self.path)
        sync_folder(self.path.parent)
        return Part(self.split, self.number, self.file, self.rows, self.path.stat().st_size, digest.hexdigest())

    @abstractmethod
    def _open(self, path: Path) -> None: ...

    @abstractmethod
    def _add(self, row: Row) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class JsonLines(Writer):
    suffix = "jsonl"
    _out: BinaryIO

    def _open(self, path: Path) -> None:
        self._out = path.open("wb")

    def _add(self, row: Row) -> None:
        self._out.write(orjson.dumps(row.values, option=orjson.OPT_SERIALIZE_NUMPY) if row.line is None else row.line)
        self._out.write(b"\n")

    def _close(self) -> None:
        self._out.close()


class Parquet(Writer):
    suffix = "parquet"

    def _open(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._schema = schema(self.form)
        self._waiting: list[JsonObject] = []
        self._bytes = 0
        self._out = pq.ParquetWriter(path, self._schema, compression="zstd")

    def _add(self, row: Row) -> None:
        self._waiting.append(row.values)
        self._bytes += row.size
        if self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            arrays = [
                _column(column.kind, [values[column.name] for values in self._waiting], self._schema.field(column.name).type)
                for column in COLUMNS[self.form]
            ]
            self._out.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
            self._waiting.clear()
            self._bytes = 0

    def _close(self) -> None:
        self._flush()
        self._out.close()


def _column(kind: str, values: list[Any], arrow_type: Any) -> Any:
    """An Arrow array; numpy arrays go in as they are, without a Python object for each number."""
    import pyarrow as pa

    if kind not in ("ids", "bits", "floats"):
        return pa.array(values, arrow_type)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values), arrow_type.value_type), type=arrow_type)


WRITERS: dict[FileFormat, type[Writer]] = {"parquet": Parquet, "jsonl": JsonLines}


def check_format(file_format: FileFormat) -> None:
    """Raises `ConfigError` where a library for this format is missing."""
    if file_format == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ConfigError("Parquet needs pyarrow: pip install -e '.[export]' (in Polar's folder), or write --format jsonl") from error


def remove_strays(folder: Path, parts: list[Part]) -> None:
    """Removes what an interruption left: files that no checkpoint names. Raises `ConfigError` where one that it names is gone."""
    known = {part.file for part in parts}
    for file in sorted((folder / FOLDER).glob("*")) if (folder / FOLDER).is_dir() else ():
        if f"{FOLDER}/{file.name}" not in known:
            file.unlink()
    for part in parts:
        path = folder / part.file
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise ConfigError(f"{path} was changed or removed since it was written: export to another folder")


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: Iterable[bytes]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
