"""`harbor` and `command` in real sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluator_lab import Lab, work

from polar.errors import ConfigError, EvaluatorError
from polar.evaluator import make

TEST = """\
#!/bin/sh
# The folder's file must say what the tests, which lie beside this script, expect.
here=$(cd "$(dirname "$0")" && pwd)
if [ "$(cat answer.txt 2> /dev/null)" = "$(cat "$here/expected.txt")" ]; then reward=1; else reward=0; fi
echo "reward $reward"
echo "$reward" > "$VERIFIER_LOGS/reward.txt"
"""


@pytest.fixture
def tests(task_folder: Path) -> Path:
    folder = task_folder / "tests"
    folder.mkdir()
    (folder / "test.sh").write_text(TEST)
    (folder / "expected.txt").write_text("42\n")
    return folder


async def test_a_right_work_folder_gets_1_and_a_wrong_one_0(lab: Lab, tests: Path) -> None:
    async with lab.sandbox() as agent:
        evidence = lab.evidence(agent)
        assert (await make("harbor", {}).evaluate(evidence)).reward == 0
        await work(agent, "echo 42 > answer.txt")
        verdict = await make("harbor", {}).evaluate(evidence)
    assert verdict.reward == 1
    assert "reward 1" in (evidence.folder / "verifier.log").read_text()
    assert (evidence.folder / "reward.txt").read_text() == "1\n"


async def test_files_that_the_agent_removed_are_gone_in_the_fresh_sandbox(lab: Lab, template: Path, tests: Path) -> None:
    (template / "answer.txt").write_text("42\n")
    async with lab.sandbox() as agent:
        await work(agent, "rm answer.txt")
        assert (await make("harbor", {}).evaluate(lab.evidence(agent))).reward == 0


async def test_a_planted_reward_is_not_read(lab: Lab, tests: Path) -> None:
    (tests / "test.sh").write_text("exit 1\n")
    async with lab.sandbox() as agent:
        await work(agent, "mkdir -p ~/evaluator/logs/verifier && echo 1 > ~/evaluator/logs/verifier/reward.txt")
        with pytest.raises(EvaluatorError, match=r"left no reward.*exit code 1"):
            await make("harbor", {}).evaluate(lab.evidence(agent))
        with pytest.raises(EvaluatorError, match="left no reward"):
            await make("harbor", {"in_place": True}).evaluate(lab.evidence(agent))
        assert (await make("harbor", {"missing_reward": 0.0}).evaluate(lab.evidence(agent))).reward == 0


async def test_the_reward_file_decides_and_not_the_exit_code(lab: Lab, tests: Path) -> None:
    (tests / "test.sh").write_text('echo 0.25 > "$VERIFIER_LOGS/reward.txt"; exit 3\n')
    async with lab.sandbox() as agent:
        verdict = await make("harbor", {}).evaluate(lab.evidence(agent))
    assert (verdict.reward, verdict.report["exit_code"]) == (0.25, 3)


@pytest.mark.parametrize(
    ("content", "config", "reward"),
    [
        ('{"reward": 0.5, "style": 1}', {}, 0.5),
        ('{"only": 0.75}', {}, 0.75),
        ('{"a": 1, "b": 0}', {"weights": {"a": 3, "b": 1}}, 0.75),
        ("7", {}, 1.0),
        ("-7", {}, 0.0),
    ],
)
async def test_named_scores(lab: Lab, tests: Path, content: str, config: dict[str, Any], reward: float) -> None:
    (tests / "test.sh").write_text(f"echo '{content}' > \"$VERIFIER_LOGS/reward.json\"\n")
    async with lab.sandbox() as agent:
        assert (await make("harbor", config).evaluate(lab.evidence(agent))).reward == reward


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nan",
        "inf",
        "no number",
        "[1]",
        '{"a": 1, "b": 0}',
        "{",
        '{"reward": null, "n": 9}',
        '{"reward": "0", "n": 9}',
        f'{{"n": {10**400}}}',
    ],
)
async def test_a_reward_that_cannot_be_read_is_an_error_and_no_zero(lab: Lab, tests: Path, content: str) -> None:
    (tests / "test.sh").write_text(f"echo '{content}' > \"$VERIFIER_LOGS/reward.json\"\n")
    async with lab.sandbox() as agent:
        with pytest.raises(EvaluatorError, match=r"reward\.json"):
            await make("harbor", {}).evaluate(lab.evidence(agent))


async def test_links_in_a_circle_cost_nobody_the_work(lab: Lab, tests: Path) -> None:
    (tests / "test.sh").write_text('grep -qx 42 answer.txt && test "$(cat near)" = 42 && echo 1 > "$VERIFIER_LOGS/reward.txt"\n')
    async with lab.sandbox() as agent:
        await work(agent, "echo 42 > answer.txt; ln -s answer.txt near; ln -s loop loop; mkdir d; ln -s ../d/b d/a; ln -s a d/b; ln -s / r")
        verdict = await make("harbor", {}).evaluate(lab.evidence(agent))
    assert verdict.reward == 1
    assert verdict.report["carried"]["links_not_carried"] == ["d/a", "d/b", "loop", "r"]


async def test_a_link_to_the_hidden_expectation_is_not_carried(lab: Lab, tests: Path) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "ln -s /tests/expected.txt answer.txt; ln -s / root; ln -s root/tests/expected.txt other; mkfifo pipe")
        await work(agent, "mkdir -p bin && ln -s /bin/sh bin/sh && ln -s sh bin/same")
        verdict = await make("harbor", {"test_command": 'ls -l . bin; bin/same "$VERIFIER_TESTS/test.sh"'}).evaluate(lab.evidence(agent))
    assert verdict.reward == 0
    assert {"answer.txt", "root"} <= set(verdict.report["carried"]["links_not_carried"])
    assert "reward 0" in verdict.report["output_end"]


async def test_a_setuid_file_loses_its_bits_and_the_work_is_graded(lab: Lab, tests: Path) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "echo 42 > answer.txt; mkdir bin; cp /bin/true bin/one; chmod 4755 bin/one; cp /bin/true two; chmod 2755 two")
        await work(agent, "ln -s / root; mkdir shared; chmod 2775 shared")
        verdict = await make("harbor", {}).evaluate(lab.evidence(agent))
    assert verdict.reward == 1
    assert verdict.report["carried"]["setuid_dropped"] == ["bin/one", "two"]


async def test_modules_that_are_called_as_pythons_own_are_carried_and_noted(lab: Lab, tests: Path) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "echo 42 > answer.txt; touch json.py mine.py json.txt; mkdir email calendar; touch calendar/__init__.py")
        verdict = await make("harbor", {}).evaluate(lab.evidence(agent))
    assert verdict.reward == 1
    assert verdict.report["carried"]["named_as_pythons_own"] == ["calendar", "json.py"]


async def test_tests_that_never_end_are_the_policys_zero(lab: Lab, tests: Path) -> None:
    (tests / "test.sh").write_text("sh ./answer.txt\n")
    async with lab.sandbox() as agent:
        await work(agent, "echo 'while :; do :; done' > answer.txt")
        verdict = await make("harbor", {"timeout_seconds": 1}).evaluate(lab.evidence(agent))
        assert (verdict.reward, verdict.report["timed_out"]) == (0, True)


async def test_the_tests_come_only_after_the_agent(lab: Lab, tests: Path) -> None:
    async with lab.sandbox() as agent:
        found = await agent.exec("find / -name expected.txt -not -path '/proc/*' 2> /dev/null | xargs -r cat")
        assert b"42" not in found.stdout


async def test_a_separate_verifier_gets_the_declared_artifacts_only(lab: Lab, tests: Path) -> None:
    (tests / "test.sh").write_text('[ -f answer.txt ] && [ ! -e secret ] && [ ! -e out/x.pyc ] && echo 1 > "$VERIFIER_LOGS/reward.txt"\n')
    config = {"verifier_runtime": {"workdir": "/workspace"}, "artifacts": ["answer.txt", {"source": "out", "exclude": ["*.pyc"]}]}
    async with lab.sandbox() as agent:
        await work(agent, "echo 42 > answer.txt; touch secret; mkdir out; touch out/x.pyc out/y")
        evaluator = make("harbor", config)
        assert not evaluator.needs_fresh
        verdict = await evaluator.evaluate(lab.evidence(agent, other=lambda changes: lab.sandbox(**changes)))
        assert verdict.reward == 1
        assert verdict.report["artifacts"] == ["answer.txt", "out"]
        with pytest.raises(EvaluatorError, match="cannot make a sandbox that differs"):
            await evaluator.evaluate(lab.evidence(agent))


async def test_a_command_judges_by_its_exit_code_or_its_reward(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "echo 42 > answer.txt")
        evidence = lab.evidence(agent)
        assert (await make("command", {"command": "grep -q 42 answer.txt"}).evaluate(evidence)).reward == 1
        assert (await make("command", {"command": "grep -q 43 answer.txt"}).evaluate(evidence)).reward == 0
        assert (await make("command", {"command": "echo 3 > $VERIFIER_LOGS/reward.txt; false"}).evaluate(evidence)).reward == 3
        assert (await make("command", {"command": "test ! -e answer.txt", "carry": "none"}).evaluate(evidence)).reward == 1
        assert (await make("command", {"command": "grep -q $WANTED answer.txt"}, {"WANTED": "42"}).evaluate(evidence)).reward == 1


async def test_a_command_in_place_sees_the_agents_own_sandbox(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "echo here > ~/state")
        evaluator = make("command", {"command": "grep -q here ~/state", "in_place": True})
        assert not evaluator.needs_fresh
        assert (await evaluator.evaluate(lab.evidence(agent))).reward == 1
        fresh = make("command", {"command": "grep -q here ~/state"})
        assert (await fresh.evaluate(lab.evidence(agent))).reward == 0


async def test_a_command_with_a_patch(lab: Lab, repository: Path) -> None:
    patch = b"diff --git a/new.txt b/new.txt\nnew file mode 100644\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+42\n"
    config = {"command": "grep -q 42 new.txt", "carry": "patch"}
    assert (await make("command", config).evaluate(lab.evidence(None, patch=patch))).reward == 1
    bad = patch.replace(b"new.txt", b"../new.txt")
    assert (await make("command", config).evaluate(lab.evidence(None, patch=bad))).reward == 0
    with pytest.raises(EvaluatorError, match="no patch"):
        await make("command", config).evaluate(lab.evidence(None))


async def test_without_the_agents_sandbox_there_is_no_verdict(lab: Lab) -> None:
    with pytest.raises(EvaluatorError, match="sandbox is gone"):
        await make("command", {"command": "true"}).evaluate(lab.evidence(None))
    with pytest.raises(EvaluatorError, match="sandbox is gone"):
        await make("command", {"command": "true", "in_place": True}).evaluate(lab.evidence(None))


async def test_no_time_left_is_no_zero(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        evidence = lab.evidence(agent, timeout_s=0.001)
        with pytest.raises(EvaluatorError, match=r"used up|took too long"):
            await make("command", {"command": "true"}).evaluate(evidence)


def test_wrong_settings_are_told_at_submission() -> None:
    for name, config, said in [
        ("harbor", {"in_place": True, "verifier_runtime": {"image": "x"}}, "choose one"),
        ("harbor", {"weights": {"a": 0}}, "not all 0"),
        ("harbor", {"test_dir": "tests"}, "test_dir"),
        ("command", {}, "command"),
        ("nothing", {}, "no evaluator is called"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make(name, config)
