"""What a node does now and then for its disk: it goes on, whatever one round of it runs into."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_world import World, until

from polar.rollout.node import node as module
from polar.rollout.node.artifacts import Artifacts
from polar.testing.runtime import FakeRuntime

Build = Callable[..., World]


async def test_a_round_that_fails_is_not_the_last(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOUSEKEEPING_S", 0.01)
    async with world().node() as node:
        rounds: list[str] = []

        def expire(**given: Any) -> int:
            rounds.append("expire")
            raise PermissionError("somebody else's folder")

        async def tidy() -> None:
            rounds.append("tidy")
            raise RuntimeError("a backend of somebody's own")

        with monkeypatch.context() as patch:
            patch.setattr(node.artifacts, "expire", expire)
            patch.setattr(node.sandboxes, "tidy", tidy)
            await until(lambda: rounds.count("expire") > 1 and rounds.count("tidy") > 1)


async def test_a_backend_that_comes_after_the_node_is_told(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon may start later than the node does: the service gives it such sessions then, without a restart."""
    monkeypatch.setattr(module, "HOUSEKEEPING_S", 0.01)
    missing: list[str] = ["there is no daemon yet"]

    async def unavailable(cls: type[FakeRuntime]) -> str | None:
        return missing[0] if missing else None

    monkeypatch.setattr(FakeRuntime, "unavailable", classmethod(unavailable))
    async with world().node() as node:
        assert "fake" not in node.metrics().model_dump()["backends"]
        missing.clear()
        await until(lambda: "fake" in node.metrics().model_dump()["backends"])


def test_files_that_go_while_they_are_counted_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artefacts of one machine's nodes lie in one folder, and each counts those of the others while these write."""
    store = Artifacts(tmp_path)
    (store.make("s", 0) / "log").write_bytes(b"12345")
    (tmp_path / "t").mkdir()
    walk, scan = os.walk, os.scandir

    def scanned(path: Any) -> Any:
        if str(path).endswith("/t"):
            raise FileNotFoundError(path)
        return scan(path)

    def walked(folder: Path, **given: Any) -> Any:
        return ((base, folders, [*names, "gone"]) for base, folders, names in walk(folder, **given))

    monkeypatch.setattr(os, "walk", walked)
    monkeypatch.setattr(os, "scandir", scanned)
    assert [(one.path, one.size) for one in store.files("s", 0)] == [("log", 5)]
    assert store.expire(days=30, gigabytes=1) == 0
    assert store.expire(days=30, gigabytes=1e-9) == 1
