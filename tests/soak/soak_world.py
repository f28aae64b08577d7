"""The whole system under test: a rollout service and two nodes as processes of their own, kept running; lines between all of them; the
scripted engine in this process, which is where a plan's moments are seen and its faults strike."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_parts import Disk, Kept, Line, Receiver, agents_of, first_of_namespace
from soak_plan import DISKS, Fault, Plan, Task

from polar.rollout.client import AsyncClient
from polar.runtime.owner import root_mark
from polar.sockets import free_port
from polar.testing.engine import Call, Reply, serve_scripted

HEARTBEAT_S, LEASE_S = 0.5, 4.0
ENGINE_TIMEOUT_S = 6.0
HANG_S = 16.0
"""The agent's time of those that never end: twice what an engine is stalled for, so that the calls before are made."""
LONG_S = 240.0
TOKEN = "soak-token"
_AGENT = Path(__file__).with_name("soak_agent.py")


@dataclass
class Node:
    """One node: its process, its disk, and the lines from and to it."""

    name: str
    disk: Disk
    engine: Line
    to_service: Line
    from_service: Line
    process: Kept

    @property
    def sandboxes(self) -> Path:
        return self.disk.folder / "work" / "sandboxes"

    @property
    def store(self) -> Path:
        return self.disk.folder / "polar.db"

    @property
    def mark(self) -> str:
        return f"{root_mark(self.sandboxes)}-"


@dataclass
class World:
    plan: Plan
    folder: Path
    tokenizer_dir: Path
    service: Kept
    service_port: int
    service_disk: Disk
    nodes: list[Node] = field(default_factory=list)
    receiver: Receiver = field(default_factory=Receiver)
    struck: list[tuple[float, Fault, str]] = field(default_factory=list)
    """Faults in the order in which they struck, with seconds since the start and the node that it was at."""
    calls: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often the engine was asked for a task's call of that number."""
    began: float = field(default_factory=time.monotonic)
    say: Callable[[str], None] = lambda line: None
    _waiting: set[Fault] = field(default_factory=set)
    _mending: list[asyncio.Task[None]] = field(default_factory=list)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service_port}"

    @property
    def witness(self) -> Path:
        return self.folder / "witness"

    def client(self) -> AsyncClient:
        return AsyncClient(self.url, TOKEN, patience_s=120.0)

    def request(self, task: Task) -> dict[str, Any]:
        """The task as it is submitted."""
        agent = task.agent
        told = {**{name: getattr(agent, name) for name in ("kind", "turns", "of", "dialect", "stream")}, "task": task.number}
        command = f"exec python3 /soak/soak_agent.py {shlex.quote(json.dumps({**told, 'witness': '/witness'}))} soak-task-{task.number}"
        return {
            "task_id": task.name,
            "instruction": f"This is task {task.number}.",
            "num_samples": task.samples,
            "timeout_seconds": HANG_S if agent.kind == "hangs" else LONG_S,
            "budget": {"max_turns": agent.turns} if agent.kind == "goes_on" else {},
            "max_attempts": 2 if agent.doomed else 20,
            "on_policy_failure": task.on_policy_failure,
            "runtime": {
                "backend": task.backend,
                "mounts": [
                    {"source": str(self.folder / "agent"), "target": "/soak"},
                    {"source": str(self.witness), "target": "/witness", "read_only": False},
                ],
            },
            "agent": {"custom_shell": command},
            "evaluator": {"strategy": "command", "config": {"command": 'cp progress "$VERIFIER_LOGS/reward.txt"'}},
            "callback_url": self.receiver.url,
            "session_callbacks": True,
        }

    async def stop(self) -> None:
        """Mends what is broken, and ends everything as an operator would; disks stay until the test has looked at them."""
        for task in self._mending:
            task.cancel()
        await asyncio.gather(*self._mending, return_exceptions=True)
        lines = [line for node in self.nodes for line in (node.engine, node.to_service, node.from_service)]
        for disk in (self.service_disk, *(node.disk for node in self.nodes)):
            disk.free()
        for line in lines:
            await line.mend()
        await asyncio.gather(*(node.process.stop() for node in self.nodes))
        await self.service.stop()
        await self.receiver.stop()
        for line in lines:
            await line.refuse()

    # --- what the engine samples -------------------------------------------------------------------------------

    def script(self, node: str) -> Callable[[Call], Any]:
        async def answer(call: Call) -> Reply:
            text = call.text
            found = re.search(r"This is task (\d+)\.", text)
            if found is None:
                return Reply(text="ok")
            task, number = int(found[1]), text.count("<|im_start|>assistant")
            told = asyncio.run_coroutine_threadsafe(self._moment(task, number, node), self._loop)
            hold = await asyncio.shield(asyncio.wrap_future(told))
            if hold:  # whoever asked is dead: an answer would come too late in one run, and in time in another
                await asyncio.sleep(60)
            return Reply(text=f"That was call {number} of task {task}: nonce-{task}-{number}-{secrets.token_hex(6)}")

        return answer

    async def _moment(self, task: int, number: int, node: str) -> bool:
        """Strikes if this is a planned moment. True: the call is to stay without an answer."""
        self.calls[task, number] += 1
        hold = False
        for fault in self.plan.faults:
            if (fault.task, fault.call) != (task, number) or (fault in self._waiting and not fault.always):
                continue
            self._waiting.add(fault)
            hold |= await self._strike(fault, next(one for one in self.nodes if one.name == node))
        return hold

    async def _strike(self, fault: Fault, node: Node) -> bool:
        if fault.kind == "harness_killed":
            killed = agents_of(fault.task, node.mark)
            for pid in killed:
                _kill(pid)
            self._note(fault, node.name if killed else f"{node.name}: it was gone")
            return True
        if fault.kind == "sandbox_killed":
            first = next(filter(None, map(first_of_namespace, agents_of(fault.task, node.mark))), None)
            if first is not None:
                _kill(first)
            self._note(fault, node.name if first else f"{node.name}: it was gone")
            return True
        began = asyncio.Event()
        mending = asyncio.create_task(self._alone(fault, node, began))
        mending.add_done_callback(lambda task: began.set())
        self._mending.append(mending)
        await began.wait()
        return False

    async def _alone(self, fault: Fault, node: Node, began: asyncio.Event) -> None:
        """What one fault broke is whole again before the next strikes, so that a log can be read."""
        async with self._one_at_a_time:
            self._note(fault, node.name)
            await self._break(fault, node, began)

    def _note(self, fault: Fault, where: str) -> None:
        at = time.monotonic() - self.began
        self.struck.append((at, fault, where))
        self.say(f"{at:6.1f} s  {fault.kind} at call {fault.call} of task {fault.task} ({where})")

    async def mended(self) -> None:
        """Waits for the end of all that was broken; raises what went wrong in breaking it."""
        await asyncio.gather(*self._mending)

    async def _break(self, fault: Fault, node: Node, began: asyncio.Event) -> None:
        match fault.kind:
            case "node_killed":
                await node.process.kill()
            case "node_gone":
                await node.process.kill(again=False)
                began.set()
                await asyncio.sleep(1.5 * LEASE_S)
                node.process.start()
            case "node_paused":
                node.process.pause()
                began.set()
                await asyncio.sleep(1.5 * LEASE_S)
                node.process.go_on()
            case "service_killed":
                await self.service.kill()
            case "service_paused":
                self.service.pause()
                began.set()
                await asyncio.sleep(1.5 * LEASE_S)
                self.service.go_on()
            case "engine_refused":
                for one in self.nodes:
                    await one.engine.refuse()
                began.set()
                await asyncio.sleep(2.0)
                for one in self.nodes:
                    await one.engine.mend()
            case "engine_stalled":
                for one in self.nodes:
                    one.engine.stall()
                began.set()
                await asyncio.sleep(1.3 * ENGINE_TIMEOUT_S)
                for one in self.nodes:
                    await one.engine.mend()
            case "link_stalled" | "link_refused":
                lines = (node.to_service, node.from_service)
                for line in lines:
                    if fault.kind == "link_stalled":
                        line.stall()
                    else:
                        await line.refuse()
                began.set()
                await asyncio.sleep(1.5 * LEASE_S)
                for line in lines:
                    await line.mend()
            case "disk_full_node" | "disk_full_service":
                disk = node.disk if fault.kind == "disk_full_node" else self.service_disk
                await asyncio.to_thread(disk.fill)
                began.set()
                await asyncio.sleep(4.0)
                await asyncio.to_thread(disk.free)
            case "receiver_down" | "receiver_forgetful":
                self.receiver.mood = fault.kind.removeprefix("receiver_")
                began.set()
                await asyncio.sleep(4.0)
                self.receiver.mood = "up"
            case _:
                raise AssertionError(fault.kind)


@asynccontextmanager
async def world(plan: Plan, folder: Path, tokenizer_dir: Path, *, say: Callable[[str], None] = lambda line: None) -> AsyncIterator[World]:
    """Started, with both nodes registered. At its end everything is stopped and its disks are gone, whatever the test found."""
    _make_folders(folder)
    small = 192 if any(fault.kind in DISKS for fault in plan.faults) else None
    env = {**os.environ, "POLAR_HOME": str(folder / "state")}
    with ExitStack() as disks:
        service_disk = Disk(folder / "service", small)
        disks.callback(service_disk.close)
        service_port = free_port()
        settings = folder / "service.json"
        service = Kept("service", ["serve_rollout", "--config", str(settings)], folder / "logs" / "service.log", env)
        found = World(plan, folder, tokenizer_dir, service, service_port, service_disk, say=say)
        settings.write_text(json.dumps(_service_settings(found)))
        with ExitStack() as engines:
            for name in ("a", "b"):
                server = engines.enter_context(serve_scripted(found.script(name), tokenizer_dir=tokenizer_dir))
                disk = Disk(folder / f"node-{name}", small)
                disks.callback(disk.close)
                found.nodes.append(_node(found, name, disk, int(server.url.rsplit(":", 1)[1]), tokenizer_dir, env))
            try:
                await found.receiver.start()
                service.start()
                for node in found.nodes:
                    for line in (node.engine, node.to_service, node.from_service):
                        await line.mend()
                    node.process.start()
                await _up(found)
                found.began = time.monotonic()
                yield found
            finally:
                await found.stop()


def _make_folders(folder: Path) -> None:
    folder.chmod(0o755)
    for name in ("agent", "witness", "logs", "state"):
        (folder / name).mkdir()
    (folder / "witness").chmod(0o777)
    (folder / "agent" / _AGENT.name).write_text(_AGENT.read_text())


def _service_settings(world: World) -> dict[str, Any]:
    return {
        "rollout": {
            "port": world.service_port,
            "token": TOKEN,
            "store": str(world.service_disk.folder / "rollout.db"),
            "save_dir": str(world.service_disk.folder / "rollouts"),
            "lease_seconds": LEASE_S,
            "callback_grace_seconds": 10.0,
            "dispatch_poll_interval_seconds": 0.2,
            "callback_retry": {"first_seconds": 0.2, "longest_seconds": 1.0},
        }
    }


def _node(world: World, name: str, disk: Disk, engine_port: int, tokenizer_dir: Path, env: dict[str, str]) -> Node:
    port, control_port = free_port(), free_port()
    lines = [Line(target) for target in (engine_port, world.service_port, control_port)]
    settings = {
        **_service_settings(world),
        "gateway": {
            "heartbeat_interval_seconds": HEARTBEAT_S,
            "rollout_server_url": lines[1].url,
            "nodes": [
                {
                    "id": name,
                    "port": port,
                    "control_port": control_port,
                    "public_url": lines[2].url,
                    "work_dir": str(disk.folder / "work"),
                    "artifacts_dir": str(disk.folder / "artifacts"),
                    "engines": {
                        "default": {
                            "urls": [lines[0].url],
                            "tokenizer": str(tokenizer_dir),
                            "renderer": "qwen3",
                            "timeout_s": ENGINE_TIMEOUT_S,
                        }
                    },
                    "gateway": {"store": str(disk.folder / "polar.db"), "render_process": False, "shutdown_s": 1.0, "grace_s": 1.0},
                    "max_init_workers": 3,
                    "max_run_workers": 6,
                    "max_postrun_workers": 3,
                    "init_seconds": 120,
                    "evaluation_seconds": 120,
                }
            ],
        },
    }
    file = world.folder / f"node-{name}.json"
    file.write_text(json.dumps(settings))
    process = Kept(name, ["serve_gateway", "--config", str(file), "--node-id", name], world.folder / "logs" / f"node-{name}.log", env)
    return Node(name, disk, *lines, process)


async def _up(world: World) -> None:
    async with world.client() as client:
        try:
            async with asyncio.timeout(120):
                while len(await client.nodes()) < len(world.nodes):  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.2)
        except TimeoutError:
            logs = "\n".join(one.tail() for one in (world.service, *(node.process for node in world.nodes)))
            raise AssertionError(f"the nodes did not come up:\n{logs}") from None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        print(f"process {pid} was gone", file=sys.stderr)
