"""The real CLIs in a sandbox, as a node runs them: their MCP servers and skills reach the model, their work, answer and session files come
back. Minutes; installs what is missing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness_sandboxes import sandbox
from mcp_marks import http_app

from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.harness.agent import AgentRun, Collected, HarnessRun
from polar.harness.spec import AgentSpec, McpServer
from polar.records import Completion
from polar.runtime import Place, Runtime, RuntimeSpec, backend_of, create
from polar.runtime.owner import Owner
from polar.testing import Call, serve_app, serve_scripted

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

WITH_MCP = ["claude-code", "codex", "gemini-cli", "opencode", "pi", "qwen-code"]
SERVER = Path(__file__).with_name("mcp_marks.py")
SKILL = "---\nname: tide-tables\ndescription: Reads the tide tables of Farhaven.\n---\nLook into tides.txt.\n"
INSTRUCTION = "Put a mark with the text sky."
DONE = "The mark is put and the file is written."


def play(call: Call) -> str:
    """First the MCP tool, then a file by the shell, then the end."""
    text = call.text
    offered = re.search(r'"name": ?"([^"]*put_mark)"', text)
    shell = re.search(r'"name": ?"(bash|Bash|run_shell_command|exec_command|shell)"', text)
    if shell is None:
        return "Marks"
    if offered is not None and "the mark is put" not in text:
        return _call(offered[1], {"text": "sky"})
    if "file-is-there" not in text:
        command = "printf 'sky' > mark.txt && printf 'file-is-%s\\n' there"
        name = "cmd" if shell[1] == "exec_command" else "command"
        return _call(shell[1], {name: command, "description": "writes it"})
    if "COMPLETE_TASK" in text:
        return _call(shell[1], {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    return DONE


def _call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Played:
    run: HarnessRun
    left: Collected
    completions: list[Completion]
    version: str | None
    marks: list[dict[str, object]]

    @property
    def tools(self) -> set[str]:
        return {tool.wire_name or tool.name for one in self.completions for tool in one.tools}


@asynccontextmanager
async def gateway(folder: Path, tokenizer: Path) -> AsyncIterator[Gateway]:
    with serve_scripted(play, tokenizer_dir=tokenizer, model="Qwen/Qwen3-8B") as server:
        engine = EngineConfig(urls=[server.url], mode="tokens", tokenizer=str(tokenizer), renderer="qwen3")
        config = GatewayConfig(engines={"default": engine}, port=0, admin_port=0, store=str(folder / "polar.db"), check=False)
        async with serving(Gateway(config)) as made:
            yield made


async def played(name: str, folder: Path, tokenizer: Path, *, server: McpServer | None, skills: bool = True) -> Played:
    (folder / "task" / "skills" / "tide-tables").mkdir(parents=True)
    (folder / "task" / "skills" / "tide-tables" / "SKILL.md").write_text(SKILL)
    log = folder / "marks.jsonl"
    spec = AgentSpec.model_validate(
        {
            "harness": name,
            "mcp_servers": [server] if server is not None else [],
            "skills_path": "skills" if skills else None,
            "settings": {"retries": 1},
        }
    )
    run = AgentRun(spec, task_folder=folder / "task")
    async with gateway(folder, tokenizer) as made, sandbox(folder / "box") as box:
        session, key = await made.new_session()
        await run.install()
        endpoint = run.endpoint(f"http://127.0.0.1:{made.config.port}/s/{key}", key, "served")
        await run.set_up(box, endpoint, context=131_072)
        ended = await run.run(box, INSTRUCTION, folder=folder / "logs", timeout_s=120)
        left = await run.collect(box, folder / "artefacts")
        completions = [one async for one in made.store.completions(session.id)]
    marks = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for path in (folder / "logs").rglob("*"):
        assert key not in path.read_text(errors="replace")
    return Played(ended, left, completions, run.version, marks)


@pytest.mark.parametrize("name", WITH_MCP)
async def test_a_real_cli_uses_an_mcp_server_sees_a_skill_and_brings_its_work_back(
    name: str, tmp_path: Path, qwen3_tokenizer_dir: Path
) -> None:
    server = McpServer(name="marks", command=sys.executable, args=[str(SERVER), str(tmp_path / "marks.jsonl")], env={"MARKS": "given"})
    found = await played(name, tmp_path, qwen3_tokenizer_dir, server=server)
    assert found.run.problem is None, found.run.stderr.read_text()[-2000:]
    assert any(tool.endswith("put_mark") for tool in found.tools), found.tools
    assert found.marks == [{"arguments": {"text": "sky"}, "given": "given"}]
    assert any("tide-tables" in str(one.messages) + str(one.tools) for one in found.completions)
    assert found.run.answer == DONE
    assert b"+++ b/mark.txt" in (found.left.patch or b"")
    assert found.left.warnings == ()
    assert found.left.transcript is not None
    assert any(path.is_file() for path in found.left.transcript.rglob("*"))
    assert found.version


@pytest.mark.parametrize("name", WITH_MCP)
async def test_a_real_cli_uses_an_mcp_server_over_http(name: str, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    with serve_app(http_app(str(tmp_path / "marks.jsonl"))) as running:
        server = McpServer(name="marks", transport="streamable-http", url=f"{running.url}/mcp", headers={"x-marks": "given"})
        found = await played(name, tmp_path, qwen3_tokenizer_dir, server=server, skills=False)
    assert found.run.problem is None, found.run.stderr.read_text()[-2000:]
    assert found.marks == [{"arguments": {"text": "sky"}, "given": "given"}]


@asynccontextmanager
async def isolated(spec: RuntimeSpec, folder: Path, port: int) -> AsyncIterator[Runtime]:
    """A real sandbox whose gateway is at `port`."""
    problem = await backend_of(spec).unavailable()
    if problem is not None:
        pytest.skip(problem)
    owner = Owner.open(folder / "owners")
    try:
        async with create(spec, Place("box", owner.id, owner.sandbox("box"), gateway=("127.0.0.1", port))) as runtime:
            yield runtime
        owner.remove("box")
    finally:
        owner.close()


@pytest.mark.parametrize("install", ["mount", "copy"])
@pytest.mark.parametrize("name", ["pi", "codex", "claude-code"])
@pytest.mark.parametrize("backend", ["local", "bubblewrap", "docker"])
async def test_a_cli_of_this_machine_works_in_every_sandbox(
    backend: str, name: str, install: str, tmp_path: Path, qwen3_tokenizer_dir: Path
) -> None:
    run = AgentRun(AgentSpec.model_validate({"harness": name, "install": install}), task_folder=None)
    await run.install()
    spec = RuntimeSpec(backend=backend)
    spec = spec.model_copy(update={"mounts": run.mounts(spec)})
    async with gateway(tmp_path, qwen3_tokenizer_dir) as made, isolated(spec, tmp_path, made.config.port) as runtime:
        session, key = await made.new_session()
        await run.set_up(runtime, run.endpoint(f"{runtime.gateway_url}/s/{key}", key, "served"), context=None)
        ended = await run.run(runtime, INSTRUCTION, folder=tmp_path / "logs", timeout_s=120)
        left = await run.collect(runtime, tmp_path / "artefacts")
        completions = [one async for one in made.store.completions(session.id)]
    assert (ended.problem, ended.answer) == (None, DONE)
    assert b"+++ b/mark.txt" in (left.patch or b"")
    assert left.warnings == ()
    assert len(completions) == 2
    assert all(run.harness.explains(one) for one in completions)


async def test_mini_swe_agent_brings_its_work_back(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    found = await played("mini-swe-agent", tmp_path, qwen3_tokenizer_dir, server=None, skills=False)
    assert found.run.problem is None, found.run.stderr.read_text()[-2000:]
    assert b"+++ b/mark.txt" in (found.left.patch or b"")
    assert found.left.transcript is not None
    assert found.version == "2.4.6"
