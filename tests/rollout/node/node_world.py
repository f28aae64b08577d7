"""A whole node around fakes of the real edges: a scripted engine and scripted sandboxes; gateway, store, sockets and disk are real.

The agent program obeys its instruction, line by line: `call`, `call N` (it ends with 3 where one is refused), `swallow` (a call whose
refusal it does not mind), `break` (a call that the engine refuses), `print TEXT`, `sleep S`, `exit CODE`, `steal` (prints its key).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.errors import EngineUnavailable, EvaluatorError
from polar.evaluator import Evaluator, Evidence, Verdict, register
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.rollout.config import NodeConfig, Retry
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.node import Node, serving_node
from polar.testing import ScriptedEngine
from polar.testing.engine import Call, Reply, Script
from polar.testing.gateway import CachedServed
from polar.testing.runtime import Answer, Command, FakeRuntime
from polar.testing.serve import serve_app

AGENT = "fake-agent"
WORK = "Work."
BREAK = " Break."


async def agent(command: Command) -> Answer | int:
    """What happens in the sandboxes: the agent program obeys, git is missing, everything else succeeds."""
    if command.line.startswith("git"):
        return 127
    if AGENT not in command.line:
        return 0
    said: list[str] = []
    exit_code = 0
    async with aiohttp.ClientSession() as http:
        for line in (command.stdin or b"").decode().splitlines():
            verb, _, rest = line.partition(" ")
            if verb in ("call", "break"):
                for _ in range(int(rest or 1)):
                    status = await call(http, command.env, BREAK if verb == "break" else "")
                    if status != 200:
                        said.append(f"status {status}")
                        exit_code = 3
                        break
            elif verb == "swallow":
                said.append(f"status {await call(http, command.env)}")
            elif verb == "print":
                said.append(rest)
            elif verb == "steal":
                said.append("key " + command.env["OPENAI_API_KEY"])
            elif verb == "sleep":
                await asyncio.sleep(float(rest))
            elif verb == "exit":
                exit_code = int(rest)
            if exit_code:
                break
    return Answer(exit_code, "\n".join(said).encode())


async def call(http: aiohttp.ClientSession, env: Any, more: str = "") -> int:
    body = {"model": "any", "messages": [{"role": "user", "content": WORK + more}], "max_tokens": 20}
    headers = {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
    async with http.post(f"{env['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


class VerdictConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reward: float = 1.0
    fail: str | None = None
    sleep_s: float = 0.0
    fresh: int = 0
    rows: list[float | None] = []
    metrics: dict[str, float] = {"passed": 2.0}


@register
class TestVerdict(Evaluator[VerdictConfig]):
    """Says what it is told to, and remembers what it was shown."""

    __test__ = False
    name = "node_test"
    Config = VerdictConfig
    seen: list[Evidence] = []  # noqa: RUF012 - a test reads it

    async def evaluate(self, evidence: Evidence) -> Verdict:
        type(self).seen.append(evidence)
        for _ in range(self.config.fresh):
            async with evidence.fresh() as runtime:
                await runtime.exec("true")
        await asyncio.sleep(self.config.sleep_s)
        if self.config.fail is not None:
            raise EvaluatorError(self.config.fail)
        return Verdict(self.config.reward, tuple(self.config.rows), self.config.metrics, {"said": "well done"})


def dispatch(instruction: str = "call", session: str = "ses_1", **fields: Any) -> SessionDispatchRequest:
    return SessionDispatchRequest.model_validate(
        {
            "session_id": session,
            "task_id": "task",
            "instruction": instruction,
            "remaining_timeout_seconds": 20.0,
            "agent": {"custom_shell": AGENT},
            "evaluator": {"strategy": "node_test"},
            **fields,
        }
    )


@dataclass
class Receiver:
    """A rollout service as a node sees it: every post is kept; `answers` decides what it says to results."""

    url: str = ""
    posts: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    answer: Callable[[Any], int] = lambda result: 200
    known: bool = True
    orders: dict[str, list[str]] = field(default_factory=dict)
    up: bool = True

    def of(self, path: str) -> list[Any]:
        return [body for at, body, _ in self.posts if at.startswith(path)]

    @property
    def results(self) -> list[Any]:
        return self.of("/callbacks/session_result")

    def app(self) -> Starlette:
        async def post(request: Request) -> Response:
            body = await request.json()
            path = request.url.path
            if not self.up:
                return Response(status_code=503)
            self.posts.append((path, body, dict(request.headers)))
            if path.endswith("/heartbeat"):
                orders, self.orders = self.orders, {}
                return JSONResponse(orders or {"status": "ok"}, 200 if self.known else 404)
            if path == "/nodes/register":
                self.known = True
            if path == "/callbacks/session_result" or path == "/hook":
                return Response(status_code=self.answer(body))
            return JSONResponse({})

        return Starlette(routes=[Route("/{path:path}", post, methods=["POST"])])


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    with serve_app(receiver.app()) as running:
        receiver.url = running.url
        yield receiver


@dataclass
class World:
    """A node in a folder. Entering it again is a restart over what the last process left."""

    folder: Path
    tokenizer_dir: Path
    script: Script
    settings: dict[str, Any] = field(default_factory=dict)
    gateway_settings: dict[str, Any] = field(default_factory=dict)
    store: Any = None
    engine: ScriptedEngine | None = None
    calls: int = 0
    """Calls of agents so far: the gateway's own check at start is none."""

    def play(self, call: Call) -> Any:
        """The script, which counts agents' calls only."""
        if WORK not in call.text:
            return "Checked."
        if BREAK in call.text:
            return Reply(error=EngineUnavailable("it went away"))
        self.calls += 1
        assert callable(self.script)
        return self.script(replace(call, number=self.calls - 1))

    def config(self) -> NodeConfig:
        return NodeConfig.model_validate(
            {
                "id": "node-1",
                "port": 0,
                "work_dir": str(self.folder / "work"),
                "artifacts_dir": str(self.folder / "artifacts"),
                "default_runtime": {"backend": "fake"},
                **self.settings,
            }
        )

    @asynccontextmanager
    async def node(self, receiver: Receiver | None = None, *, service: tuple[str, str] | None = None) -> AsyncIterator[Node]:
        """`receiver` or `service` (URL and token) is who it is a node of."""
        FakeRuntime.script = staticmethod(agent)
        self.calls = 0
        self.engine = ScriptedEngine(self.play, tokenizer_dir=self.tokenizer_dir)
        engine = EngineConfig(urls=[], tokenizer=str(self.tokenizer_dir), renderer="qwen3")
        config = GatewayConfig.model_validate(
            {
                "engines": {"default": engine},
                "store": str(self.folder / "polar.db"),
                "port": 0,
                "admin_port": 0,
                "grace_s": 0.05,
                "shutdown_s": 0.2,
                **self.gateway_settings,
            }
        )
        gateway = Gateway(config, store=self.store, served={"default": CachedServed("default", engine, [self.engine])})
        async with serving_node(
            self.config(),
            gateway=gateway,
            service_url=service[0] if service else None if receiver is None else receiver.url,
            service_token=service[1] if service else "service-token",
            heartbeat_s=0.1,
            retry=Retry(first_seconds=0.05, longest_seconds=0.2),
        ) as node:
            yield node

    def left(self) -> list[str]:
        """Sandboxes' folders that are still there."""
        return [str(path) for path in (self.folder / "work" / "sandboxes").glob("*/*") if path.is_dir()]


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Waits for something to be true, and returns it."""
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)
        return found


async def result_of(node: Node, request: SessionDispatchRequest, timeout_s: float = 20.0) -> SessionResult:
    """The result of an attempt that is run to its end, as the node keeps it for whoever fetches it."""
    await node.dispatch(request)
    return await ended(node, request, timeout_s)


async def ended(node: Node, request: SessionDispatchRequest, timeout_s: float = 20.0) -> SessionResult:
    await until(lambda: node.books.find(request.session_id, request.attempt) is None, timeout_s)
    return await asyncio.to_thread(node.spool.result, request.attempt_id)
