"""Callers whose tasks are refused in part, and what they give that is no task, no file and no URL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from service_parts import task
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.errors import ConfigError, RolloutError
from polar.rollout.campaign import Campaign, carry_out
from polar.rollout.client import AsyncClient, Client
from polar.rollout.models import SessionDispatchRequest, SessionResult, TaskRequest
from polar.testing.node import StubNode
from polar.testing.rollout import TOKEN, stub_rollouts


async def never(request: SessionDispatchRequest) -> SessionResult | None:
    return None


async def test_tasks_before_one_that_is_refused_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TOKEN", TOKEN)
    async with stub_rollouts(tmp_path, [StubNode()]) as (_, url):
        given = orjson.dumps([task("a"), task("b", builder={"strategy": "none such"})]).decode()
        result = await asyncio.to_thread(CliRunner().invoke, app, ["submit", "-", "--url", url], input=given)
    assert isinstance(result.exception, RolloutError)
    assert "a submitted" in result.stderr


async def test_what_a_service_took_of_a_run_is_cancelled_where_it_refuses_the_rest(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path, [StubNode(play=never)]) as (_, url), AsyncClient(url, TOKEN) as polar:
        await polar.submit(task("mine"))
        requests = [TaskRequest.model_validate(task(name)) for name in ("a", "b", "mine")]
        with pytest.raises(RolloutError, match="is running"):
            await carry_out(polar, Campaign(tuple(requests)))
        states = [await polar.task(name) for name in ("a", "b")]
        assert [status.status for status in states] == ["failed", "failed"]
        assert [status.counts for status in states] == [{"cancelled": 1, "open": 0}] * 2
        assert (await polar.task("mine")).status == "running"  # it is somebody else's


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"- task_id: 2026-13-45\n", b"{"])
def test_a_file_that_holds_no_tasks_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["submit", str(file), "--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ConfigError), result.exception
    assert str(file) in str(result.exception)


def test_settings_of_a_gateway_with_a_date_that_is_none_are_named(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("port: 2026-13-45\n")
    result = CliRunner().invoke(app, ["gateway", "--config", str(file)])
    assert isinstance(result.exception, ConfigError), result.exception
    assert str(file) in str(result.exception)


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:99999", "here", "ftp://127.0.0.1", "http://"])
def test_what_is_no_url_of_a_service_is_said_at_once(url: str) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="is no URL of a rollout service"):
            client(url, TOKEN)
