"""`composition`, the frame of every evaluator, and specifications."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from evaluator_lab import Lab, work
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError, EvaluatorError, SandboxError
from polar.evaluator import Evaluator, Evidence, Verdict, from_spec, make
from polar.evaluator.base import NoConfig
from polar.evaluator.composition import combined
from polar.rollout.models import EvaluatorSpec


class Fixed(Evaluator[NoConfig]):
    """Gives the same verdict always, or raises."""

    name = "fixed"
    verdict: Verdict | Exception | SystemExit = Verdict(1.0)
    seen: ClassVar[list[str]] = []

    async def evaluate(self, evidence: Evidence) -> Verdict:
        self.seen.append(self.name)
        if isinstance(self.verdict, (Exception, SystemExit)):
            raise self.verdict
        return self.verdict


class Half(Fixed):
    name = "half"
    verdict = Verdict(0.5, metrics={"m": 3}, report={"said": "half"})


class Nothing(Fixed):
    name = "nothing"
    verdict = Verdict(0.0)


class Failing(Fixed):
    name = "failing"
    verdict = EvaluatorError("no verdict")


class Buggy(Fixed):
    name = "buggy"
    verdict = KeyError("x")


class Exiting(Fixed):
    name = "exiting"
    verdict = SystemExit(2)


class Boxless(Fixed):
    name = "boxless"
    verdict = SandboxError("the sandbox died")
    needs_fresh = False


def named(cls: type[Fixed]) -> str:
    return f"{__name__}:{cls.__name__}"


def part(cls: type[Fixed], **more: Any) -> dict[str, Any]:
    return {"strategy": named(cls), **more}


async def whole(lab: Lab, *parts: dict[str, Any], combine: str = "mean") -> Verdict:
    return await make("composition", {"parts": list(parts), "combine": combine}).evaluate(lab.evidence(None))


async def test_parts_are_joined_by_weight(lab: Lab) -> None:
    found = await whole(lab, part(Fixed, weight=3), part(Half, weight=1))
    assert found.reward == 0.875
    assert found.metrics == {"0-fixed.reward": 1, "1-half.reward": 0.5, "1-half.m": 3}
    assert [one["reward"] for one in found.report["parts"]] == [1, 0.5]
    assert found.report["parts"][1]["report"] == {"said": "half"}


@pytest.mark.parametrize(("how", "reward"), [("min", 0.5), ("max", 1), ("product", 0.5), ("weighted_sum", 0)])
async def test_other_ways_to_join(lab: Lab, how: str, reward: float) -> None:
    assert (await whole(lab, part(Fixed, weight=1), part(Half, weight=-2), combine=how)).reward == reward


async def test_a_required_part_with_nothing_ends_it(lab: Lab) -> None:
    Fixed.seen.clear()
    found = await whole(lab, part(Nothing, required=True), part(Half, weight=5))
    assert found.reward == 0
    assert found.report["skipped"] == ["1-half"]
    assert Fixed.seen == ["nothing"]


@pytest.mark.parametrize(("cls", "error"), [(Failing, EvaluatorError), (Boxless, SandboxError), (Buggy, EvaluatorError)])
async def test_an_error_of_a_part_is_one_of_the_whole(lab: Lab, cls: type[Fixed], error: type[Exception]) -> None:
    with pytest.raises(error):
        await whole(lab, part(Fixed), part(cls))


async def test_each_part_has_a_folder_and_a_report_of_its_own(lab: Lab) -> None:
    evidence = lab.evidence(None)
    spec = EvaluatorSpec(strategy="composition", config={"parts": [part(Fixed), part(Half)]})
    await from_spec(spec).evaluate(evidence)
    assert json.loads((evidence.folder / "report.json").read_text())["reward"] == 0.75
    assert json.loads((evidence.folder / "1-half" / "report.json").read_text())["report"] == {"said": "half"}


async def test_a_failure_is_reported_by_name(lab: Lab) -> None:
    evidence = lab.evidence(None)
    with pytest.raises(EvaluatorError, match="buggy failed: KeyError"):
        await from_spec(EvaluatorSpec(strategy=named(Buggy))).evaluate(evidence)
    said = json.loads((evidence.folder / "report.json").read_text())
    assert said["error_type"] == "EvaluatorError"
    assert "reward" not in said


async def test_an_evaluator_that_exits_ends_nothing_else(lab: Lab) -> None:
    with pytest.raises(EvaluatorError, match="exiting failed: SystemExit: 2"):
        await asyncio.create_task(from_spec(EvaluatorSpec(strategy=named(Exiting))).evaluate(lab.evidence(None)))


async def test_an_evaluator_that_never_ends_is_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def evaluate(self: Fixed, evidence: Evidence) -> Verdict:
        await asyncio.sleep(60)
        return Verdict(1.0)

    monkeypatch.setattr(Fixed, "evaluate", evaluate)
    monkeypatch.setattr("polar.evaluator.report.GRACE_S", 0.05)
    with pytest.raises(EvaluatorError, match="did not end in time"):
        await from_spec(EvaluatorSpec(strategy=named(Fixed))).evaluate(lab.evidence(None, timeout_s=0.05))


async def test_rewards_for_rows_that_are_not_there_are_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixed, "verdict", Verdict(1.0, row_rewards=(1.0, 2.0)))
    with pytest.raises(EvaluatorError, match="2 row rewards for 0 rows"):
        await from_spec(EvaluatorSpec(strategy=named(Fixed))).evaluate(lab.evidence(None))


async def test_without_a_fresh_sandbox_the_agents_own_is_graded(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "touch ~/mark")
        spec = EvaluatorSpec(strategy="command", config={"command": "test -e ~/mark"}, refresh_runtime=False)
        evaluator = from_spec(spec)
        assert not evaluator.needs_fresh
        assert (await evaluator.evaluate(lab.evidence(agent))).reward == 1
        assert (await from_spec(replace_fresh(spec)).evaluate(lab.evidence(agent))).reward == 0
        assert (await agent.exec("true")).ok


def replace_fresh(spec: EvaluatorSpec) -> EvaluatorSpec:
    return spec.model_copy(update={"refresh_runtime": True})


def test_what_needs_a_fresh_sandbox() -> None:
    assert from_spec(EvaluatorSpec(strategy="harbor")).needs_fresh
    assert not from_spec(EvaluatorSpec(strategy="answer", config={"expected": "x"})).needs_fresh
    parts = [{"strategy": "answer", "config": {"expected": "x"}}]
    assert not from_spec(EvaluatorSpec(strategy="composition", config={"parts": parts})).needs_fresh
    assert from_spec(EvaluatorSpec(strategy="composition", config={"parts": [*parts, {"strategy": "harbor"}]})).needs_fresh


@pytest.mark.parametrize(
    ("strategy", "config", "said"),
    [
        ("none", {}, "no evaluator is called"),
        ("no_module_x:Y", {}, "no_module_x"),
        ("math:pi", {}, "no subclass"),
        (named(Fixed), {"x": 1}, "evaluator fixed: x: there is no such setting"),
        ("harbour", {}, "no evaluator is called 'harbour'; is harbor meant; there are: "),
        ("command", {"comand": "true", "command": "true"}, r"comand: there is no such setting; is command meant\?"),
        ("harbor", {"artifacts": [{"source": "x", "destinaton": "y"}]}, r"destinaton: there is no such setting; is destination meant\?"),
        ("composition", {"parts": []}, "parts"),
        ("composition", {"parts": [{"strategy": "none"}]}, "no evaluator is called"),
        ("composition", {"parts": [{"strategy": "harbor", "weight": 0}]}, "not all 0"),
    ],
)
def test_wrong_specifications_are_told_at_submission(strategy: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_spec(EvaluatorSpec(strategy=strategy, config=config))


async def test_session_completed_is_the_references(lab: Lab) -> None:
    evidence = lab.evidence(None)
    evaluator = from_spec(EvaluatorSpec(strategy="session_completed"))
    assert (await evaluator.evaluate(evidence)).reward == 1
    for change in ({"timed_out": True}, {"problem": "exit code 1"}, {"exit_code": 1}):
        assert (await evaluator.evaluate(replace(evidence, **change))).reward == 0


REWARDS = st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=6)


@given(REWARDS)
def test_joined_rewards_stay_in_the_range_of_their_parts(parts: list[tuple[float, float]]) -> None:
    rewards, weights = [one for one, _ in parts], [weight for _, weight in parts]
    for how in ("mean", "min", "max"):
        assert min(rewards) - 1e-9 <= combined(how, rewards, weights) <= max(rewards) + 1e-9  # type: ignore[arg-type]
    assert 0 <= combined("product", rewards, weights) <= min(rewards) + 1e-9
    assert math.isclose(combined("weighted_sum", rewards, weights), combined("mean", rewards, weights) * sum(weights), abs_tol=1e-9)
