"""The names of what an agent left may be millions: they are read beside the event loop, which a node's heartbeats need."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from polar.harness import patch
from polar.harness.patch import WorkFolder
from polar.runtime import Owner, Place, RuntimeSpec, create


async def test_names_are_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[bool]] = {"_split": set(), "_joined": set()}

    def watch(name: str) -> None:
        real = getattr(patch, name)

        def watched(given: Any) -> Any:
            threads[name].add(threading.current_thread() is threading.main_thread())
            return real(given)

        monkeypatch.setattr(patch, name, watched)

    watch("_split")
    watch("_joined")
    owner = Owner.open(tmp_path / "owner")
    runtime = create(RuntimeSpec(backend="local", network="none"), Place("box", owner.id, owner.sandbox("box")))
    async with runtime:
        work = WorkFolder(runtime, f"{runtime.home}/start.git")
        assert await work.record() is None
        await runtime.exec("echo one > a.txt")
        found, warnings = await work.patch(tmp_path / "patch.diff")
    owner.close()
    assert found is not None
    assert b"+one" in found
    assert warnings == []
    assert threads == {"_split": {False}, "_joined": {False}}
