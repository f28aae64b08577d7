"""Reads the system prompt and the tools that a harness CLI really sends, by running it against a server on loopback.

Vendors' prompts stay out of the repository: the training script reads them from the installed CLIs, here, started exactly
as Polar starts them. Knows no tokens and no model.
"""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polar import dialects
from polar.chat import fold_system
from polar.harness import Endpoint, Options, install, run
from polar.harness.base import Dialect
from polar.tokens.rendering import to_renderer

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The first request of a CLI, in the body of `dialect`. `cwd` is the folder it ran in and `root` where it is installed: both stand in
    its prompt."""

    body: JsonObject
    cwd: str
    root: str
    dialect: Dialect = "openai_chat"

    def opening(self) -> tuple[list[JsonObject], list[JsonObject]]:
        """The messages before the instruction and the tools, in the renderer's form, as the gateway makes them of this request."""
        speaker = dialects.registered()[self.dialect]
        path = {"openai_chat": "/v1/chat/completions", "openai_responses": "/v1/responses"}[self.dialect]
        route = speaker.route("POST", path, {}, {})
        assert route is not None
        request = speaker.parse(self.body, route)
        return to_renderer(fold_system(request.messages))[:-1], [dict(tool.schema()) for tool in request.tools]

    def texts(self) -> list[str]:
        """What a model reads of it: the messages' texts and the tools as JSON, without the ids and paths of this one run."""
        messages = self.body.get("messages") or self.body["input"]
        texts = [text for message in messages for text in _texts(message.get("content"))]
        texts += [json.dumps(tool, ensure_ascii=False) for tool in self.body["tools"]]
        return [text.replace(self.root, "/root").replace(str(Path(self.cwd).parent), "/work") for text in texts]


class _Recorder(ThreadingHTTPServer):
    """Keeps the first JSON body and answers every request with a 400, on which a CLI gives up at once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body: JsonObject | None = None


class _Handler(BaseHTTPRequestHandler):
    server: _Recorder

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.body is None:
            self.server.body = json.loads(raw)
        answer = b'{"error":{"message":"recorded","type":"invalid_request_error","code":null}}'
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """The recorder says nothing."""


def record(name: str, dialect: Dialect, settings: JsonObject | None = None) -> Recorded:
    """Installs the harness if need be, runs it once under `settings` and returns its first request, in the body of `dialect`."""
    installation = install(name, progress=print)
    server = _Recorder()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}", "recording", dialect, "tiny-qwen3")
    try:
        with tempfile.TemporaryDirectory() as folder:
            cwd = Path(folder).resolve() / "work"
            ended = run(name, "Hello", endpoint, cwd, 120, home=Path(folder) / "home", options=Options(retries=0, settings=settings or {}))
    finally:
        server.shutdown()
        server.server_close()
    if server.body is None:
        raise RuntimeError(f"{name} sent no request: {ended.problem}")
    return Recorded(server.body, str(cwd), str(installation.folder), dialect)


def _texts(content: Any) -> list[str]:
    """The texts of a message's content: a string, or a list of parts."""
    return [content] if isinstance(content, str) else [part["text"] for part in content or () if "text" in part]
