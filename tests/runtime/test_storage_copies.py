"""A sandbox that has used up its storage: its programs are ended, copies out of it are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.runtime import Owner, Place, RuntimeSpec, create, kept


async def test_a_copy_out_of_a_full_sandbox_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent left must not be graded today and be refused tomorrow."""
    monkeypatch.setattr(kept, "_STORAGE_LOOK_S", 0.001)
    owner = Owner.open(tmp_path / "owner")
    spec = RuntimeSpec(backend="local", network="none", storage_mb=16)
    runtime = create(spec, Place("box", owner.id, owner.sandbox("box")))
    async with runtime:
        ended = await runtime.exec("while :; do head -c 1000000 /dev/zero >> big || exit 3; done", timeout_s=60)
        assert (ended.exit_code, ended.timed_out) == (137, False)
        for number in range(5):
            await runtime.download("big", tmp_path / f"copy-{number}")
            assert (tmp_path / f"copy-{number}").stat().st_size > 16 << 20
        assert (await runtime.exec("sleep 600", timeout_s=60)).exit_code == 137
    owner.close()
