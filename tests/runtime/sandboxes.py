"""Real sandboxes for tests of every backend. A backend joins by a line in `SPECS`; `local` runs twice, with namespaces and without."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polar.runtime import Owner, Place, Runtime, RuntimeSpec, backend_of, create, machine

SPECS: dict[str, dict[str, Any]] = {
    "local": {"backend": "local"},
    "plain": {"backend": "local"},
    "bubblewrap": {"backend": "bubblewrap"},
    "docker": {"backend": "docker"},
}
"""What a test's spec begins with, by the name that tests are told. `plain` is `local` on a machine that allows no namespaces."""


class Sandboxes:
    """Makes started sandboxes of one backend; the fixture stops and removes them all."""

    def __init__(self, name: str, owner: Owner) -> None:
        self.name = name
        self.owner = owner
        self.made: list[Runtime] = []

    async def make(
        self,
        gateway: tuple[str, int] | None = None,
        task_folder: Path | None = None,
        hidden: tuple[Path, ...] = (),
        **spec: Any,
    ) -> Runtime:
        wanted = RuntimeSpec(**{**SPECS[self.name], **spec})
        sandbox_id = f"test-{secrets.token_hex(4)}"
        place = Place(sandbox_id, self.owner.id, self.owner.sandbox(sandbox_id), gateway, task_folder, hidden)
        runtime = create(wanted, place)
        self.made.append(runtime)
        await runtime.start()
        return runtime


@asynccontextmanager
async def sandboxes_of(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandboxes]:
    if name == "plain":
        monkeypatch.setattr(machine, "namespaces", lambda: "a test says so")
    problem = await backend_of(RuntimeSpec(**SPECS[name])).unavailable()
    if problem is not None:
        pytest.skip(problem)
    owner = Owner.open(root)
    sandboxes = Sandboxes(name, owner)
    async with AsyncExitStack() as stack:
        stack.callback(owner.close)
        yield sandboxes
        await asyncio.gather(*(one.stop() for one in sandboxes.made))


async def soon(true: Callable[[], bool], within_s: float = 10.0) -> None:
    """Waits until it is so; fails the test otherwise."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - it is the machine that is waited for
            await asyncio.sleep(0.02)
