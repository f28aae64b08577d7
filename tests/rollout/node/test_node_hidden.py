"""What a sandbox that sees this machine's files does not see of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.rollout.config import NodeConfig
from polar.rollout.node.hidden import BUNDLED_TASKS, hidden_places
from polar.rollout.node.sandboxes import Sandboxes
from polar.runtime import Owner, RuntimeSpec, named


def test_states_stores_and_artefacts_are_hidden_a_home_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "state"))
    config = NodeConfig(id="n", work_dir=str(tmp_path / "work"), artifacts_dir=str(tmp_path / "artefacts"))
    hidden = hidden_places(config, str(tmp_path / "data" / "polar.db"))
    assert {tmp_path / name for name in ("state", "work", "artefacts", "data")} <= set(hidden)
    assert set(BUNDLED_TASKS) <= set(hidden)
    assert Path.home() not in hidden_places(config, str(Path.home() / "polar.db"))
    assert hidden_places(config, "postgresql://polar@127.0.0.1/polar")


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
async def test_nothing_of_the_bundled_tasks_or_the_tasks_own_folder_is_seen_inside(backend: str, tmp_path: Path) -> None:
    if await named(backend).unavailable() is not None:
        pytest.skip(f"{backend} is not usable here")
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "tests" / "secret").write_text("42")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
        if folder.name == "tmp":
            break
    owner = Owner.open(tmp_path / "owners")
    sandboxes = Sandboxes(owner, gateway=None, hidden=BUNDLED_TASKS)
    try:
        runtime = await sandboxes.make(RuntimeSpec(backend=backend, network="none"), "s", task_folder=task)
        looked = await runtime.exec(f"find {task} {' '.join(map(str, BUNDLED_TASKS))} -type f 2>/dev/null | head")
        assert looked.text == ""
        await sandboxes.remove(runtime)
    finally:
        await sandboxes.aclose()
        owner.close()
