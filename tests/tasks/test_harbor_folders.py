"""Harbor folders: the instruction, who judges, what must stay hidden."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_folders import MakeTask

from polar.errors import ConfigError
from polar.runtime.spec import RuntimeSpec
from polar.tasks import load, load_all

MANIFEST = "[verifier]\ntimeout_sec = 30.0\n"


def test_its_tests_judge_in_a_fresh_sandbox(make_task: MakeTask) -> None:
    evaluator = load(make_task()).evaluator
    assert (evaluator.strategy, evaluator.config) == ("harbor", {"timeout_seconds": 30.0})


def test_shared_mode_grades_in_the_agents_sandbox(make_task: MakeTask) -> None:
    task = load(make_task(files={"task.toml": MANIFEST + 'environment_mode = "shared"\n'}))
    assert task.evaluator.config["in_place"] is True


def test_separate_mode_names_image_artifacts_and_hooks(make_task: MakeTask) -> None:
    text = 'artifacts = ["/app/out"]\n' + MANIFEST + 'environment_mode = "separate"\n[verifier.environment]\ndocker_image = "judge:1"\n'
    config = load(make_task(files={"task.toml": text + '[[verifier.collect]]\ncommand = "dump"\n'})).evaluator.config
    assert config["verifier_runtime"]["image"] == "judge:1"
    assert (config["artifacts"], config["collect"]) == (["/app/out"], ["dump"])


def test_separate_mode_builds_from_the_tests(make_task: MakeTask) -> None:
    folder = make_task(files={"task.toml": MANIFEST + 'environment_mode = "separate"\n', "tests/Dockerfile": "FROM x\n"})
    assert load(folder).evaluator.config["verifier_runtime"]["build_context"] == str((folder / "tests").resolve())


def test_the_verifiers_variables_come_from_this_environment(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load(make_task(files={"task.toml": MANIFEST + '[verifier.env]\nKEY = "${JUDGE_KEY}"\nMODE = "${JUDGE_MODE:-fast}"\n'}))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        _ = task.evaluator
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert task.evaluator.env == {"KEY": "k", "MODE": "fast"}


def test_a_canary_is_no_part_of_the_instruction(make_task: MakeTask) -> None:
    folder = make_task(files={"instruction.md": "<!-- benchmark canary GUID 1 -->\n# canary too\n# A title\n\nDo it.\n"})
    assert load(folder).instruction == "# A title\n\nDo it."


def test_byte_order_marks_are_no_part_of_a_task(make_task: MakeTask) -> None:
    folder = make_task(files={"instruction.md": "\ufeff<!-- canary -->\nDo it.\n"})
    manifest = folder / "task.toml"
    manifest.write_bytes(b"\xef\xbb\xbf" + manifest.read_bytes())
    assert load(folder).instruction == "Do it."


def test_several_steps_are_refused_by_name(make_task: MakeTask) -> None:
    folder = make_task(files={"tests/test.sh": None, "steps/one/instruction.md": "x"})
    with pytest.raises(ConfigError, match="several steps"):
        load(folder)


def test_tests_and_solution_are_hidden_but_what_is_public(make_task: MakeTask) -> None:
    folder = make_task(files={"tests/runner.py": "r", "task.toml": '[metadata.polar]\npublic = ["tests/runner.py"]\n'})
    assert sorted(load(folder).hidden()) == ["solution/solve.sh", "tests/test.sh"]


def test_the_request_knows_times_user_and_folder(make_task: MakeTask) -> None:
    folder = make_task(files={"task.toml": '[agent]\ntimeout_sec = 7.0\nuser = "dev"\n[verifier]\ntimeout_sec = 30.0\n'})
    fields = load(folder).fields(RuntimeSpec())
    assert fields["timeout_seconds"] == 7.0
    assert fields["budget"].evaluation_seconds == 150.0
    assert fields["runtime"].user == "dev"
    assert fields["task_folder"] == str(folder.resolve())


def test_grading_elsewhere_than_harbor_is_said(make_task: MakeTask) -> None:
    plain = load(make_task("plain"))
    other = load(make_task("other", files={"environment/Dockerfile": "FROM x\nRUN build\n"}))
    assert plain.warnings == ()
    assert "fresh" in other.warnings[0]


def test_all_below_a_folder_by_name(make_task: MakeTask, tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_task(name)
    assert [task.name for task in load_all(tmp_path / "tasks")] == ["a", "b"]
