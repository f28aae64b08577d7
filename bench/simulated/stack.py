"""The processes of a run: service, node, engine and agents, each its own, and what each of them uses of CPU and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from polar.engine.models import resolve
from polar.rollout.client import AsyncClient
from polar.sockets import free_port

BENCH = Path(__file__).resolve().parent.parent
START_S = 240.0
MODEL = resolve("tiny-qwen3")
"""Whose tokenizer and chat template the engine has."""


@dataclass
class Running:
    """A stack that serves. `processes` by what they are."""

    folder: Path
    client: AsyncClient
    http: aiohttp.ClientSession
    engine_url: str
    processes: dict[str, psutil.Process]
    _cpu: dict[str, float] = field(default_factory=dict)

    def start_cpu(self) -> None:
        """From now on `cpu_s` counts."""
        self._cpu = self._cpu_now()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process since `start_cpu`, user and system, its children's too (but for the client, whose children are the
        others)."""
        return {name: value - self._cpu.get(name, 0.0) for name, value in self._cpu_now().items()}

    def memory(self, name: str) -> int:
        """Bytes that are this process's own (its resident pages that no other shares)."""
        return int(self.processes[name].memory_full_info().uss)

    def peak(self, name: str) -> int:
        """Bytes: the most that was resident since its start."""
        text = Path(f"/proc/{self.processes[name].pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))

    async def engine(self, **asked: Any) -> dict[str, Any]:
        """What the engine's slots did; with arguments they are set anew."""
        method = "POST" if asked else "GET"
        async with self.http.request(method, f"{self.engine_url}/simulated", json=asked or None) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    def _cpu_now(self) -> dict[str, float]:
        found = {}
        for name, process in self.processes.items():
            times = process.cpu_times()
            found[name] = times.user + times.system
            if name == "client":
                continue
            found[name] += times.children_user + times.children_system
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    own = child.cpu_times()
                    found[name] += own.user + own.system
        return found


@asynccontextmanager
async def running(folder: Path, *, node: dict[str, Any], gateway: dict[str, Any] | None = None) -> AsyncIterator[Running]:
    """A service and a node with these settings (`NodeConfig`) before a simulated engine, all in `folder`. Nothing is left at the end."""
    folder.mkdir(parents=True)  # noqa: ASYNC240
    ports = {name: free_port() for name in ("engine", "service", "model", "control")}
    agents_socket = folder / "agents.sock"
    engine_url, service_url = f"http://127.0.0.1:{ports['engine']}", f"http://127.0.0.1:{ports['service']}"
    token = secrets.token_urlsafe(16)
    settings = {
        "rollout": {
            "port": ports["service"],
            "store": str(folder / "rollout.db"),
            "save_dir": str(folder / "results"),
            "token": token,
        },
        "gateway": {
            "rollout_server_url": service_url,
            "heartbeat_interval_seconds": 2.0,
            "nodes": [
                {
                    "id": "bench",
                    "port": ports["model"],
                    "control_port": ports["control"],
                    "engines": {"default": {"urls": [engine_url], "tokenizer": str(MODEL), "renderer": "qwen3"}},
                    "gateway": {"store": str(folder / "polar.db"), "shutdown_s": 1.0, **(gateway or {})},
                    "work_dir": str(folder / "work"),
                    "artifacts_dir": str(folder / "artifacts"),
                    **node,
                }
            ],
        },
    }
    config = folder / "polar.yaml"
    config.write_bytes(orjson.dumps(settings))
    polar = [sys.executable, "-m", "polar.cli"]
    commands = {
        "engine": [sys.executable, "-m", "simulated.engine", "--port", str(ports["engine"]), "--tokenizer", str(MODEL)],
        "agents": [sys.executable, "-m", "simulated.agents", "--socket", str(agents_socket)],
        "service": [*polar, "serve_rollout", "--config", str(config)],
        "node": [*polar, "serve_gateway", "--config", str(config), "--node-id", "bench"],
    }
    environment = {
        **os.environ,
        "POLAR_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH")))),
        "SIMULATED_AGENTS": str(agents_socket),
    }
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                children[name] = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            if name in ("engine", "service"):
                await _listens(ports[name], folder / f"{name}.log", children[name])
        timeout = aiohttp.ClientTimeout(total=60)
        async with AsyncClient(service_url, token) as client, aiohttp.ClientSession(timeout=timeout) as http:
            await _registered(client, folder / "node.log", children["node"])
            processes = {name: psutil.Process(child.pid) for name, child in children.items()}
            yield Running(folder, client, http, engine_url, {**processes, "client": psutil.Process()})
    finally:
        for name in ("node", "service", "agents", "engine"):
            if name in children:
                await asyncio.to_thread(_end, children[name])


async def _listens(port: int, log: Path, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        except OSError:
            _check(child, log, deadline)
            await asyncio.sleep(0.1)


async def _registered(client: AsyncClient, log: Path, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not await client.nodes():
        _check(child, log, deadline)
        await asyncio.sleep(0.1)


def _check(child: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    if child.poll() is not None or time.monotonic() > deadline:
        raise SystemExit(f"{log.stem} did not come up; its log ends with:\n{log.read_text(errors='replace')[-2000:]}")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
