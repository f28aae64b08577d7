"""A simulated inference server: vLLM's wire as Polar's own engine speaks it, and a sampler that waits instead of computing.

A call holds one of `slots` for as long as its prompt says (`work 0.25`, the last one counts), calls beyond that wait in order. `work hold`
holds until it is let go. `GET /simulated` tells what the slots did; `POST /simulated` sets them, forgets the past and lets go.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections import deque
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.engine.server import Server
from polar.testing.engine import Call, Reply, ScriptedBackend, text_of

WORK = re.compile(r"work (hold|[0-9.]+)")
ANSWER = "I have read the file and changed the line that was wrong. Next I run the tests."


class Slots:
    """Places for calls, with the integral of their use over time. `None`: as many as are asked for."""

    def __init__(self) -> None:
        self.capacity: int | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.used = 0
        self.reset(None)

    def reset(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.busy_s = self.asked_s = 0.0
        """Slot seconds that were used, and those that ended calls had asked for: what is more is this machine being late."""
        self.calls = 0
        self.peak = self.peak_asked = self.used
        self.began: float | None = None
        """When the first call came."""
        self._at = time.monotonic()

    def settle(self) -> None:
        now = time.monotonic()
        self.busy_s += self.used * (now - self._at)
        self._at = now

    async def take(self) -> None:
        if self.began is None:
            self.began = time.monotonic()
        self.calls += 1
        if self.capacity is not None and self.used >= self.capacity:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self.peak_asked = max(self.peak_asked, self.used + len(self._waiting))
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self.give_back()
                raise
            return
        self.settle()
        self.used += 1
        self.peak = max(self.peak, self.used)
        self.peak_asked = max(self.peak_asked, self.used)

    def give_back(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        self.settle()
        self.used -= 1


class Simulation:
    """The script behind the server, and the control route beside it."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.let_go = asyncio.Event()
        self.held = 0

    async def play(self, call: Call) -> Reply:
        found = WORK.findall(call.text)
        if not found:  # the gateway's own check of its engine
            return Reply(text="Blue.")
        if found[-1] == "hold":
            self.held += 1
            try:
                await self.let_go.wait()
            finally:
                self.held -= 1
            return Reply(text=ANSWER)
        await self.slots.take()
        try:
            await asyncio.sleep(float(found[-1]))
            self.slots.asked_s += float(found[-1])
        finally:
            self.slots.give_back()
        return Reply(text=ANSWER)

    async def route(self, request: Request) -> Response:
        slots = self.slots
        if request.method == "POST":
            asked = await request.json()
            if "slots" in asked:
                slots.reset(asked["slots"])
            if asked.get("let_go"):
                self.let_go.set()
                self.let_go = asyncio.Event()
        slots.settle()
        now = time.monotonic()
        return JSONResponse(
            {
                "now": now,
                "began": slots.began,
                "busy_s": slots.busy_s,
                "asked_s": slots.asked_s,
                "used": slots.used,
                "calls": slots.calls,
                "peak": slots.peak,
                "peak_asked": slots.peak_asked,
                "held": self.held,
            }
        )


class Forgetful(ScriptedBackend):
    """A script's backend that keeps no record of its calls: there are hundreds of thousands."""

    async def _reply(self, job):
        reply = await super()._reply(job)
        self.calls.clear()
        return reply


async def serve(port: int, tokenizer_dir: Path) -> None:
    simulation = Simulation()
    tokenizer, template = text_of(tokenizer_dir)
    backend = Forgetful(simulation.play, tokenizer, name="simulated")
    control = Route("/simulated", simulation.route, methods=["GET", "POST"])
    server = Server(backend, tokenizer, template, guided="ignore", extra_routes=[control])
    config = uvicorn.Config(server.app, host="127.0.0.1", port=port, log_level="warning", access_log=False, ws="none", backlog=2048)
    await uvicorn.Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.tokenizer))


if __name__ == "__main__":
    main()
