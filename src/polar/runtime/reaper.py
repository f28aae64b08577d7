"""Finds and removes what dead owners left: processes, containers, images, folders. Nothing but this machine's own state is asked, so it
works after `kill -9` and after a reboot, and by whoever starts next on the same root.

A dead owner's lock is held while it is cleaned up after: two reapers never meet. Knows no backend but by `Runtime.find` and `remove`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from polar.errors import SandboxError
from polar.runtime import processes
from polar.runtime.base import Left, registered
from polar.runtime.owner import LOCK, owner_alive, owners, remove_tree, root_mark, take_over


async def listing(root: Path) -> list[Left]:
    """Everything on this machine that belongs to an owner of this root, living or dead. A backend that is not usable here is left out."""
    found, _ = await _look(root)
    return found


async def reap(root: Path, *, dry_run: bool = False) -> list[Left]:
    """Removes everything whose owner is dead; gives what it removed (or would). Raises `SandboxError` that names what could not be
    removed, after everything else was."""
    found, problems = await _look(root)
    dead = [one for one in found if not await asyncio.to_thread(owner_alive, root, one.owner)]
    if dry_run:
        return dead
    removed: list[Left] = []
    for owner in sorted({one.owner for one in dead}):
        lock = await asyncio.to_thread(take_over, root, owner)
        if lock is None and await asyncio.to_thread(owner_alive, root, owner):
            continue  # somebody else is at it
        try:
            removed += await _after(root, owner, [one for one in dead if one.owner == owner], problems)
        finally:
            if lock is not None:
                os.close(lock)
    if problems:
        raise SandboxError("what dead sandboxes left could not all be removed: " + "; ".join(problems))
    return removed


async def _look(root: Path) -> tuple[list[Left], list[str]]:
    mark = f"{root_mark(root)}-"
    problems: list[str] = []
    found = [
        Left("process", str(one.pid), one.sandbox, one.owner, one.command)
        for one in await asyncio.to_thread(processes.find, owner_prefix=mark)
    ]
    for name, backend in registered().items():
        try:
            if await backend.unavailable() is None:
                found += [one for one in await backend.find() if one.owner.startswith(mark)]
        except SandboxError as error:
            problems.append(f"{name}: {error}")
    found += await asyncio.to_thread(_folders, root)
    return list(dict.fromkeys(found)), problems  # a backend made of another one finds what that one finds


def _folders(root: Path) -> list[Left]:
    found = []
    for owner in owners(root):
        for folder in (root / owner, root / f".{owner}"):
            if folder.is_dir():
                found += [Left("folder", str(one), one.name, owner) for one in sorted(folder.iterdir()) if one.name != LOCK]
                found.append(Left("folder", str(folder), "", owner))
    return found


async def _after(root: Path, owner: str, left: list[Left], problems: list[str]) -> list[Left]:
    """Processes first, so that nothing makes anything any more; then what backends hold; folders last, sandboxes' before their owner's."""
    removed = []
    folder = (root / owner).absolute()
    stubborn = await asyncio.to_thread(processes.end, owner_prefix=owner, folder=folder)
    problems += [f"process {pid} does not end" for pid in stubborn]
    removed += [one for one in left if one.kind == "process" and int(one.name) not in stubborn]
    for one in sorted((one for one in left if one.kind != "process"), key=lambda one: one.kind == "folder"):
        try:
            if one.kind != "folder":
                await _remove(one)
            elif not await asyncio.to_thread(os.path.lexists, one.name):
                continue  # somebody else removed it, before the lock was ours
            else:
                await asyncio.to_thread(remove_tree, Path(one.name))
        except (SandboxError, OSError) as error:
            problems.append(f"{one.kind} {one.name}: {error}")
        else:
            removed.append(one)
    return removed


async def _remove(left: Left) -> None:
    """The backend that knows it removes it; the others do nothing."""
    for backend in registered().values():
        if await backend.unavailable() is None:
            await backend.remove(left)
