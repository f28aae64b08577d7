"""Sandboxes that stand ready: prepared ahead of the session that takes one, and started from a snapshot once one like it was prepared.

Each is handed out once: what a session used, no other session ever gets. Two sandboxes are alike only if everything that made them is: the
whole spec, the content of every file that its steps upload, and of its build folder; and, where a backend shows files of this machine, the
task's folder, which is hidden in it. Knows no backend.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from polar.errors import ConfigError, SandboxError
from polar.runtime import backend_of, create
from polar.runtime.base import Place, Runtime
from polar.runtime.folder_hash import folder_hash
from polar.runtime.prepare import prepare
from polar.runtime.spec import RuntimeSpec

PREPARE_LOG = "prepare.log"
"""In a sandbox's private folder: its prepare steps with all their output."""

_log = logging.getLogger(__name__)


@dataclass
class _Shelf:
    """All that is kept of one kind of sandbox."""

    spec: RuntimeSpec
    factory: Callable[[], Place]
    ready: deque[Runtime] = field(default_factory=deque)
    making: int = 0
    """How many are being made, or taken."""
    used_at: float = 0.0
    snapshot: str | None = None
    snapshots: bool = True
    first: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one is prepared and kept as an image: those who wait for it start from that."""


class Pool:
    """Started and prepared sandboxes for one owner. Belongs to the event loop that first uses it; `aclose` it when no session runs."""

    def __init__(
        self,
        *,
        remove: Callable[[str], None],
        warm: int = 0,
        max_warm: int = 64,
        max_snapshots: int = 64,
        idle_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`remove` removes a sandbox's private folder by its id (`Owner.remove`). `warm`: how many of each kind in use stand ready, for
        `idle_s` seconds after the last of that kind was taken, and never more than `max_warm` in all."""
        self._remove = remove
        self._warm = warm
        self._max_warm = max_warm
        self._max_snapshots = max_snapshots
        self._idle_s = idle_s
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unused: list[tuple[type[Runtime], str]] = []
        """Images that nobody starts from any more, and that could not be removed yet."""
        self._closed = False

    @property
    def ready(self) -> int:
        """How many stand ready."""
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    @property
    def snapshots(self) -> int:
        """How many images are kept."""
        return sum(shelf.snapshot is not None for shelf in self._shelves.values())

    async def take(self, spec: RuntimeSpec, place_factory: Callable[[], Place], *, task_folder: Path | None = None) -> Runtime:
        """A started sandbox with the spec's steps done; the caller stops it and removes its folder. Its `place` comes from `place_factory`,
        called now or earlier. Raises `SandboxError`, `ConfigError`; then nothing is left of it."""
        if self._closed:
            raise SandboxError("the pool of sandboxes is closed")
        key = await asyncio.to_thread(kind, spec, task_folder)
        if key is None:
            return await self._fresh(spec, place_factory)
        shelf = self._shelves.setdefault(key, _Shelf(spec, place_factory))
        shelf.factory, shelf.used_at = place_factory, self._clock()
        shelf.making += 1
        try:
            while shelf.ready:
                runtime = shelf.ready.popleft()
                try:
                    lives = await _lives(runtime)
                except BaseException:  # nobody has it any more
                    await asyncio.shield(self._drop_or_say(runtime))
                    raise
                if lives:
                    return runtime
                await self._drop_or_say(runtime)
            return await self._make(shelf, place_factory)
        finally:
            shelf.making -= 1
            self._later(self.tidy())

    async def aclose(self) -> None:
        """Stops what stands ready and removes the images. Raises `SandboxError` with what could not be removed, after all else was."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        problems = []
        for shelf in self._shelves.values():
            while shelf.ready:
                try:
                    await self._drop(shelf.ready.popleft())
                except (SandboxError, OSError) as error:
                    problems.append(str(error))
            self._forget_snapshot(shelf)
        for cls, image in self._unused:
            try:
                await cls.discard(image)
            except SandboxError as error:
                problems.append(str(error))
        self._shelves.clear()
        self._unused.clear()
        if problems:
            raise SandboxError("; ".join(problems))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _make(self, shelf: _Shelf, factory: Callable[[], Place]) -> Runtime:
        """A prepared one: from the snapshot, or prepared now and kept as one."""
        if not shelf.spec.prepare or not shelf.snapshots:
            return await self._fresh(shelf.spec, factory)
        if shelf.snapshot is None:
            async with shelf.first:
                if shelf.snapshot is None and shelf.snapshots:
                    return await self._kept(shelf, factory)
        if shelf.snapshot is None:
            return await self._fresh(shelf.spec, factory)
        from_image = shelf.spec.model_copy(update={"image": shelf.snapshot, "build_context": None, "prepare": []})
        return await self._fresh(from_image, factory)

    async def _kept(self, shelf: _Shelf, factory: Callable[[], Place]) -> Runtime:
        runtime = await self._fresh(shelf.spec, factory)
        try:
            shelf.snapshot = await runtime.snapshot()
            shelf.snapshots = shelf.snapshot is not None
        except SandboxError as error:
            shelf.snapshots = False
            _log.warning("a prepared sandbox could not be kept as an image, so each will be prepared anew: %s", error)
        except BaseException:
            await self._drop(runtime)
            raise
        return runtime

    async def _fresh(self, spec: RuntimeSpec, factory: Callable[[], Place]) -> Runtime:
        place = factory()
        try:
            runtime = create(spec, place)
        except ConfigError:
            await asyncio.to_thread(self._remove, place.id)
            raise
        try:
            await runtime.start()
            await prepare(runtime, spec.prepare, task_folder=place.task_folder, log=place.folder / PREPARE_LOG)
        except BaseException:
            await asyncio.shield(self._drop(runtime))
            raise
        return runtime

    async def _drop(self, runtime: Runtime) -> None:
        try:
            await runtime.stop()
        finally:
            await asyncio.to_thread(self._remove, runtime.place.id)

    async def _drop_or_say(self, runtime: Runtime) -> None:
        """One that nobody waits for: what of it resists holds up nothing else, and is found by its label at the next start."""
        try:
            await self._drop(runtime)
        except (SandboxError, OSError) as error:
            _log.warning(
                "a sandbox that stood ready could not be removed completely", extra={"sandbox": runtime.place.id, "why": str(error)}
            )

    async def tidy(self) -> None:
        """Fills the shelves in use, empties those that are not, and removes images beyond the limit, the longest unused first. Done with
        each that is taken; where none is for long, whoever owns the pool asks for it now and then."""
        now = self._clock()
        for shelf in list(self._shelves.values()):
            if now - shelf.used_at > self._idle_s:
                while shelf.ready:
                    await self._drop_or_say(shelf.ready.popleft())
            elif not self._closed:
                for _ in range(self._missing(shelf)):
                    shelf.making += 1
                    self._later(self._refill(shelf))
        kept = sorted((shelf for shelf in self._shelves.values() if shelf.snapshot), key=lambda shelf: shelf.used_at)
        for shelf in kept[: max(0, len(kept) - self._max_snapshots)]:
            self._forget_snapshot(shelf)
        for key, shelf in list(self._shelves.items()):
            if now - shelf.used_at > self._idle_s and not (shelf.ready or shelf.making or shelf.snapshot):
                del self._shelves[key]
        unused, self._unused = self._unused, []
        for cls, image in unused:
            try:
                await cls.discard(image)
            except SandboxError as error:  # a sandbox still runs from it
                _log.debug("%s", error)
                self._unused.append((cls, image))

    def _missing(self, shelf: _Shelf) -> int:
        all_of_them = sum(len(one.ready) + one.making for one in self._shelves.values())
        return max(0, min(self._warm - len(shelf.ready) - shelf.making, self._max_warm - all_of_them))

    async def _refill(self, shelf: _Shelf) -> None:
        try:
            runtime = await self._make(shelf, shelf.factory)
        except (SandboxError, ConfigError) as error:  # the session that needs one will hear it
            _log.warning("no sandbox could be made ready ahead: %s", error)
            return
        finally:
            shelf.making -= 1
        shelf.ready.append(runtime)

    def _forget_snapshot(self, shelf: _Shelf) -> None:
        if shelf.snapshot is not None:
            self._unused.append((backend_of(shelf.spec), shelf.snapshot))
            shelf.snapshot = None

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def kind(spec: RuntimeSpec, task_folder: Path | None) -> str | None:
    """What sandboxes that may stand for each other have in common; `None` where that can't be told, because a step's source is relative to
    a folder that is not known. Blocks: reads what would be uploaded. Raises `SandboxError` for a source that is not there."""
    whole = hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode())
    if task_folder is not None and backend_of(spec).shows_host_files:
        whole.update(os.fsencode(task_folder.absolute()) + b"\0")
    sources = [Path(step.source) for step in spec.prepare if step.source is not None]
    sources += [Path(spec.build_context)] if spec.build_context is not None else []
    for source in sources:
        if not source.is_absolute():
            if task_folder is None:
                return None
            source = task_folder / source
        try:
            whole.update(folder_hash(source).encode())
        except OSError as error:
            raise SandboxError(f"the source {source} of a sandbox cannot be read: {error}") from error
    return whole.hexdigest()


async def _lives(runtime: Runtime) -> bool:
    try:
        return (await runtime.exec(["true"], cwd="/", timeout_s=30)).ok
    except SandboxError:
        return False
