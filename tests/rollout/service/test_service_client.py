"""The typed clients and the commands."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from service_parts import http, submit, task, until
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.errors import RolloutError
from polar.rollout.checks import is_loopback
from polar.rollout.client import AsyncClient, Client
from polar.rollout.models import SessionDispatchRequest, SessionResult, TaskRequest
from polar.sockets import free_port
from polar.testing.node import StubNode, broken, graded
from polar.testing.rollout import TOKEN, listening, running_service, stub_rollouts
from polar.train.gateways import Control


async def test_groups_come_as_they_end(tmp_path: Path) -> None:
    others = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        if request.task_id == "slow":
            await others.wait()
        return graded(request)

    async with stub_rollouts(tmp_path, [StubNode(play=play, max_run_workers=8)]) as (_, url), AsyncClient(url, TOKEN) as polar:
        for name in ("slow", "quick", "late"):
            await polar.submit(TaskRequest.model_validate(task(name, 2)))
        names = []
        async for group in polar.groups(["slow", "quick", "late"]):
            names.append(group.task_id)
            if len(names) == 2:
                others.set()
        assert names[-1] == "slow"
        assert sorted(names) == ["late", "quick", "slow"]
        again = [group async for group in polar.groups(["slow"])]
        assert [one.reward for one in again[0].results] == [1.0, 1.0]


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own service is on loopback; who has to go through a proxy to the internet often names no exception for that."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with stub_rollouts(tmp_path) as (_, url), AsyncClient(url, TOKEN, patience_s=0) as polar, Control(url, TOKEN) as control:
        assert await polar.status()
        await control._call("GET", "/admin/inference/status", expected=(200, 503))  # a stub has no engines to tell of


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://localhost", True),
        ("http://[::1]:80/x", True),
        ("http://127.9.9.9", True),
        ("http://10.0.0.5:8080", False),
        ("https://polar.example", False),
        ("http://localhost.example", False),
    ],
)
def test_which_urls_are_of_this_machine(url: str, here: bool) -> None:
    assert is_loopback(url) == here


async def test_a_result_is_one_line_whatever_the_agent_wrote(tmp_path: Path) -> None:
    """U+2028 and its like are plain text to JSON and the end of a line to many readers: half a result ended a client, and with it a
    training run, each time that it went on."""
    text = "one\u2028two\u2029three\x85four\x0bfive\r\nsix\x1eseven 漢🙂"

    async def play(request: SessionDispatchRequest) -> SessionResult:
        return graded(request, answer=text) if request.sample else broken(request, error=text)

    async with stub_rollouts(tmp_path, [StubNode(play=play)]) as (_, url), AsyncClient(url, TOKEN) as polar, http(url) as plain:
        await polar.submit({**task(samples=2), "max_attempts": 1})
        results = sorted([one async for one in polar.results("t")], key=lambda one: one.sample)
        assert [results[0].error, results[1].answer] == [text, text]
        lines = (await plain.get("/rollout/task/t/results")).text.splitlines()
        assert sorted(orjson.loads(line)["sample"] for line in lines if line) == [0, 1]
        async for event in polar.events(after=0):
            if event.type == "session.attempt_failed":
                assert event.data["error"] == text
                break


async def test_streams_and_waits_go_on_over_a_restart_of_the_service(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        if request.sample:
            await gate.wait()
        return graded(request)

    node = StubNode(play=play, max_run_workers=8)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with listening(node.app) as own, AsyncClient(url, TOKEN) as polar:
        seen: list[int] = []

        async def collect() -> None:
            async for result in polar.results("t"):
                seen.append(result.sample)

        async with running_service(tmp_path, port=port):
            await node.join(url, TOKEN, own)
            await polar.submit(task(samples=4))
            collecting = asyncio.create_task(collect())
            waiting = asyncio.create_task(polar.wait("t", timeout_s=30))
            await until(lambda: seen == [0])
        async with running_service(tmp_path, port=port):
            gate.set()
            await asyncio.wait_for(collecting, 30)
            status = (await waiting)[0]
        await node.leave()
    assert sorted(seen) == [0, 1, 2, 3]
    assert status.counts == {"graded": 4, "open": 0}


async def test_refusals_carry_the_services_code(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), AsyncClient(url, TOKEN) as polar:
        with pytest.raises(RolloutError) as refused:
            await polar.task("nope")
        assert (refused.value.code, refused.value.status) == ("not_found", 404)
        async with AsyncClient(url, "wrong") as stranger:
            with pytest.raises(RolloutError) as locked:
                await stranger.nodes()
        assert locked.value.code == "unauthenticated"


async def test_a_service_that_is_not_there_is_an_error_that_says_so() -> None:
    async with AsyncClient("http://127.0.0.1:1", TOKEN, patience_s=0.3) as polar:
        with pytest.raises(RolloutError, match="does not answer") as failed:
            await polar.status()
        assert (failed.value.code, failed.value.status) == ("unreachable", 0)
        with pytest.raises(RolloutError):
            async for _ in polar.events():
                pass


async def test_artefacts_lists_and_cancel(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), AsyncClient(url, TOKEN) as polar:
        await polar.submit(task(samples=2))
        status = (await polar.wait("t", timeout_s=20))[0]
        session = status.results[0].session_id
        assert await polar.artifacts(session) == [{"path": "logs/agent.txt", "size": 5}]
        assert b"".join([piece async for piece in polar.artifact(session, "logs/agent.txt")]) == b"hello"
        assert [text async for text in polar.log(session)] == ["printed by the harness\n"]
        assert [row["task_id"] async for row in polar.tasks()] == ["t"]
        assert [row["sample"] async for row in polar.sessions("t")] == [0, 1]
        assert (await polar.cancel("t"))["cancelled_sessions"] == 0
        assert await polar.cancel_session(session) is False
        assert (await polar.session(session))["state"] == "done"
        assert (await polar.result(session)).reward == 1.0
        assert (await polar.nodes())[0]["node_id"] == "stub"


@pytest.fixture
def node() -> StubNode:
    """Sessions of tasks called `bad...` fail, of `hang...` never end."""

    async def play(request: SessionDispatchRequest) -> SessionResult | None:
        if request.task_id.startswith("hang"):
            return None
        return broken(request) if request.task_id.startswith("bad") else graded(request, reward=0.5)

    return StubNode(play=play, max_run_workers=8)


@pytest.fixture
def service_url(tmp_path: Path, node: StubNode) -> Iterator[str]:
    """A service with that node, in a thread of its own."""
    told: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with stub_rollouts(tmp_path / "service", [node]) as (_, url):
            told.append(url)
            ready.set()
            await stop.wait()

    (tmp_path / "service").mkdir()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield told[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
    loop.close()


def test_the_plain_client_needs_no_event_loop(service_url: str) -> None:
    with Client(service_url, TOKEN) as polar:
        polar.submit(task("a", 2))
        polar.submit(task("b", 2))
        groups = {group.task_id: [one.reward for one in group.results] for group in polar.groups(["a", "b"])}
        assert groups == {"a": [0.5, 0.5], "b": [0.5, 0.5]}
        kinds = []
        for event in polar.events(task_id="a", after=0):
            kinds.append(event.type)
            if event.type == "task.finished":
                break
        assert kinds[0] == "task.submitted"
        assert len(list(polar.results("a"))) == 2
        with pytest.raises(RolloutError):
            polar.task("nope")


def test_commands(service_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLAR_URL", service_url)
    monkeypatch.setenv("POLAR_TOKEN", TOKEN)
    file = tmp_path / "tasks.yaml"
    file.write_text("- task_id: a\n  instruction: do it\n  num_samples: 2\n  agent: {harness: pi}\n")

    def polar(*arguments: str, code: int = 0, given: str | None = None) -> str:
        result = CliRunner().invoke(app, list(arguments), input=given)
        assert result.exit_code == code, result.output
        return result.output

    assert "a submitted" in polar("submit", str(file))
    assert "mean reward 0.500 of 2" in polar("wait", "a")
    told = orjson.loads(polar("status", "a", "--json"))
    assert told["counts"] == {"graded": 2, "open": 0}
    assert "graded" in polar("status", "a")
    assert "stub" in polar("status")
    assert polar("logs", told["sessions"][0]["session_id"]) == "printed by the harness\n"
    bad = orjson.dumps(task("bad", 1, max_attempts=1)).decode()
    assert "no reward" in polar("submit", "-", "--wait", given=bad, code=1)
    polar("submit", "-", given=orjson.dumps(task("hang", 3)).decode())
    assert "3 sessions cancelled" in polar("cancel", "hang")


def test_commands_find_the_token_that_the_service_keeps(service_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POLAR_TOKEN", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "rollout.token").write_text(TOKEN + "\n")
    result = CliRunner().invoke(app, ["status", "--url", service_url])
    assert result.exit_code == 0, result.output


async def test_a_token_that_the_service_makes_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POLAR_TOKEN", raising=False)
    (tmp_path / "home").mkdir()
    file = tmp_path / "home" / "rollout.token"
    async with stub_rollouts(tmp_path) as (_, url), AsyncClient(url) as polar:
        with pytest.raises(RolloutError, match="token"):
            await polar.status()
        file.write_text(TOKEN)
        assert await polar.submit(task()) == "t"
        assert (await polar.wait("t"))[0].status == "completed"
        file.write_text("another service's")
        await polar.status()  # what works stays
    async with stub_rollouts(tmp_path / "home") as (_, url), AsyncClient(url, "wrong") as polar:
        file.write_text(TOKEN)
        with pytest.raises(RolloutError, match="token"):  # one that was given is never replaced
            await polar.status()


@pytest.mark.parametrize(
    ("backends", "runtime", "why"),
    [
        ([["local", "docker"]], {"backend": "dokcer"}, "no node that is up runs the backend 'dokcer'; they run: docker, local"),
        ([["local"], ["docker"]], {"backend": "docker"}, None),
        ([["local"], None], {"backend": "docker"}, None),  # a node that does not say what it runs may run it
        ([["docker"]], {"import_path": "mine:Runtime"}, None),
        ([["docker"]], {}, None),
        ([["docker"]], None, None),
        ([], {"backend": "docker"}, "no node is up"),
        ([], None, "no node is up"),
    ],
)
async def test_a_task_that_no_node_can_begin_says_so(
    tmp_path: Path, backends: list[list[str] | None], runtime: dict[str, str] | None, why: str | None
) -> None:
    nodes = [StubNode(f"n{place}", interval_s=30.0, metrics={"backends": told} if told else {}) for place, told in enumerate(backends)]
    for node in nodes:
        node.refuse = 503  # it waits in any case
    async with stub_rollouts(tmp_path, nodes) as (_, url), AsyncClient(url, TOKEN) as polar:
        await polar.submit(task(runtime=runtime))
        async with asyncio.timeout(20):
            while True:  # an attempt that is on its way to a node waits for nothing
                status = await polar.task("t")
                if (await anext(polar.sessions("t")))["state"] == "waiting":
                    break
        assert status.waits_for == why
        assert [row["waits_for"] async for row in polar.tasks()] == [why]


def test_commands_say_that_a_task_waits_and_for_what(
    service_url: str, node: StubNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_URL", service_url)
    monkeypatch.setenv("POLAR_TOKEN", TOKEN)
    node.metrics = {"backends": ["local"]}
    said = "storm waits: no node that is up runs the backend 'dokcer'; they run: local"

    def polar(*arguments: str, given: str | None = None) -> str:
        result = CliRunner().invoke(app, list(arguments), input=given)
        assert result.exit_code == 0, result.output
        return " ".join(result.stderr.split())

    with Client(service_url, TOKEN) as client:
        while client.nodes()[0]["metrics"].get("backends") is None:
            time.sleep(0.02)
        assert said in polar("submit", "-", given=orjson.dumps(task("storm", 2, runtime={"backend": "dokcer"})).decode())
        assert said in polar("status", "storm")
        assert said in polar("status")
        command = [sys.executable, "-m", "polar.cli", "wait", "storm"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            heard = ""
            while said not in " ".join(heard.split()):
                line = waiting.stderr.readline()
                assert line, heard
                heard += line
            client.cancel("storm")
            waiting.communicate(timeout=60)
    assert waiting.returncode == 1


async def test_a_submission_that_is_repeated_is_one_task(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), AsyncClient(url, TOKEN) as polar, http(url) as raw:
        assert await polar.submit(task(), idempotency_key="k") == "t"
        assert await polar.submit(task(), idempotency_key="k") == "t"
        with pytest.raises(RolloutError) as refused:
            await polar.submit(task())
        assert refused.value.code == "task_running"
        assert isinstance(raw, httpx.AsyncClient)
        await submit(raw, "other")


@pytest.mark.parametrize(("options", "runtime"), [((), None), (("--runtime", "docker"), "docker")])
def test_a_run_at_a_service_leaves_the_runtime_to_its_nodes(
    service_url: str, node: StubNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], runtime: str | None
) -> None:
    monkeypatch.setenv("POLAR_TOKEN", TOKEN)
    where = ["--url", service_url, "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["run", "--tasks", "demo", "--limit", "1", "--samples", "1", "--json", *where, *options])
    assert result.exit_code == 0, result.output
    asked = node.dispatched[-1].runtime
    assert asked is not None
    assert asked.model_dump().get("backend") == runtime
