"""Where a model is, and how soon it is said that it is nowhere: the hub is one on this machine, asked over HTTP."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

from polar.errors import ConfigError
from polar.train import place
from polar.train.checks import check
from polar.train.config import TrainConfig
from polar.train.place import check_place, is_hub_name, place_of, vocabulary_of
from polar.train.run import quiet_transformers

ANSWERS = {
    "/some/model/resolve/main/config.json": (200, {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": "2"}),
    "/some/gated/resolve/main/config.json": (401, {"X-Error-Code": "GatedRepo"}),
    "/some/gguf/resolve/main/config.json": (404, {"X-Error-Code": "EntryNotFound"}),
    "/some/broken/resolve/main/config.json": (503, {}),
}


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        status, headers = ANSWERS.get(self.path, (404, {"X-Error-Code": "RepoNotFound"}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing to tell."""


def point_at(port: int, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", f"http://127.0.0.1:{port}" + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What a hub is asked for."""
    paths: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Asked", (Hub,), {"asked": paths})) as server:
        point_at(server.server_port, monkeypatch, tmp_path / "cache")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield paths
        server.shutdown()
        thread.join()


def test_a_model_that_the_hub_has_is_asked_for_once(asked: list[str]) -> None:
    check_place("some/model")
    assert asked == ["/some/model/resolve/main/config.json"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("some/modle", "has no model of that name"),
        ("some/gated", "only to whom it knows: ask for it there"),
        ("some/gguf", r"has no config\.json"),
        ("some/broken", r"did not give it: .*503.* Download it where there is a network"),
        ("no -- name", "can be called that"),
    ],
)
def test_what_the_hub_does_not_have_is_said_after_one_request(name: str, said: str, asked: list[str]) -> None:
    with pytest.raises(ConfigError, match=said):
        check_place(name)
    assert len(asked) <= 1


def test_a_hub_that_is_not_there_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        point_at(nobody.getsockname()[1], monkeypatch, tmp_path / "cache")
        with pytest.raises(ConfigError, match=r"some/model is no folder here, and the Hugging Face hub did not give it: .*refused"):
            check_place("some/model")
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(place, "HUB_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        point_at(silent.getsockname()[1], monkeypatch, tmp_path / "cache")
        with pytest.raises(ConfigError, match="did not give it: "):
            check_place("some/model")


def test_what_was_kept_of_the_hub_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commit = "0" * 40
    kept = tmp_path / "cache" / "models--some--model"
    (kept / "snapshots" / commit).mkdir(parents=True)
    (kept / "snapshots" / commit / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    point_at(1, monkeypatch, tmp_path / "cache")
    check_place("some/model")


def test_the_run_and_its_dry_run_ask_the_hub_where_the_engine_is_elsewhere(asked: list[str]) -> None:
    given = {"tasks": "demo", "engine": "http://127.0.0.1:1"}
    check(TrainConfig.model_validate({"model": "some/model", **given}))
    with pytest.raises(ConfigError, match=r"model: tiny-qwen is no folder here, .* no model of that name.*; is tiny-qwen3 meant\?"):
        check(TrainConfig.model_validate({"model": "tiny-qwen", **given}))
    with pytest.raises(ConfigError, match="model: there is no folder models/qwen/3"):
        check(TrainConfig.model_validate({"model": "models/qwen/3", **given}))


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    assert is_hub_name("some/model")
    assert not any(map(is_hub_name, ("some", "./model", "/model", "~/model", "a/b/c")))
    assert (Path(place_of("tiny-qwen3")) / "config.json").is_file()
    assert place_of("some/model") == "some/model"


def test_the_vocabulary_is_what_a_config_says(tmp_path: Path) -> None:
    def said(text: str) -> int | None:
        (tmp_path / "config.json").write_text(text)
        return vocabulary_of(tmp_path)

    assert vocabulary_of(tmp_path / "nowhere") is None
    assert said('{"vocab_size": 61}') == 61
    assert said('{"text_config": {"vocab_size": 62}}') == 62
    assert [said(text) for text in ("{}", "[]", "no JSON", '{"vocab_size": "many"}', '{"text_config": 3}')] == [None] * 5


def test_what_the_hubs_client_warns_of_is_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Root(logging.Handler):  # caplog also sees what a logger keeps from the root
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    quiet_transformers()
    logger = logging.getLogger("huggingface_hub")
    assert logger.handlers  # its own
    monkeypatch.setattr(logging.getLogger(), "handlers", [Root()])
    logger.warning("again in a second")
    assert not told
    logging.getLogger("another").warning("once")
    assert told == ["once"]
