"""A disk that does not take what a run writes is one error, which names the folder; torch and safetensors have one each of their own.
Loads neither."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from polar.errors import SaveFailed


@contextmanager
def saving(what: str, folder: Path) -> Iterator[None]:
    """Raises `SaveFailed` where `what` cannot be written under `folder`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SaveFailed(
            f"{what} could not be written to {folder}: {said}{_left(folder)}. What was there before is whole: once it can be written, the "
            "same command goes on from the last checkpoint"
        ) from error


def save(thing: Any, path: Path) -> None:
    """`torch.save`, but what the disk says is raised as that (`OSError`): torch's own error tells of positions in a file."""
    import torch

    with path.open("wb") as file:
        heard = _Heard(file)
        try:
            torch.save(thing, cast(BinaryIO, heard))
        except RuntimeError:
            if heard.error is not None:
                raise heard.error from None
            raise


class _Heard:
    """A file that keeps the error of a write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _left(folder: Path) -> str:
    """What is free where `folder` is, or would be."""
    place = next((one for one in (folder, *folder.absolute().parents) if one.is_dir()), None)
    return "" if place is None else f" ({shutil.disk_usage(place).free / 2**20:,.0f} MiB are free)"
