"""Agents without a model: their commands run in any POSIX shell and leave nothing of their own."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from task_folders import MakeTask

from polar.errors import ConfigError
from polar.tasks import find, load, noop_agent, oracle_agent
from polar.tasks.oracle import oracle_command


def run(command: str, cwd: Path, tmp: Path, **env: str) -> subprocess.CompletedProcess[str]:
    cwd.mkdir(exist_ok=True)
    tmp.mkdir(exist_ok=True)
    environment = {"PATH": os.defpath, "TMPDIR": str(tmp), **env}
    return subprocess.run(["sh", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_solution_runs_and_leaves_only_its_work(make_task: MakeTask, tmp_path: Path) -> None:
    files = {"solution/solve.sh": 'cp "$(dirname "$0")"\'/deep/{odd} $name.txt\' done.txt\n', "solution/deep/{odd} $name.txt": "ünï\n"}
    done = run(oracle_command(load(make_task(files=files))), tmp_path / "work", tmp_path / "tmp")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["done.txt"]
    assert (tmp_path / "work" / "done.txt").read_text() == "ünï\n"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_failing_solution_fails(make_task: MakeTask, tmp_path: Path) -> None:
    task = load(make_task(files={"solution/solve.sh": "exit 7\n"}))
    assert run(oracle_command(task), tmp_path / "work", tmp_path / "tmp").returncode == 7


def test_a_command_is_the_same_every_time_and_has_no_placeholder() -> None:
    for task in find("all"):
        command = oracle_command(task)
        assert command == oracle_command(task)
        assert "{{" not in command


def test_a_task_without_a_solution_or_with_a_huge_one(make_task: MakeTask) -> None:
    with pytest.raises(ConfigError, match="no reference solution"):
        oracle_agent(load(make_task("none", files={"solution/solve.sh": None})))
    folder = make_task("huge")
    (folder / "solution" / "blob").write_bytes(os.urandom(200_000))
    with pytest.raises(ConfigError, match="too large"):
        oracle_agent(load(folder))


@pytest.fixture
def model() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A server that answers one chat completion; its URL and what it was asked."""
    asked: list[dict[str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({**body, "path": self.path, "key": self.headers["authorization"]})
            answer = json.dumps({"choices": [{"message": {"content": "done"}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_with_a_call_the_model_is_asked_first(make_task: MakeTask, tmp_path: Path, model: tuple[str, list[dict[str, object]]]) -> None:
    url, asked = model
    agent = oracle_agent(load(make_task()), call=True)
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k", "POLAR_MODEL": "m"}
    done = run(str(agent.custom_shell), tmp_path / "work", tmp_path / "tmp", **env)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert [(one["path"], one["key"], one["model"]) for one in asked] == [("/v1/chat/completions", "Bearer k", "m")]
    assert (tmp_path / "work" / "done.txt").exists()


def test_without_a_model_it_says_so_and_goes_on(make_task: MakeTask, tmp_path: Path) -> None:
    agent = oracle_agent(load(make_task()), call=True)
    done = run(str(agent.custom_shell), tmp_path / "work", tmp_path / "tmp")
    assert done.returncode == 0
    assert "no model call" in done.stderr


def test_doing_nothing_does_nothing(tmp_path: Path) -> None:
    assert run(str(noop_agent().custom_shell), tmp_path / "work", tmp_path / "tmp").returncode == 0
    assert list((tmp_path / "work").iterdir()) == []
