"""Attempts from dispatch to result, for every way they can end (law 5), with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from node_world import TestVerdict, World, dispatch, ended, result_of, until

from polar.errors import EngineUnavailable, StoreError
from polar.evaluator import Verdict
from polar.rollout.ending import dumped
from polar.rollout.models import SessionResult
from polar.rollout.node import sandboxes
from polar.runtime.container_exec import even_if_cancelled
from polar.testing.engine import Call, Reply
from polar.testing.runtime import FakeRuntime
from polar.trajectory import Trajectory

Build = Callable[..., World]


async def test_a_graded_attempt_has_rows_with_its_reward(world: Build) -> None:
    build = world()
    async with build.node() as node:
        request = dispatch("call 2\nprint done", evaluator={"strategy": "node_test", "config": {"reward": 0.75}}, metadata={"x": 1})
        result = await result_of(node, request)
    assert (result.status, result.outcome, result.reward, result.error_code) == ("COMPLETED", "graded", 0.75, None)
    assert (result.turns, result.exit_code, result.answer, result.delivery_id) == (2, 0, "done", "ses_1.0")
    assert result.metrics == {"passed": 2.0}
    assert result.metadata["x"] == 1
    assert result.metadata["run"]["evaluation"] == {"said": "well done"}
    assert result.trajectory is not None
    trajectory = Trajectory.from_json(result.trajectory)
    assert trajectory.status == "COMPLETED"
    assert {trace.reward for trace in trajectory.traces} == {0.75}
    assert trajectory.in_rows + trajectory.ledger.tokens == trajectory.sampled == result.sampled_tokens > 0
    assert build.left() == []


async def test_samples_of_a_task_that_names_its_rollout_are_rollouts_of_their_own(world: Build) -> None:
    """One name in a task's metadata (slime's `rollout_id` counts steps) made one rollout of a whole group in its baseline."""
    async with world().node() as node:
        requests = [dispatch("call", f"ses_{sample}", sample=sample, metadata={"rollout_id": 7}) for sample in range(2)]
        results = [await result_of(node, request) for request in requests]
    rows = [row["metadata"] for result in results for row in (result.trajectory or {})["traces"]]
    assert [row["rollout_id"] for row in rows] == ["7", "7/1"]
    assert [result.metadata["rollout_id"] for result in results] == [7, 7]


async def test_timings_are_told(world: Build) -> None:
    async with world().node() as node:
        timing = (await result_of(node, dispatch("sleep 0.1\ncall"))).timing
    assert timing.run_ms > 90
    assert timing.first_call_ms is not None
    assert 90 < timing.first_call_ms <= timing.run_ms
    assert min(timing.init_ms, timing.postrun_ms, timing.build_ms, timing.evaluate_ms, timing.teardown_ms) > 0


@pytest.mark.parametrize(
    ("decision", "reward"),
    [("grade", 1.0), ("exclude", None), (-0.5, -0.5), (0.0, 0.0)],
)
async def test_what_the_policy_broke_is_treated_as_the_task_says(world: Build, decision: Any, reward: float | None) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("call\nexit 1", on_policy_failure=decision))
    assert (result.status, result.outcome, result.error_code, result.reward) == ("COMPLETED", "policy", "harness_exit", reward)
    assert len(TestVerdict.seen) == (decision == "grade")
    assert {row["reward"] for row in result.trajectory["traces"]} == {reward}


async def test_when_its_time_is_over_the_rows_are_built_and_judged(world: Build) -> None:
    build = world()
    async with build.node() as node:
        result = await result_of(node, dispatch("call 2\nsleep 60", remaining_timeout_seconds=5.0))
    assert (result.status, result.outcome, result.error_code, result.reward) == ("TIMEOUT", "policy", "agent_timeout", 1.0)
    assert result.turns == 2
    assert result.trajectory["status"] == "TIMEOUT"
    assert len(result.trajectory["traces"]) >= 1
    assert TestVerdict.seen[0].timed_out
    assert build.left() == []


async def test_a_budget_of_turns_is_the_policys(world: Build) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("call 5", budget={"max_turns": 2}))
    assert (result.outcome, result.error_code, result.turns, result.reward) == ("policy", "max_turns", 2, 1.0)
    assert result.metadata["run"]["refused_calls"] == {"budget": 1}


def dies_after(calls: int) -> Callable[[Call], Reply | str]:
    return lambda call: "Hi." if call.number < calls else Reply(error=EngineUnavailable("gone"))


@pytest.mark.parametrize("instruction", ["call 3", "call 2\nswallow"])
async def test_an_engine_that_dies_in_the_run_is_infrastructure_and_no_zero(world: Build, instruction: str) -> None:
    async with world(dies_after(2)).node() as node:
        result = await result_of(node, dispatch(instruction))
    assert (result.status, result.outcome, result.error_code, result.reward) == ("ERROR", "infrastructure", "engine", None)
    assert result.turns == 2
    assert {row["reward"] for row in result.trajectory["traces"]} == {None}
    assert TestVerdict.seen == []


async def test_an_engine_that_stalls_is_infrastructure(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses nothing: the agent's time ends while a call waits. Asked, it does not answer."""
    monkeypatch.setattr("polar.rollout.node.capture.ENGINE_ANSWERS_S", 0.1)
    stalled = asyncio.Event()

    def script(call: Call) -> Reply | str:
        if call.number == 0:
            return "Hi."
        stalled.set()
        return Reply("late", delay_s=60)

    build = world(script)
    async with build.node() as node:
        assert build.engine is not None
        answers = build.engine.info

        async def info() -> Any:
            if stalled.is_set():
                await asyncio.sleep(60)
            return await answers()

        build.engine.info = info  # type: ignore[method-assign]
        result = await result_of(node, dispatch("call 2", remaining_timeout_seconds=5.0))
    assert (result.status, result.outcome, result.error_code, result.turns) == ("ERROR", "infrastructure", "engine", 1)


async def test_an_engine_that_is_slow_is_the_policys_time(world: Build) -> None:
    def script(call: Call) -> Reply | str:
        return "Hi." if call.number == 0 else Reply("late", delay_s=60)

    async with world(script).node() as node:
        result = await result_of(node, dispatch("call 2", remaining_timeout_seconds=5.0))
    assert (result.status, result.outcome, result.error_code, result.turns) == ("TIMEOUT", "policy", "agent_timeout", 1)


async def test_an_engine_failure_that_the_harness_got_over_counts_for_nothing(world: Build) -> None:
    def script(call: Call) -> Reply | str:
        return Reply(error=EngineUnavailable("gone")) if call.number == 1 else "Hi."

    async with world(script).node() as node:
        result = await result_of(node, dispatch("call\nswallow\ncall"))
    assert (result.outcome, result.error_code, result.turns) == ("graded", None, 2)


async def test_a_store_that_takes_nothing_is_infrastructure(world: Build) -> None:
    build = world()
    async with build.node() as node:

        async def full(completions: Any) -> None:
            raise StoreError("No space left on device")

        node.gateway.store.append = full  # type: ignore[method-assign]
        result = await result_of(node, dispatch("call"))
    assert (result.outcome, result.error_code, result.reward) == ("infrastructure", "store", None)


@pytest.mark.parametrize("instruction", ["print nothing", "exit 7", "sleep 60"])
async def test_a_harness_without_any_call_is_infrastructure(world: Build, instruction: str) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch(instruction, remaining_timeout_seconds=0.5))
    assert (result.outcome, result.error_code, result.reward) == ("infrastructure", "harness_no_call", None)
    assert result.trajectory is None
    assert TestVerdict.seen == []


@pytest.mark.parametrize(("action", "code"), [("start", "sandbox"), ("exec", "sandbox"), ("upload", "sandbox"), ("download", "sandbox")])
async def test_a_sandbox_that_fails_is_infrastructure(world: Build, action: str, code: str) -> None:
    build = world()
    async with build.node() as node:
        request = dispatch("call", runtime={"backend": "fake", "kwargs": {"fail": {action: "broken"}}})
        result = await result_of(node, request)
    assert (result.status, result.outcome, result.error_code) == ("ERROR", "infrastructure", code)
    assert "planted: broken" in (result.error or "")
    assert build.left() == []


async def test_a_sandbox_that_dies_in_the_run_keeps_its_rows_without_reward(world: Build) -> None:
    from node_world import agent

    from polar.errors import SandboxError
    from polar.testing.runtime import Command, FakeRuntime

    async def dies(command: Command) -> Any:
        answer = await agent(command)
        if "fake-agent" in command.line:
            raise SandboxError("the container is gone")
        return answer

    build = world()
    async with build.node() as node:
        FakeRuntime.script = staticmethod(dies)
        result = await result_of(node, dispatch("call 2"))
    assert (result.outcome, result.error_code, result.turns, result.reward) == ("infrastructure", "sandbox", 2, None)
    assert result.trajectory is not None
    assert {row["reward"] for row in result.trajectory["traces"]} == {None}
    assert build.left() == []


async def test_an_engine_that_was_started_anew_is_no_failure_of_the_policys(world: Build) -> None:
    """It answers, and gets no calls: it has other weights than those that the session is of."""
    build = world()
    async with build.node() as node:
        assert build.engine is not None
        build.engine.policy_version = "7"
        await node.gateway.models.all[0].pool.note_versions()
        build.engine.policy_version = None  # what it says after a start
        result = await result_of(node, dispatch("exit 1"))
    assert (result.outcome, result.error_code, result.reward) == ("infrastructure", "engine", None)
    assert "started anew" in (result.error or "")


async def test_a_sandbox_that_cannot_be_removed_is_said_and_costs_nothing_else(world: Build) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("call", runtime={"backend": "fake", "kwargs": {"fail": {"stop": "stuck"}}}))
    assert result.outcome == "graded"
    assert any("could not be removed" in warning for warning in result.warnings)


async def test_a_sandbox_that_never_stops_holds_up_no_result(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt would run for ever, and its node would go on renewing its lease."""

    async def never(self: FakeRuntime) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sandboxes, "STOP_S", 0.05)
    async with world().node() as node:
        with monkeypatch.context() as patch:
            patch.setattr(FakeRuntime, "stop", never)
            result = await result_of(node, dispatch("call"))
    assert result.outcome == "graded"
    assert any("it has not stopped in 0.05 s" in warning for warning in result.warnings)


async def test_one_whose_stop_heeds_no_cancellation_holds_up_no_result_and_is_removed_in_the_end(
    world: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container daemon is asked to the end, whoever is cancelled meanwhile."""
    stopped = asyncio.Event()
    begun: list[str] = []

    async def to_the_end(self: FakeRuntime) -> None:
        begun.append(self.place.id)
        await even_if_cancelled(stopped.wait())

    monkeypatch.setattr(sandboxes, "STOP_S", 0.05)
    async with world().node() as node:
        with monkeypatch.context() as patch:
            patch.setattr(FakeRuntime, "stop", to_the_end)
            result = await result_of(node, dispatch("call"))
            await node.sandboxes.tidy()  # waits for the same stop, and begins no other
        assert len(begun) == len(set(begun)) > 0
        assert result.outcome == "graded"
        assert any("it has not stopped in 0.05 s" in warning for warning in result.warnings)
        stopped.set()
        await node.sandboxes.tidy()
        assert node.sandboxes.stuck == 0


async def test_a_prepare_step_that_fails_is_named(world: Build) -> None:
    async with world().node() as node:
        spec = {"backend": "fake", "prepare": [{"type": "exec", "command": "git clone somewhere"}]}
        result = await result_of(node, dispatch("call", runtime=spec))
    assert (result.outcome, result.error_code) == ("infrastructure", "sandbox")
    assert "git clone somewhere" in (result.error or "")


async def test_an_init_budget_of_its_own(world: Build) -> None:
    build = world()
    async with build.node() as node:
        spec = {"backend": "fake", "prepare": [{"type": "exec", "command": "fake-agent prepare"}]}

        request = dispatch("call", runtime=spec, budget={"init_seconds": 0.3})
        from node_world import agent

        from polar.testing.runtime import Command, FakeRuntime

        async def slow(command: Command) -> Any:
            if "prepare" in command.line:
                await asyncio.sleep(60)
            return await agent(command)

        FakeRuntime.script = staticmethod(slow)
        result = await result_of(node, request)
    assert (result.outcome, result.error_code) == ("infrastructure", "init_timeout")
    assert build.left() == []


@pytest.mark.parametrize(
    ("config", "budget", "code"),
    [({"fail": "no report"}, {}, "evaluator"), ({"rows": [1.0, 2.0, 3.0]}, {}, "evaluator")],
)
async def test_an_evaluator_that_cannot_judge_is_infrastructure(world: Build, config: Any, budget: Any, code: str) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("call", evaluator={"strategy": "node_test", "config": config}, budget=budget))
    assert (result.status, result.outcome, result.error_code, result.reward) == ("ERROR", "infrastructure", code, None)
    assert {row["reward"] for row in result.trajectory["traces"]} == {None}


async def test_an_evaluator_beyond_its_budget_is_infrastructure(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.rollout.node.grading.GRACE_S", 0.1)
    async with world(init_seconds=0.1).node() as node:
        evaluator = {"strategy": "node_test", "config": {"sleep_s": 60}}
        result = await result_of(node, dispatch("call", evaluator=evaluator, budget={"init_seconds": 5, "evaluation_seconds": 0.1}))
    assert (result.outcome, result.error_code) == ("infrastructure", "evaluator")


async def test_making_the_evaluators_sandbox_takes_nothing_of_its_budget(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from node_world import agent

    from polar.testing.runtime import Command, FakeRuntime

    monkeypatch.setattr("polar.rollout.node.grading.GRACE_S", 0.0)

    async def slow(command: Command) -> Any:
        if command.line == "slow":
            await asyncio.sleep(0.6)
        return await agent(command)

    async with world().node() as node:
        FakeRuntime.script = staticmethod(slow)
        spec = {"backend": "fake", "eval_prepare": [{"type": "exec", "command": "slow"}]}
        evaluator = {"strategy": "node_test", "config": {"fresh": 3}}
        result = await result_of(node, dispatch("call", runtime=spec, evaluator=evaluator, budget={"evaluation_seconds": 0.5}))
        assert (result.outcome, result.error) == ("graded", None)
        assert result.timing.evaluator_wait_ms > 1_500
        late = dispatch("call", attempt=1, runtime=spec, evaluator=evaluator, budget={"init_seconds": 0.3})
        result = await result_of(node, late)
    assert (result.outcome, result.error_code) == ("infrastructure", "sandbox")
    assert "evaluator's sandbox was not ready" in (result.error or "")


async def test_an_unknown_evaluator_is_refused_before_the_agent_works(world: Build) -> None:
    build = world()
    async with build.node() as node:
        result = await result_of(node, dispatch("call", evaluator={"strategy": "nonesuch"}))
    assert (result.outcome, result.error_code, result.turns) == ("infrastructure", "config", 0)
    assert build.calls == 0


async def test_without_an_evaluator_there_is_no_reward(world: Build) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("call", evaluator=None))
    assert (result.outcome, result.reward, result.usable) == ("graded", None, False)


async def test_rewards_by_row(world: Build) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("call", evaluator={"strategy": "node_test", "config": {"reward": 1, "rows": [0.25]}}))
    assert result.reward == 1
    assert [row["reward"] for row in result.trajectory["traces"]] == [0.25]


async def running(node: Any, session: str = "ses_1") -> Any:
    return await until(lambda: (found := node.books.find(session)) is not None and found.status == "RUNNING" and found.turns and found)


async def test_a_cancelled_attempt_is_nobodys_failure(world: Build) -> None:
    build = world()
    async with build.node() as node:
        request = dispatch("call\nsleep 60")
        await node.dispatch(request)
        node.cancel(await running(node))
        result = await ended(node, request)
        record = await node.gateway.store.session("ses_1.0")
    assert (result.status, result.outcome, result.error_code, result.reward) == ("ERROR", "cancelled", "cancelled", None)
    assert record is not None
    assert record.closed is not None
    assert build.left() == []


async def test_cancelling_before_it_began(world: Build) -> None:
    build = world(max_init_workers=1, max_run_workers=1)
    async with build.node() as node:
        first, second = dispatch("call\nsleep 0.5"), dispatch("call", "ses_2")
        await node.dispatch(first)
        waiting = await node.dispatch(second)
        node.cancel(waiting)
        assert (await ended(node, second)).outcome == "cancelled"
        assert (await ended(node, first)).outcome == "graded"


async def test_late_calls_are_refused(world: Build) -> None:
    """The session is closed before its completions are read: what comes later could be in no row."""
    import aiohttp
    from node_world import call

    keys: list[dict[str, str]] = []
    async with world().node() as node:
        request = dispatch("call")
        attempt = await node.dispatch(request)
        await until(lambda: attempt.capture is not None)
        assert attempt.capture is not None
        keys.append({"OPENAI_API_KEY": attempt.capture.key, "OPENAI_BASE_URL": node.gateway.base_url(attempt.capture.key) + "/v1"})
        await ended(node, request)
        async with aiohttp.ClientSession() as http:
            assert await call(http, keys[0]) == 410


async def test_a_silent_harness_is_said(world: Build) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch("sleep 0.6\ncall", budget={"first_call_seconds": 0.2}))
    assert result.outcome == "graded"
    assert any("no model call" in warning for warning in result.warnings)


async def test_the_key_is_in_no_artefact(world: Build) -> None:
    build = world()
    async with build.node() as node:
        request = dispatch("call\nsteal")
        attempt = await node.dispatch(request)
        await until(lambda: attempt.capture is not None)
        assert attempt.capture is not None
        key = attempt.capture.key
        result = await ended(node, request)
    assert "key " in (result.answer or "")
    for path in (build.folder / "artifacts").rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path
    assert key not in result.model_dump_json()


def test_results_are_the_references_json() -> None:
    """The fields that its clients read are there, under its names."""
    fields = SessionResult.model_fields
    assert {"session_id", "task_id", "status", "trajectory", "timing", "node_id", "error", "metadata"} <= set(fields)


async def test_what_takes_too_long_to_read_is_judged_without(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent can leave as much as it likes; as an infrastructure failure that would earn it another try."""
    monkeypatch.setattr("polar.rollout.node.attempt.COLLECT_S", 0.0)
    build = world()
    async with build.node() as node:
        result = await result_of(node, dispatch("call"))
    assert (result.outcome, result.error_code, result.reward) == ("graded", None, 1.0)
    assert "could not be read" in (TestVerdict.seen[0].patch_refused or "")
    assert any("could not be read" in warning for warning in result.warnings)
    assert build.left() == []


@pytest.mark.parametrize("said", ["\udcff/conftest.py", 1 << 80, {"a": [{"\ud800": "x"}]}])
async def test_a_report_that_not_every_reader_takes_is_delivered_all_the_same(
    world: Build, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    """A file name that is no text is in the evaluator's report as the half of a surrogate pair."""

    async def evaluate(self: TestVerdict, evidence: Any) -> Verdict:
        return Verdict(0.5, report={"undone": [said]})

    monkeypatch.setattr(TestVerdict, "evaluate", evaluate)
    build = world()
    async with build.node() as node:
        result = await result_of(node, dispatch("call"))
    assert (result.outcome, result.reward) == ("graded", 0.5)
    assert orjson.loads(dumped(result))["reward"] == 0.5
    assert build.left() == []
