"""A client written only from the reference system's schemas, in its JSON and over plain HTTP: it knows nothing of Polar. The same for a
gateway of its kind: it registers, tells metrics, takes sessions and calls results back."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polar.testing.rollout import listening, running_service

TASK = {
    "task_id": "polar-slime-0-3",
    "instruction": "Fix the failing test.",
    "num_samples": 4,
    "timeout_seconds": 1200.0,
    "runtime": {
        "backend": "docker",
        "image": "python:3.11",
        "prepare": [{"type": "exec", "command": "true", "cwd": "/", "env": {}}],
        "network": "bridge",
        "workdir": "/testbed",
        "env": {"A": "b"},
        "kwargs": {"volumes": []},
    },
    "agent": {"harness": "claude_code", "model_name": "gpt-5.4", "settings": {}, "env": {}, "mcp_servers": []},
    "builder": {"strategy": "prefix_merging", "config": {}},
    "evaluator": None,
    "callback_url": None,
    "metadata": {"group_id": "3", "policy_version": 0, "rollout_step": 0},
}
TRACE = {
    "prompt_ids": [1, 2],
    "response_ids": [3],
    "loss_mask": [1],
    "prompt_messages": [],
    "response_messages": [],
    "tools": None,
    "finish_reason": "stop",
    "response_logprobs": [-0.5],
    "reward": 1.0,
    "metadata": {},
}


def call(method: str, url: str, body: Any = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), {"content-type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Server:
    """`handle(path, body)` gives status and JSON."""

    def __init__(self, handle: Callable[[str, Any], tuple[int, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answer = handle(self.path, body)
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def roll_out(url: str) -> dict[str, Any]:
    """Everything that the reference's parts do, in one thread of plain calls."""
    told: dict[str, Any] = {"sessions": [], "callbacks": []}

    def gateway(path: str, body: Any) -> tuple[int, Any]:
        assert path == "/sessions"
        told["sessions"].append(body)
        result = {
            "session_id": body["session_id"],
            "task_id": body["task_id"],
            "status": "COMPLETED" if len(told["sessions"]) < 4 else "TIMEOUT",
            "trajectory": {"status": "COMPLETED", "metadata": {}, "traces": [TRACE], "error": None},
            "timing": {"register_to_init_queue_ms": 1.0, "init_ms": 2.0, "run_ms": 3.0, "postrun_ms": 4.0},
            "node_id": "gw",
            "error": None,
            "metadata": body["metadata"],
        }
        threading.Timer(0.05, lambda: told["callbacks"].append(call("POST", f"{url}/callbacks/session_result", result))).start()
        return 200, {"session_id": body["session_id"], "task_id": body["task_id"], "status": "REGISTERED", "node_id": "gw"}

    received = threading.Event()

    def callback(path: str, body: Any) -> tuple[int, Any]:
        told["result"] = body
        received.set()
        return 200, {}

    servers = [Server(gateway), Server(callback)]
    try:
        node = {
            "node_id": "gw",
            "gateway_url": servers[0].url,
            "max_init_workers": 4,
            "max_run_workers": 2,
            "max_postrun_workers": 4,
            "heartbeat_interval_seconds": 30,
        }
        assert call("POST", f"{url}/nodes/gw/heartbeat", {"metrics": {}})[0] == 404
        assert call("POST", f"{url}/nodes/register", node)[0] == 200
        metrics = dict.fromkeys(
            ("init_queue_depth", "init_inflight", "ready_depth", "run_inflight", "postrun_queue_depth", "postrun_inflight"), 0
        )
        assert call("POST", f"{url}/nodes/gw/heartbeat", {"metrics": metrics})[0] == 200
        told["submitted"] = call("POST", f"{url}/rollout/task/submit", {**TASK, "callback_url": f"{servers[1].url}/cb"})
        assert received.wait(20)
        told["status"] = call("GET", f"{url}/rollout/task/{TASK['task_id']}")
        told["nodes"] = call("GET", f"{url}/nodes")
        told["missing"] = call("GET", f"{url}/rollout/task/nope")
    finally:
        for server in servers:
            server.stop()
    return told


async def test_a_client_and_a_gateway_of_the_references_kind(tmp_path: Path) -> None:
    async with running_service(tmp_path, compat_open=True) as (service, _), listening(service.open_app) as url:
        told = await asyncio.to_thread(roll_out, url)
    assert told["submitted"] == (200, {"task_id": TASK["task_id"], "status": "running"})
    assert told["missing"][0] == 404
    assert told["nodes"][1]["nodes"][0]["node_id"] == "gw"
    assert [status for status, _ in told["callbacks"]] == [200] * 4
    dispatched = told["sessions"][0]
    same = ("task_id", "instruction", "metadata")
    assert {name: dispatched[name] for name in same} == {name: TASK[name] for name in same}
    assert dispatched["remaining_timeout_seconds"] == 1200.0
    assert dispatched["runtime"]["image"] == "python:3.11"
    assert dispatched["agent"]["harness"] == "claude-code"  # our spelling of theirs
    for body in (told["status"][1], told["result"]):
        assert body["task_id"] == TASK["task_id"]
        assert body["status"] == "completed"
        assert len(body["results"]) == len(body["result_paths"]) == 4
        for result in body["results"]:
            assert result["trajectory"]["traces"] == [TRACE]
            assert result["reward"] == 1.0  # the mean of its rows', where alone the reference says it
            assert result["timing"]["run_ms"] == 3.0
            assert result["metadata"] == TASK["metadata"]
    assert sorted(one["status"] for one in told["result"]["results"]) == ["COMPLETED"] * 3 + ["TIMEOUT"]
    assert told["status"][1]["total_sessions"] == told["status"][1]["completed_sessions"] == 4
