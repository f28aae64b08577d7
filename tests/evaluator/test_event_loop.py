"""What an agent left may be large in every way: reading it keeps no other session of the node waiting, nor the node's heartbeats."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from evaluator_lab import PYTEST, PYTHON, Lab, patch_of, work

from polar.errors import EvaluatorError
from polar.evaluator import guards, make, patches, test_map

FIX = "sed -i '/def sub/,$s/a + b/a - b/' calc.py"
CONFIG: dict[str, Any] = {
    "test_command": f"{PYTEST} tests",
    "PASS_TO_PASS": ["tests/test_calc.py::test_add"],
}


class Watched:
    """Which of the functions that read what an agent left ran beside the event loop, and which in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beside: set[str] = set()
        self.inside: set[str] = set()
        self._monkeypatch = monkeypatch

    def watch(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            (self.inside if threading.current_thread() is threading.main_thread() else self.beside).add(name)
            return real(*given, **named)

        self._monkeypatch.setattr(owner, name, watched)


async def test_a_patch_and_the_output_of_tests_are_read_beside_the_event_loop(
    lab: Lab, repository: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    for owner, name in ((patches, "filtered"), (test_map, "parse"), (guards, "guarded"), (guards, "_same")):
        watched.watch(owner, name)
    async with lab.sandbox() as agent:
        await work(agent, f"{FIX}; printf '[tool.x]\\n' > pyproject.toml")
        verdict = await make("test_map", CONFIG).evaluate(lab.evidence(agent, patch=await patch_of(agent)))
    assert verdict.reward == 1, verdict.report
    assert watched.beside == {"filtered", "parse", "guarded", "_same"}
    assert watched.inside <= {"guarded"}  # of the few files that differ


async def test_a_junit_file_is_read_beside_the_event_loop(lab: Lab, repository: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.watch(test_map, "junit")
    config = {**CONFIG, "test_command": f"{PYTEST} --junitxml=out.xml tests", "parser": "junit", "junit_path": "out.xml"}
    async with lab.sandbox() as agent:
        verdict = await make("test_map", config).evaluate(lab.evidence(agent, patch=b""))
    assert verdict.reward == 1, verdict.report
    assert (watched.beside, watched.inside) == ({"junit"}, set())


async def test_the_copy_of_a_work_folder_is_removed_beside_the_event_loop(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.watch(shutil, "rmtree")
    async with lab.sandbox() as agent:
        evidence = lab.evidence(agent)
        assert (await make("command", {"command": f"{PYTHON} --version"}).evaluate(evidence)).reward == 1
    assert (watched.beside, watched.inside) == ({"rmtree"}, set())
    assert not (evidence.folder / "work").exists()


async def test_a_carried_patch_is_read_beside_the_event_loop(lab: Lab, repository: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.watch(patches, "filtered")
    async with lab.sandbox() as agent:
        await work(agent, FIX)
        config = {"command": f"{PYTHON} -c 'import calc; assert calc.sub(3, 2) == 1'", "carry": "patch"}
        verdict = await make("command", config).evaluate(lab.evidence(agent, patch=await patch_of(agent)))
    assert verdict.reward == 1, verdict.report
    assert (watched.beside, watched.inside) == ({"filtered"}, set())


async def test_a_function_that_hangs_takes_no_thread_that_others_share(lab: Lab) -> None:
    """It stays for as long as its process does; a few of them would have stopped all that the node does in threads."""
    code = "import threading\nended = threading.Event()\ndef hangs(evidence):\n    ended.wait(600)\n    return 1\n"
    (lab.task_folder / "grade.py").write_text(code)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    evaluator = make("python", {"function": "grade.py:hangs", "timeout_seconds": 0.2})
    with pytest.raises(EvaluatorError, match="did not return"):
        await evaluator.evaluate(lab.evidence(None))
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(lambda: "done") == "done"
    next(module for name, module in sys.modules.items() if name.startswith("polar_task_") and hasattr(module, "ended")).ended.set()
