"""A sandbox and an evaluator whose times are told by the task, for a node to load (`runtime.import_path`, `evaluator.strategy`).

The sandbox is `polar.testing.FakeRuntime` (a folder; files in it are real) with a start and a stop that take their time; its agent
program runs in the process of `simulated.agents`, at the socket that `SIMULATED_AGENTS` names. The evaluator waits, then gives 1.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os

from pydantic import BaseModel, ConfigDict

from polar.errors import SandboxError
from polar.evaluator import Evaluator, Evidence, Verdict
from polar.testing.runtime import Answer, Command, FakeRuntime

AGENT = "simulated-agent"
SOCKET = "SIMULATED_AGENTS"


class Line:
    """The connection to the agents' process, shared by all sandboxes of this one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict]] = {}
        self._task = asyncio.create_task(self._read(reader))

    async def run(self, url: str, key: str, instruction: str) -> Answer:
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        asked = {"id": number, "url": url, "key": key, "instruction": instruction}
        self._writer.write(json.dumps(asked).encode() + b"\n")
        try:
            said = await future
        finally:
            self._waiting.pop(number, None)
        return Answer(said["exit_code"], said["said"].encode())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            said = json.loads(line)
            future = self._waiting.get(said["id"])
            if future is not None and not future.done():
                future.set_result(said)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError("the process of the agents has ended"))


_line: asyncio.Task[Line] | None = None


async def _connect() -> Line:
    return Line(*await asyncio.open_unix_connection(os.environ[SOCKET], limit=1 << 20))


async def play(command: Command) -> Answer | int:
    """The agent program runs elsewhere, there is no git here, all else succeeds."""
    global _line
    if command.line.startswith("git"):
        return 127
    if AGENT not in command.line:
        return 0
    if _line is None:
        _line = asyncio.create_task(_connect())
    line = await asyncio.shield(_line)
    return await line.run(command.env["OPENAI_BASE_URL"], command.env["OPENAI_API_KEY"], (command.stdin or b"").decode())


class Sandbox(FakeRuntime):
    """`kwargs`: `init_s` and `teardown_s`."""

    backend = "simulated"
    script = staticmethod(play)

    async def start(self) -> None:
        await super().start()
        await asyncio.sleep(self.spec.kwargs.get("init_s", 0.0))

    async def stop(self) -> None:
        await asyncio.sleep(self.spec.kwargs.get("teardown_s", 0.0))
        await super().stop()


class WaitsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    seconds: float = 0.0


class Waits(Evaluator[WaitsConfig]):
    """`seconds` later, a reward of 1."""

    name = "waits"
    Config = WaitsConfig
    needs_fresh = False

    async def evaluate(self, evidence: Evidence) -> Verdict:
        await asyncio.sleep(self.config.seconds)
        return Verdict(1.0)
