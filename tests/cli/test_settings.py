"""What `polar gateway` makes of a file and options: what stands on the command line holds, what is wrong is named in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.gateway import serve
from polar.gateway.config import EngineConfig, GatewayConfig, reachable

Polar = Callable[..., Any]
Parsed = Callable[..., GatewayConfig]


@pytest.fixture
def parsed(polar: Polar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parsed:
    """The settings that a command line (and a file of this text) would start a gateway with."""

    def run(*options: object, file: str | None = None) -> GatewayConfig:
        found: list[GatewayConfig] = []

        async def instead(config: GatewayConfig, *rest: object) -> None:
            found.append(config)

        monkeypatch.setattr(serve, "run_until_signal", instead)
        path = tmp_path / "polar.yaml"
        path.write_text(file or "")
        polar("gateway", *(["--config", path] if file is not None else []), *options)
        return found[0]

    return run


TWO = "default_engine: policy\nengines:\n  helper: {urls: ['http://h:1']}\n  policy: {urls: ['http://p:1'], bridging: false}\n"


def test_options_of_the_engine_go_over_the_files_default_engine(parsed: Parsed) -> None:
    options = ["--kind", "openai", "--mode", "messages", "--model", "m", "--tokenizer", "t", "--renderer", "qwen3"]
    config = parsed(*options, file=TWO)
    assert config.engines["helper"] == EngineConfig(urls=["http://h:1"])
    assert config.engines["policy"] == EngineConfig(
        urls=["http://p:1"], bridging=False, kind="openai", mode="messages", model="m", tokenizer="t", renderer="qwen3"
    )


def test_an_engine_on_the_command_line_is_the_files_default_engine(parsed: Parsed) -> None:
    config = parsed("--engine", "http://a:1", "--engine", "http://b:1", file=TWO)
    assert (config.default_engine, config.engines["policy"].urls) == ("policy", ["http://a:1", "http://b:1"])
    assert config.engines["policy"].bridging is False
    assert parsed("--engine", "http://a:1", file="default_engine: policy\n").engines["policy"].urls == ["http://a:1"]
    assert parsed("--engine", "http://a:1").engines == {"default": EngineConfig(urls=["http://a:1"])}


def test_without_options_the_file_holds(parsed: Parsed) -> None:
    config = parsed(file=TWO + "check: false\nport: 9000\nbudgets: {max_turns: 5, max_seconds: 9}\n")
    assert (config.check, config.port, config.budgets.max_turns) == (False, 9000, 5)
    config = parsed("--check", "--max-turns", "3", file=TWO + "check: false\nbudgets: {max_turns: 5, max_seconds: 9}\n")
    assert (config.check, config.budgets.max_turns, config.budgets.max_seconds) == (True, 3, 9)


def test_an_empty_section_sets_nothing(parsed: Parsed) -> None:
    assert parsed("--engine", "http://a:1", "--max-turns", "3", file="budgets:\n").budgets.max_turns == 3


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("engins: {}", "engins: there is no such setting; is engines meant?"),
        ("engines: {a: {url: 'http://a:1', urls: []}}", "engines.a.url: there is no such setting; is urls meant?"),
        ("engines: {a: {kind: vllm}}", "engines.a.urls: is missing"),
        ("budgets: {max_tokens: many}\nport: 99999", "budgets.max_tokens: Input should be a valid integer"),
        ("budgets: 3", "budgets: Input should be"),
        ("{}", "name the inference server"),
        ("engines:", "name the inference server"),
        ("- a", "must hold a mapping"),
    ],
)
def test_wrong_settings_are_named_in_plain_words(parsed: Parsed, file: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed("--max-turns", "3", file=file)
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert "validation error" not in str(caught.value)


def test_a_file_that_is_not_text_is_named(polar: Polar, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(ConfigError, match="binary is not text"):
        polar("gateway", "--config", tmp_path / "binary")


@pytest.mark.parametrize(
    "options", [("--port", 99999), ("--port", -1), ("--log-level", "foo"), ("--session", "x")], ids=lambda options: options[0]
)
def test_options_that_cannot_work_are_refused(polar: Polar, options: tuple[str, object]) -> None:
    assert options[0] in polar("gateway", *options, code=2).output


def test_a_log_level_may_be_written_large(parsed: Parsed) -> None:
    assert parsed("--engine", "http://a:1", "--log-level", "WARNING").engines


def test_the_last_port_leaves_none_for_the_control_api(parsed: Parsed) -> None:
    with pytest.raises(ConfigError, match="set admin_port"):
        parsed("--engine", "http://a:1", "--port", 65535)
    assert parsed("--engine", "http://a:1", "--port", 65535, file="admin_port: 0").control_port == 0


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("gpu-3", "gpu-3")],
)
def test_urls_name_an_address_that_can_be_reached(host: str, shown: str) -> None:
    assert reachable(host) == shown
    assert GatewayConfig(engines={}, host=host, port=8100).model_url == f"http://{shown}:8100"
