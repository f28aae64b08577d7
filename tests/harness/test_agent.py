"""A harness in a sandbox: what it starts with, what it prints, how it ends and what is collected."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from harness_sandboxes import RealCommands, sandbox

from polar.errors import ConfigError, HarnessError
from polar.harness import Endpoint, registered
from polar.harness.agent import AgentRun, Collected, HarnessRun
from polar.harness.spec import AgentSpec
from polar.runtime import MountSpec, RuntimeSpec

KEY = "key-0123456789"
AT = Endpoint(f"http://127.0.0.1:9/s/{KEY}", KEY, "openai_chat", "served")


def agent(custom_shell: Any = None, **spec: Any) -> AgentRun:
    return AgentRun(AgentSpec(custom_shell=custom_shell, **spec), task_folder=None)


def played(
    folder: Path, run: AgentRun, instruction: str = "do it", *, timeout_s: float = 30.0, runtime: RealCommands | None = None, **more: Any
) -> tuple[HarnessRun, Collected]:
    """The whole way of one run."""

    async def scenario() -> tuple[HarnessRun, Collected]:
        async with runtime or sandbox(folder / "box") as box:
            await run.install()
            await run.set_up(box, AT, context=32_768)
            ended = await run.run(box, instruction, folder=folder / "logs", timeout_s=timeout_s, **more)
            return ended, await run.collect(box, folder / "artefacts")

    return asyncio.run(scenario())


def test_the_instruction_reaches_a_command_quoted_by_file_and_by_stdin(tmp_path: Path) -> None:
    prompt = 'it\'s $(touch pwned) "q"\nsecond line'
    line = "printf '%s|' {{INSTRUCTION}}; cat {{INSTRUCTION_FILE}}"
    assert played(tmp_path / "a", agent(line), prompt)[0].answer == f"{prompt}|{prompt}"
    assert played(tmp_path / "b", agent("cat"), prompt)[0].answer == prompt


def test_the_environment_is_preset_then_sandbox_then_agent_and_the_home_stays(tmp_path: Path) -> None:
    run = AgentRun(
        AgentSpec(custom_shell="env", env={"A": "agent", "HOME": "/elsewhere"}),
        task_folder=None,
        variables={"SESSION_ID": "ses-1", "TASK_ID": "task-1"},
    )
    box = sandbox(tmp_path / "box", env={"A": "sandbox", "B": "sandbox", "OPENAI_MODEL": "other"})
    seen = dict(line.split("=", 1) for line in (played(tmp_path, run, runtime=box)[0].answer or "").splitlines() if "=" in line)
    assert (seen["A"], seen["B"], seen["OPENAI_MODEL"]) == ("agent", "sandbox", "other")
    assert (seen["SESSION_ID"], seen["TASK_ID"]) == ("ses-1", "task-1")
    assert seen["HOME"] == seen["SESSION_DIR"] == box.home
    assert (seen["ANTHROPIC_BASE_URL"], seen["OPENAI_BASE_URL"]) == (
        AT.root.replace(KEY, "*" * len(KEY)),
        AT.v1.replace(KEY, "*" * len(KEY)),
    )
    assert {"ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_API_URL"} <= set(seen)


def test_the_key_is_masked_in_what_it_prints_and_leaves_even_in_two_pieces(tmp_path: Path) -> None:
    heard: list[bytes] = []
    half = len(KEY) // 2
    line = f'printf {KEY[:half]}; sleep 0.3; echo {KEY[half:]}; echo $OPENAI_API_KEY >&2; echo "$OPENAI_API_KEY" > "$ARTIFACTS_DIR/key"'
    ended, left = played(tmp_path, agent(line), on_output=lambda stream, data: heard.append(data))
    assert ended.answer == "*" * len(KEY)
    assert left.artifacts is not None
    everything = ended.stdout.read_text() + ended.stderr.read_text() + b"".join(heard).decode() + (left.artifacts / "key").read_text()
    assert KEY not in everything
    assert everything.count("*" * len(KEY)) >= 4


def test_output_comes_while_it_runs(tmp_path: Path) -> None:
    seen: list[str] = []
    log = tmp_path / "logs" / "harness.stdout"
    line = f"echo first; for i in 1 2 3 4 5 6 7 8 9; do [ -s {tmp_path}/go ] && exit 0; sleep 0.2; done; exit 9"

    def heard(stream: str, data: bytes) -> None:
        seen.append(f"{stream} {log.read_text()!r}")
        (tmp_path / "go").write_text("go")

    assert played(tmp_path, agent(line), on_output=heard)[0].exit_code == 0
    assert seen == ["stdout 'first\\n'"]


def test_a_pipe_never_hides_an_exit_code(tmp_path: Path) -> None:
    ended, _ = played(tmp_path, agent("sh -c 'exit 3' | cat"))
    assert (ended.exit_code, ended.problem) == (3, "exit code 3")


def test_time_that_runs_out_is_a_problem_and_the_work_is_still_collected(tmp_path: Path) -> None:
    ended, left = played(tmp_path, agent("echo half > work.txt; sleep 60"), timeout_s=1.0)
    assert (ended.timed_out, ended.exit_code) == (True, 124)
    assert "still running after 1 s" in (ended.problem or "")
    assert b"+half" in (left.patch or b"")


def test_steps_run_in_order_with_their_own_folder_environment_and_time_until_one_fails(tmp_path: Path) -> None:
    steps = [
        "mkdir inner",
        {"command": "echo $X > x.txt", "cwd": "inner", "env": {"X": "y"}},
        {"command": "sleep 30", "timeout_sec": 0.3},
        "touch never",
    ]
    ended, left = played(tmp_path, agent(steps))
    assert (ended.exit_code, ended.timed_out, ended.problem) == (124, False, "exit code 124")
    assert b"inner/x.txt" in (left.patch or b"")
    assert b"never" not in (left.patch or b"")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"custom_shell": []}, "at least one command"),
        ({"custom_shell": {"command": "x", "user": "root"}}, "unknown field 'user'"),
        ({"custom_shell": {"command": "x", "timeout_sec": -1}}, "no time in seconds"),
        ({"harness": "shell"}, "needs a command"),
        ({"harness": "shell", "custom_shell": "x", "settings": {"y": 1}}, "no settings of its own"),
        ({"harness": "pi", "custom_shell": "x"}, "for the harness shell"),
        ({"harness": "codex", "dialect": "google"}, "codex speaks"),
        ({"harness": "codex", "settings": {"retries": "many"}}, "whole number"),
        ({"harness": "cursor"}, "no harness is called"),
        ({"import_path": "polar.errors:PolarError"}, "no subclass"),
        ({"import_path": "nowhere:Nothing"}, "cannot be loaded"),
        ({"custom_shell": "x", "skills_path": "skills"}, "has no skills"),
        ({"custom_shell": "x", "mcp_servers": [{"name": "a", "command": "b"}]}, "has no MCP"),
        ({"harness": "mini-swe-agent", "mcp_servers": [{"name": "a", "command": "b"}]}, "has no MCP"),
        ({"harness": "codex", "mcp_servers": [{"name": "a", "transport": "sse", "url": "http://x"}]}, "not sse"),
        ({"harness": "codex", "mcp_servers": [{"name": "a b", "command": "b"}]}, "letters, digits"),
    ],
)
def test_an_agent_that_cannot_be_is_refused_before_anything_starts(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AgentRun(AgentSpec.model_validate(spec), task_folder=None)


def test_settings_of_polars_own_become_options_and_the_rest_the_clis(tmp_path: Path) -> None:
    run = AgentRun(AgentSpec(harness="codex", settings={"compact_at": 9_000, "retries": 1, "features": {"goals": False}}), task_folder=None)
    assert run.dialect == "openai_responses"
    assert run.endpoint("http://h/s/k", "k", "served").model == "served"
    assert run.spec.settings["features"] == {"goals": False}


@pytest.fixture
def fake_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed Claude Code that is a shell script: it tells its environment and configuration, and leaves a session file."""
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "cache"))
    harness = registered()["claude-code"]
    program = tmp_path / "cache" / "harness" / "claude-code" / harness.version / "node_modules" / harness.program_path
    program.parent.mkdir(parents=True)
    program.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "$FAKE_VERSION 2.1.332 (Claude Code)"; exit 0; fi\n'
        'mkdir -p "$HOME/.claude/projects/p"; echo "$ANTHROPIC_API_KEY" > "$HOME/.claude/projects/p/session.jsonl"\n'
        'cat >&2; ls -ld "$HOME"/.claude.json >&2; cat "$HOME/.claude.json" "$HOME"/.claude/skills/*/SKILL.md >&2; echo "$0 $PATH" >&2\n'
        'echo \'{"type": "result", "result": "done"}\'\n'
    )
    program.chmod(0o755)
    return program


def claude(tmp_path: Path, **spec: Any) -> AgentRun:
    (tmp_path / "task" / "skills" / "one").mkdir(parents=True)
    (tmp_path / "task" / "skills" / "one" / "SKILL.md").write_text("a skill\n")
    servers = [{"name": "files", "command": "serve", "args": ["-x"]}]
    found = AgentSpec.model_validate({"harness": "claude-code", "mcp_servers": servers, "skills_path": "skills", **spec})
    return AgentRun(found, task_folder=tmp_path / "task")


AT_CLAUDE = Endpoint(AT.base_url, KEY, "anthropic", "served")


def test_a_mounted_cli_gets_its_configuration_servers_and_skills(fake_cli: Path, tmp_path: Path) -> None:
    run = claude(tmp_path)
    ended, left = asyncio.run(_claude(tmp_path, run))
    told = ended.stderr.read_text()
    assert (ended.ok, ended.answer, run.version) == (True, "done", "2.1.332")
    assert run.mounts() == [MountSpec(source=str(fake_cli.parents[4]), target="/opt/polar/claude-code")]
    assert told.startswith("the prompt-rw-------")
    assert json.loads(told[told.index("{") : told.rindex("}") + 1])["mcpServers"]["files"]["args"] == ["-x"]
    assert "a skill" in told
    assert left.transcript is not None
    assert (left.transcript / "projects" / "p" / "session.jsonl").read_text() == "*" * len(KEY) + "\n"


class OwnPath(RealCommands):
    """As `local` without namespaces."""

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        if any(mount.source != mount.target for mount in spec.mounts):
            raise ConfigError("only at its own path")


def test_a_backend_that_mounts_at_the_own_path_only_gets_that(fake_cli: Path, tmp_path: Path) -> None:
    run = claude(tmp_path)
    asyncio.run(run.install())
    assert [mount.target for mount in run.mounts(RuntimeSpec(import_path=f"{__name__}:OwnPath"))] == [str(fake_cli.parents[4])]
    assert [mount.target for mount in run.mounts(RuntimeSpec(backend="local"))] == ["/opt/polar/claude-code"]


def test_a_harness_of_ones_own_is_installed_and_placed_like_a_preset(fake_cli: Path, tmp_path: Path) -> None:
    run = AgentRun(AgentSpec(import_path="polar.harness.claude_code:ClaudeCode"), task_folder=None)
    ended, _ = asyncio.run(_claude(tmp_path, run))
    assert (ended.ok, run.harness.name) == (True, "claude-code")


def test_a_copied_cli_runs_from_the_sandboxs_home(fake_cli: Path, tmp_path: Path) -> None:
    run = claude(tmp_path, install="copy")
    ended, _ = asyncio.run(_claude(tmp_path, run))
    assert run.mounts() == []
    assert f"{tmp_path}/box/inside/home/.polar/claude-code/node_modules" in ended.stderr.read_text()


def test_a_present_cli_is_found_on_the_path_of_the_image(fake_cli: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "claude").symlink_to(fake_cli)
    run = claude(tmp_path, install="present")
    ended, _ = asyncio.run(_claude(tmp_path, run, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}))
    assert (ended.ok, run.version, run.mounts()) == (True, "2.1.332", [])


def test_a_cli_that_is_not_in_the_image_is_told(fake_cli: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="'claude' is not on the PATH"):
        asyncio.run(_claude(tmp_path, claude(tmp_path, install="present")))


def test_a_cli_that_cannot_run_says_why(fake_cli: Path, tmp_path: Path) -> None:
    fake_cli.write_text("#!/no/such/loader\n")
    with pytest.raises(HarnessError, match="cannot run in this image"):
        asyncio.run(_claude(tmp_path, claude(tmp_path)))


def test_a_musl_image_is_named_as_the_reason(fake_cli: Path, tmp_path: Path) -> None:
    fake_cli.write_text("#!/no/such/loader\n")

    class Musl(RealCommands):
        async def exec(self, command: Any, **more: Any) -> Any:
            if "ld-musl" in str(command):
                command = ["echo", "musl"]
            return await super().exec(command, **more)

    with pytest.raises(HarnessError, match="needs glibc, and this image has musl"):
        asyncio.run(_claude(tmp_path, claude(tmp_path), kind=Musl))


def test_an_image_that_is_proven_is_not_tried_again(fake_cli: Path, tmp_path: Path) -> None:
    proven: dict[str, str] = {}
    asyncio.run(_claude(tmp_path, AgentRun(AgentSpec(harness="claude-code"), task_folder=None, proven=proven)))
    assert list(proven.values()) == ["2.1.332"]
    fake_cli.write_text("#!/no/such/loader\n")
    again = AgentRun(AgentSpec(harness="claude-code"), task_folder=None, proven=proven)
    ended, _ = asyncio.run(_claude(tmp_path / "again", again))
    assert (ended.exit_code != 0, again.version) == (True, "2.1.332")


async def _claude(tmp_path: Path, run: AgentRun, kind: type[RealCommands] = RealCommands, **spec: Any) -> tuple[HarnessRun, Collected]:
    made = sandbox(tmp_path / "box", **spec)
    made.__class__ = kind
    async with made as box:
        await run.install()
        await run.set_up(box, AT_CLAUDE, context=None)
        ended = await run.run(box, "the prompt", folder=tmp_path / "logs", timeout_s=30)
        return ended, await run.collect(box, tmp_path / "artefacts")


def test_a_patch_that_the_agent_made_impossible_is_told_apart(tmp_path: Path) -> None:
    _, removed = played(tmp_path / "a", agent('rm -rf "$HOME/.polar"'))
    assert removed.patch is None
    assert removed.patch_refused is not None
    assert "no patch" in removed.patch_refused
    _, kept = played(tmp_path / "b", agent("touch x"))
    assert (kept.patch is None, kept.patch_refused) == (False, None)


def test_an_answer_without_end_is_cut_and_the_log_is_not(tmp_path: Path) -> None:
    ended, _ = played(tmp_path, agent("head -c 3000000 /dev/zero | tr '\\0' x; echo end"))
    assert ended.answer is not None
    assert len(ended.answer) == 1_000_000
    assert ended.answer.endswith("xend")
    assert ended.stdout.stat().st_size > 3_000_000
