"""`polar export`, `polar rebuild`, `polar drift` and `polar trace validate`, from the command line to the file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from export_samples import TOKENIZER, Talk, fill, lines, solved
from typer.testing import CliRunner

from polar.chat import Message, Thinking
from polar.cli.commands import app
from polar.errors import ConfigError, PolarError
from polar.export import label_line
from polar.records import Break, Cause
from polar.trajectory.row import Trajectory
from polar.trajectory.validate import validate

Polar = Callable[..., Result]


@pytest.fixture
def polar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Polar:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, PolarError):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


def store_of(tmp_path: Path, *talks: Talk) -> Path:
    async def make() -> None:
        await (await fill(tmp_path / "polar.db", talks)).aclose()

    asyncio.run(make())
    return tmp_path / "polar.db"


def torn(name: str = "torn") -> Talk:
    """A session whose second call lost its thinking on the way."""
    talk = Talk(name, {"reward": 1.0, "task": "t", "harness": "codex"})
    talk.say([Message("system", "You are an agent."), Message("user", "go")], Message("assistant", "one", (Thinking("I think"),)))
    broken = Break(Cause.THINKING_STRIPPED, 0, len(talk.completions[0].prompt_ids), len(talk.completions[0].sampled_ids))
    talk.say([Message("user", "more")], Message("assistant", "two"), broken=True, parent=None).broken = broken
    return talk


# --- export ----------------------------------------------------------------------------------------------------------------


def test_export_writes_data_manifest_and_card_and_says_what_it_left_out(polar: Polar, tmp_path: Path) -> None:
    store = store_of(tmp_path, solved("a", reward=1.0), solved("b", created=2.0, reward=0.0))
    out = polar("export", tmp_path / "out", "--store", store, "--min-reward", 1, "--format", "jsonl", "--title", "My data").output
    assert "1 of 2 sessions taken" in out
    assert "left out 1 sessions: reward below the threshold" in out
    assert [row["session_id"] for row in lines(tmp_path / "out")] == ["a"]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["rows"]["written"] == 1
    assert "# My data" in (tmp_path / "out" / "README.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "data", "manifest.json"]


def test_export_takes_rewards_from_a_file(polar: Polar, tmp_path: Path) -> None:
    store = store_of(tmp_path, solved("a"))
    (tmp_path / "rewards.jsonl").write_bytes(label_line("a", reward=1.0))
    polar("export", tmp_path / "out", "--store", store, "--rewards", tmp_path / "rewards.jsonl", "--format", "jsonl")
    assert lines(tmp_path / "out")[0]["reward"] == 1.0


def test_export_splits(polar: Polar, tmp_path: Path) -> None:
    store = store_of(tmp_path, *(solved(f"s{i}", created=i, task=f"t{i}", reward=1.0) for i in range(4)))
    polar("export", tmp_path / "out", "--store", store, "--split", "test=0.25", "--split-by", "task", "--format", "jsonl")
    assert (len(lines(tmp_path / "out")), len(lines(tmp_path / "out", "test"))) == (3, 1)


def test_export_passes_builder_options(polar: Polar, tmp_path: Path) -> None:
    talk = solved("a", reward=1.0, harness="claude-code")
    talk.say([Message("system", "Make a title."), Message("user", "x")], Message("assistant", "A title"), after=None, tools=())
    store = store_of(tmp_path, talk)
    polar("export", tmp_path / "out", "--store", store, "--format", "jsonl", "--option", "trained=[title]")
    assert [row["role"] for row in lines(tmp_path / "out")] == ["title"]
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        polar("export", tmp_path / "out2", "--store", store, "--option", "trained")
    with pytest.raises(ConfigError, match="no option treined"):
        polar("export", tmp_path / "out2", "--store", store, "--option", "treined=[title]")


def test_an_export_of_nothing_is_an_error_that_says_why(polar: Polar, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was exported"):
        polar("export", tmp_path / "out", "--store", store_of(tmp_path, solved("a")), "--format", "jsonl")


# --- rebuild ---------------------------------------------------------------------------------------------------------------


def test_rebuild_writes_trajectories_with_ledger_and_reward(polar: Polar, tmp_path: Path) -> None:
    talk = solved("a", reward=0.5)
    lost = talk.say([Message("user", "x")], Message("assistant", "cut off"), status="aborted")
    store = store_of(tmp_path, talk, solved("b", created=2.0))
    polar("rebuild", "--store", store, "-o", tmp_path / "out.jsonl")
    newest, oldest = map(Trajectory.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    assert (newest.session, oldest.session) == ("b", "a")
    assert [trace.reward for trace in oldest.traces] == [0.5]
    assert [trace.reward for trace in newest.traces] == [None]
    assert oldest.ledger.by_reason() == {"aborted": len(lost.sampled_ids)}
    assert oldest.in_rows + oldest.ledger.tokens == oldest.sampled


def test_rebuild_with_another_builder_makes_other_rows_of_the_same_tokens(polar: Polar, tmp_path: Path) -> None:
    store = store_of(tmp_path, solved("a", reward=1.0, turns=4))
    found = []
    for builder in ("prefix_merging", "per_request"):
        polar("rebuild", "a", "--store", store, "--builder", builder, "-o", tmp_path / builder)
        found.append(Trajectory.loads((tmp_path / builder).read_bytes()))
    assert [len(trajectory.traces) for trajectory in found] == [1, 4]
    assert found[0].in_rows == found[1].in_rows


def test_rebuild_writes_to_standard_output_and_leaves_no_half_file(polar: Polar, tmp_path: Path) -> None:
    store = store_of(tmp_path, solved("a"))
    assert Trajectory.loads(polar("rebuild", "a", "--store", store).stdout).session == "a"
    with pytest.raises(ConfigError, match="no session is called 'c'"):
        polar("rebuild", "a", "c", "--store", store, "-o", tmp_path / "out.jsonl")
    assert not list(tmp_path.glob("out.jsonl*"))


# --- drift -----------------------------------------------------------------------------------------------------------------


def test_drift_of_a_session_shows_each_break_with_its_cause_cost_and_cure(polar: Polar, tmp_path: Path) -> None:
    out = polar("drift", "torn", "--store", store_of(tmp_path, torn())).output
    assert "call 1 does not extend call 0: thinking_stripped" in out
    assert "would avoid it: serve in mode `tokens`" in out
    assert "2 rows of 1 conversations and 1 breaks" in out


def test_drift_shows_the_text_on_both_sides(polar: Polar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.tokens.tokenizer.load_tokenizer", lambda _: TOKENIZER)
    out = polar("drift", "torn", "--store", store_of(tmp_path, torn()), "--tokenizer", tmp_path).output
    assert "<think>" in out.partition("before:")[2].partition("after:")[0]
    assert "<think>" not in out.partition("after:")[2]


def test_drift_of_all_counts_by_harness_dialect_and_cause(polar: Polar, tmp_path: Path) -> None:
    again = torn("again")
    again.created = 3.0
    store = store_of(tmp_path, torn(), again, solved("whole", created=5.0))
    facts = json.loads(polar("drift", "all", "--store", store, "--json").stdout)
    (total,) = facts["totals"]
    assert (total["harness"], total["dialect"], total["cause"], total["breaks"]) == ("codex", "openai_chat", "thinking_stripped", 2)
    assert facts["tokens"]["in_rows"] + sum(facts["tokens"]["ledger"].values()) == facts["tokens"]["sampled"]
    assert (facts["sessions"], facts["rows"], facts["conversations"]) == (3, 5, 3)
    assert json.loads(polar("drift", "t", "--store", store, "--json").stdout)["sessions"] == 2  # a task's name


def test_drift_of_whole_sessions_says_so(polar: Polar, tmp_path: Path) -> None:
    out = polar("drift", "all", "--store", store_of(tmp_path, solved("a"))).output
    assert "No prefix broke" in out


def test_drift_of_an_unknown_name_is_an_error(polar: Polar, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no session and no task is called 'x'"):
        polar("drift", "x", "--store", store_of(tmp_path, solved("a")))


# --- trace validate ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(polar: Polar, tmp_path: Path) -> Path:
    store = store_of(tmp_path, solved("a", reward=1.0), solved("b", created=2.0, reward=1.0))
    for name in ("jsonl", "parquet"):
        polar("export", tmp_path / name, "--store", store, "--as", "rl", "--format", name)
    return tmp_path


@pytest.mark.parametrize("where", ["jsonl", "parquet", "jsonl/data/train-00000.jsonl", "parquet/data/train-00000.parquet"])
def test_our_own_rows_are_good(polar: Polar, rows: Path, where: str) -> None:
    assert "2 rows, all good" in polar("trace", "validate", rows / where, "--vocabulary", 10_000).output


def test_a_trajectory_is_checked_row_by_row(polar: Polar, rows: Path) -> None:
    polar("rebuild", "--store", rows / "polar.db", "-o", rows / "rebuilt.jsonl")
    assert "2 rows, all good" in polar("trace", "validate", rows / "rebuilt.jsonl").output


def test_each_problem_is_named_with_its_place(polar: Polar, rows: Path) -> None:
    good = (rows / "jsonl" / "data" / "train-00000.jsonl").read_text().splitlines()[0]
    bad: dict[str, Any] = json.loads(good)
    bad["loss_mask"][0] = 2
    short: dict[str, Any] = json.loads(good)
    short["response_logprobs"].pop()
    (rows / "mixed.jsonl").write_text("\n".join([good, json.dumps(bad), "{", json.dumps({"traces": [json.loads(good), short]}), "7"]))
    out = polar("trace", "validate", rows / "mixed.jsonl", code=1).output
    assert "line 2: mask: loss_mask[0] is 2" in out
    assert "line 3: json:" in out
    assert "line 4, row 1 of its trajectory: length:" in out
    assert "line 5: type:" in out
    assert "6 rows, 2 good, 4 not" in out


def test_warnings_count_with_strict_only(polar: Polar, rows: Path) -> None:
    row = json.loads((rows / "jsonl" / "data" / "train-00000.jsonl").read_text().splitlines()[0])
    row["metadata"]["faithful"] = False
    assert [problem.severity for problem in validate(row)] == ["warning"]
    (rows / "warn.jsonl").write_text(json.dumps(row))
    assert "all good" in polar("trace", "validate", rows / "warn.jsonl").output
    polar("trace", "validate", rows / "warn.jsonl", "--strict", code=1)


def test_ids_outside_the_vocabulary_are_found(polar: Polar, rows: Path) -> None:
    assert "vocabulary" in polar("trace", "validate", rows / "parquet", "--vocabulary", 5, code=1).output


def test_a_file_that_is_not_there_or_empty_is_an_error_of_its_own(polar: Polar, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        polar("trace", "validate", tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="holds no row"):
        polar("trace", "validate", tmp_path / "empty.jsonl")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        polar("trace", "validate", tmp_path / "no.parquet")


# --- all of them ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["export", "out"], ["rebuild"], ["drift", "all"]])
def test_a_store_that_is_not_there_is_an_error_and_is_not_made(polar: Polar, tmp_path: Path, command: list[str]) -> None:
    for name in ("typo.db", "sqlite:typo.db"):
        with pytest.raises(ConfigError, match="there is no store at"):
            polar(*command, "--store", name if name.startswith("sqlite") else tmp_path / name)
    assert not list(tmp_path.glob("typo*"))
