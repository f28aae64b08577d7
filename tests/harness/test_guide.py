"""The lines that `polar gateway` and `polar session` print."""

from __future__ import annotations

import subprocess

import pytest

from polar.cli.guide import context_of, guide, session_url
from polar.errors import ConfigError
from polar.testing import serve_app

ROOT = "http://127.0.0.1:1/s/KEY"


def test_the_lines_hold_the_engine_s_length_and_no_other() -> None:
    lines = guide(ROOT, "KEY", context=32_768)
    assert "32768" in lines
    assert "131072" not in lines


def test_a_length_that_nobody_knows_is_called_an_assumption() -> None:
    assert "131072 tokens are assumed" in guide(ROOT, "KEY")
    assert "assumed" not in guide(ROOT, "KEY", context=32_768)


@pytest.mark.parametrize("only", [None, "pi", "claude-code", "shell"])
def test_the_lines_are_a_valid_script(only: str | None) -> None:
    script = guide(ROOT, "KEY", only, context=8_192)
    assert subprocess.run(("sh", "-n"), input=script, text=True, check=False, timeout=10).returncode == 0


def test_pi_s_block_names_what_it_needs_and_how_to_run_it_without_an_installation() -> None:
    lines = guide(ROOT, "KEY", "pi", context=8_192)
    assert lines.startswith("# Pi (needs Node.js 22.19 or newer)")
    assert f'polar harness run pi "WHAT TO DO" --base-url {ROOT}' in lines


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "/v1beta"])
def test_a_provider_s_path_is_no_part_of_a_session_s_url(tail: str) -> None:
    assert session_url(ROOT + tail) == (ROOT, "KEY")


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:1", "http://127.0.0.1:1/s/", "127.0.0.1/s/KEY", "http://h/s/a/b"])
def test_another_url_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="/s/KEY"):
        session_url(wrong)


@pytest.mark.parametrize(("body", "found"), [(b'{"max_model_len": 4096}', 4096), (b'{"id": "m"}', None), (b"<html>", None), (b"[]", None)])
def test_the_length_is_asked_of_the_gateway(body: bytes, found: int | None) -> None:
    heard: list[tuple[str, str]] = []

    async def app(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        if scope["type"] == "http":
            heard.append((scope["path"], dict(scope["headers"])[b"authorization"].decode()))
            await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
            await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    with serve_app(app) as running:
        assert context_of(f"{running.url}/s/KEY", "KEY") == found
    assert heard == [("/s/KEY/v1/models/polar", "Bearer KEY")]


def test_a_gateway_that_does_not_answer_tells_no_length() -> None:
    assert context_of("http://127.0.0.1:1/s/KEY", "KEY") is None
