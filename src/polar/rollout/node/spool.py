"""What a node owes, on disk: attempts that it has accepted, and results that nobody has acknowledged yet.

* `intake/<attempt>.json` exists from before a dispatch is acknowledged until its result is in the outbox. After a crash it names what was
  lost. The node does not run these again by itself: under its new `instance` they are missing from its heartbeats, so the service sees
  them lost at once and starts new attempts, wherever there is room.
* `outbox/<attempt>.zst` exists from the end of an attempt until its receiver has acknowledged it. It is synced, name and content, before
  the attempt leaves the books; so a result is delivered at least once, and told apart by its `delivery_id`.
* `refused/<attempt>.zst` is a result that the service will never take. People may look at it; nothing here does.

Knows no HTTP. All methods block on the disk: call them in a thread.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import zstandard

from polar.errors import StoreError
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.trajectory.text import dumps, loads

log = logging.getLogger("polar.node")


@dataclass(frozen=True, slots=True)
class Accepted:
    """An attempt as the intake journal holds it: who it was, and who waits for it."""

    session_id: str
    task_id: str
    attempt: int = 0
    sample: int = 0
    callback_url: str | None = None

    @property
    def attempt_id(self) -> str:
        return f"{self.session_id}.{self.attempt}"

    @classmethod
    def of(cls, request: SessionDispatchRequest) -> Accepted:
        return cls(request.session_id, request.task_id, request.attempt, request.sample, request.callback_url)


@dataclass(frozen=True, slots=True)
class Owed:
    """An undelivered result, without its content. `callback_url` of `None`: it goes to the service, or waits to be fetched."""

    attempt_id: str
    session_id: str
    task_id: str
    callback_url: str | None
    since: float
    """Unix seconds of its end."""


class Spool:
    """The two folders. Raises `StoreError` where the disk does not take what must be kept."""

    def __init__(self, folder: Path) -> None:
        self._intake, self._outbox, self._refused = folder / "intake", folder / "outbox", folder / "refused"
        for one in (self._intake, self._outbox):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
            for half_written in one.glob(".*.tmp"):  # by a process that was killed; a node is alone on its folders
                half_written.unlink()

    # --- intake ---

    def accept(self, accepted: Accepted) -> None:
        """Durable when it returns."""
        _write(self._intake / f"{accepted.attempt_id}.json", orjson.dumps(asdict(accepted)))

    def settled(self, attempt_id: str) -> None:
        (self._intake / f"{attempt_id}.json").unlink(missing_ok=True)

    def unsettled(self) -> list[Accepted]:
        """Attempts whose end this or an earlier process has not recorded."""
        found = []
        for path in sorted(self._intake.glob("*.json")):
            try:
                found.append(Accepted(**orjson.loads(path.read_bytes())))
            except (ValueError, TypeError):
                log.warning("an unreadable intake record is set aside", extra={"path": str(path)})
                path.rename(path.with_suffix(".broken"))
        return found

    # --- outbox ---

    def put(self, result: SessionResult, callback_url: str | None, since: float) -> Owed:
        """Keeps a result; durable when it returns."""
        assert result.delivery_id is not None
        owed = Owed(result.delivery_id, result.session_id, result.task_id, callback_url, since)
        text = orjson.dumps(asdict(owed)) + b"\n" + dumps(result.model_dump())
        _write(self._path(owed.attempt_id), zstandard.ZstdCompressor(level=3).compress(text))
        return owed

    def body(self, attempt_id: str) -> bytes:
        """The result's JSON. Raises `FileNotFoundError`."""
        return self._read(self._path(attempt_id))[1]

    def result(self, attempt_id: str) -> SessionResult:
        return SessionResult.model_validate(loads(self.body(attempt_id)))

    def owed(self) -> list[Owed]:
        """All undelivered results, oldest first. A file that a crash or a bad disk spoiled is set aside, never sent."""
        found = []
        for path in self._outbox.glob("*.zst"):
            try:
                found.append(Owed(**orjson.loads(self._read(path)[0])))
            except (ValueError, TypeError, zstandard.ZstdError):
                log.error("an unreadable result is set aside", extra={"path": str(path)})
                path.rename(path.with_suffix(".broken"))
        return sorted(found, key=lambda owed: owed.since)

    def forget(self, attempt_id: str) -> None:
        """Its receiver has it, or wants it no more."""
        self._path(attempt_id).unlink(missing_ok=True)

    def refuse(self, attempt_id: str, instead: SessionResult) -> Path:
        """Sets a result aside, and keeps another in its place; where it lies now. Where that one cannot be kept, it stays."""
        path, aside = self._path(attempt_id), self._refused / f"{attempt_id}.zst"
        owed = Owed(**orjson.loads(self._read(path)[0]))
        self._refused.mkdir(mode=0o700, exist_ok=True)
        path.rename(aside)
        try:
            self.put(instead, owed.callback_url, owed.since)
        except StoreError:
            aside.rename(path)
            raise
        return aside

    def _path(self, attempt_id: str) -> Path:
        return self._outbox / f"{attempt_id}.zst"

    @staticmethod
    def _read(path: Path) -> tuple[bytes, bytes]:
        head, _, body = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).partition(b"\n")
        return head, body


def _write(path: Path, content: bytes) -> None:
    """Writes a file so that after any crash it is there whole, or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise StoreError(f"{path}: {error.strerror or error}: the node's disk must take what it owes") from error
