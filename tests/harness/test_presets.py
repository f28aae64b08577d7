"""The presets: what they write, what they start, what they print for people, and how they read their own output."""

from __future__ import annotations

import json
import stat
import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from polar.errors import ConfigError
from polar.harness import Endpoint, Options, named, registered
from polar.harness.base import DEFAULTS, json_lines
from polar.harness.home import Home

KEY = "polar-secret-key"
BASE = "http://127.0.0.1:1234/s/" + KEY
PAIRS = [(name, dialect) for name, harness in registered().items() for dialect in harness.dialects]


def endpoint(dialect: str) -> Endpoint:
    return Endpoint(BASE, KEY, dialect, "some-model")  # type: ignore[arg-type]


def configured(name: str, at: Endpoint, options: Options = DEFAULTS) -> tuple[Home, dict[str, str]]:
    """The home that a preset fills, and its environment."""
    home = Home("/home/agent")
    return home, named(name).configure(home, at, options)


def text_of(home: Home, name: str) -> str:
    return home.files[PurePosixPath(name)].decode()


def test_all_presets_are_registered_under_the_names_of_the_command_line() -> None:
    assert list(registered()) == ["claude-code", "codex", "gemini-cli", "mini-swe-agent", "opencode", "pi", "qwen-code", "shell"]


def test_pi_and_opencode_speak_four_dialects_qwen_code_three_the_rest_one() -> None:
    counts = {name: len(harness.dialects) for name, harness in registered().items()}
    rest = {"claude-code": 1, "codex": 1, "gemini-cli": 1}
    assert counts == {**rest, "mini-swe-agent": 3, "opencode": 4, "pi": 4, "qwen-code": 3, "shell": 4}


def test_an_unknown_harness_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="claude-code"):
        named("cursor")


@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_a_preset_points_only_at_the_endpoint(name: str, dialect: str) -> None:
    home, environment = configured(name, endpoint(dialect), Options(compact_at=10_000))
    written = "\n".join(content.decode() for content in home.files.values())
    everything = written + json.dumps(environment)
    assert BASE in everything
    assert KEY in everything
    assert "http" not in everything.replace(BASE, "")


@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_configuration_files_are_readable_by_their_owner_only(name: str, dialect: str, tmp_path: Path) -> None:
    configured(name, endpoint(dialect))[0].save(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [name for name in registered() if name != "shell"])
def test_prompts_go_in_by_stdin_and_never_by_the_command_line(name: str) -> None:
    harness = named(name)
    prompt = "quotes ' \" and $(dangers)\n" * 20_000
    command = harness.command(("program",), prompt, endpoint(harness.dialects[0]), Options())
    assert command.stdin == prompt
    assert all("dangers" not in word for word in command.argv)


@pytest.mark.parametrize("name", [name for name, harness in registered().items() if harness.resumable])
def test_resume_is_another_command(name: str) -> None:
    harness = named(name)
    at = endpoint(harness.dialects[0])
    assert harness.command(("p",), "x", at, Options(), resume=True) != harness.command(("p",), "x", at, Options())


@pytest.mark.parametrize("name", ["claude-code", "codex", "gemini-cli", "qwen-code"])
def test_a_dialect_that_a_harness_cannot_speak_is_refused(name: str) -> None:
    wrong = "google" if name != "gemini-cli" and name != "qwen-code" else "openai_responses"
    with pytest.raises(ConfigError, match=name):
        configured(name, endpoint(wrong))


@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_lines_for_people_are_a_valid_shell_script(name: str, dialect: str) -> None:
    script = "\n".join(named(name).lines(endpoint(dialect)))
    assert BASE in script
    assert subprocess.run(("sh", "-n"), input=script, text=True, check=False, capture_output=True).returncode == 0


def test_settings_are_merged_into_the_harness_own_file() -> None:
    home, _ = configured("gemini-cli", endpoint("google"), Options(settings={"model": {"skipNextSpeakerCheck": False}}))
    written = json.loads(text_of(home, ".gemini/settings.json"))
    assert written["model"] == {"name": "some-model", "skipNextSpeakerCheck": False, "compressionThreshold": int(131_072 * 0.7) / 1_048_576}
    assert written["privacy"] == {"usageStatisticsEnabled": False}


def test_codex_writes_toml_that_parses_with_its_retries_capped() -> None:
    home, _ = configured("codex", endpoint("openai_responses"), Options(retries=1, compact_at=9_000))
    written = tomllib.loads(text_of(home, ".codex/config.toml"))
    provider = written["model_providers"]["polar"]
    assert provider["base_url"] == BASE + "/v1"
    assert (provider["request_max_retries"], provider["stream_max_retries"]) == (1, 1)
    assert written["model_auto_compact_token_limit"] == 9_000


def test_shell_substitutes_the_instruction_quoted(tmp_path: Path) -> None:
    prompt = "it's $(touch pwned); {{MODEL}}\nsecond line"
    options = Options(extra_args=("printf '%s' {{INSTRUCTION}} {{MODEL}}",))
    command = named("shell").command((), prompt, endpoint("openai_chat"), options)
    done = subprocess.run(command.argv, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == prompt + "some-model"
    assert list(tmp_path.iterdir()) == []


def test_shell_without_a_command_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match="INSTRUCTION"):
        named("shell").command((), "x", endpoint("openai_chat"), Options())


def test_pi_tells_of_an_error_although_its_exit_code_is_zero() -> None:
    message = {"role": "assistant", "content": [], "stopReason": "error", "errorMessage": "400: too long"}
    stdout = json.dumps({"type": "message_end", "message": message})
    assert named("pi").problem(0, stdout, "") == "error: 400: too long"


def test_pi_that_says_nothing_has_failed() -> None:
    assert named("pi").problem(0, "", "") == "it ended without an answer"


def test_claude_code_tells_of_an_error_result() -> None:
    stdout = json.dumps({"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 500"})
    assert named("claude-code").problem(0, stdout, "") == "API Error: 500"


def test_an_exit_code_is_explained_by_the_last_line() -> None:
    assert named("codex").problem(2, "", "first\nlast words\n") == "exit code 2: last words"


ANSWERS = {
    "claude-code": json.dumps({"type": "result", "result": "done"}),
    "codex": json.dumps({"type": "item.completed", "item": {"type": "agent_message", "text": "done"}}),
    "gemini-cli": "some noise\n" + json.dumps({"response": "done"}, indent=2),
    "qwen-code": json.dumps({"type": "result", "result": "done"}),
    "opencode": json.dumps({"type": "text", "part": {"text": "done"}}),
    "pi": json.dumps({"type": "message_end", "message": {"role": "assistant", "content": [{"type": "text", "text": "done"}]}}),
    "mini-swe-agent": "noise\n" + json.dumps({"exit_status": "Submitted", "submission": "done\n"}),
    "shell": "done\n",
}


@pytest.mark.parametrize("name", list(ANSWERS))
def test_the_final_answer_is_found_in_the_output(name: str) -> None:
    assert named(name).answer(ANSWERS[name]) == "done"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("claude-code", "CLAUDE_CODE_MAX_CONTEXT_TOKENS=32768"),
        ("codex", "model_context_window=32768"),
        ("gemini-cli", f'"compressionThreshold": {int(32_768 * 0.7) / 1_048_576}'),
        ("opencode", '"context":32768'),
        ("pi", '"contextWindow":32768'),
        ("qwen-code", '"contextWindowSize": 32768'),
    ],
)
def test_lines_for_people_tell_the_model_s_true_length(name: str, word: str) -> None:
    harness = named(name)
    assert word in "\n".join(harness.lines(endpoint(harness.dialects[0]), Options.within(32_768)))


def test_an_answer_gets_at_most_a_quarter_of_a_short_model() -> None:
    assert (Options.within(8_192).context, Options.within(8_192).max_output) == (8_192, 2_048)
    assert Options.within(10**6).max_output == Options().max_output
    assert Options.within(None) == Options()


def test_claude_code_compacts_within_a_length_below_its_smallest_window() -> None:
    _, environment = configured("claude-code", endpoint("anthropic"), Options.within(32_768, compact_at=16_384))
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768"
    assert environment["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] == "50"


def test_claude_code_s_subtype_is_told_where_there_is_nothing_else() -> None:
    ended = '{"type": "result", "subtype": "error_max_turns", "is_error": true}'
    assert named("claude-code").problem(1, ended, "") == "error_max_turns"


def test_lines_of_output_end_with_a_line_feed_alone() -> None:
    text = '{"a": "\u2028 \x85"}\n\n{"b": 1}\r\nnoise\n' + "[" * 100_000 + "\n{" + '"c":' + "[" * 100_000 + '\n{"d": 1}'
    assert list(json_lines(text)) == [{"a": "\u2028 \x85"}, {"b": 1}, {"d": 1}]
