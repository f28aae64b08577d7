"""A gateway on a real socket in a thread of its own, whose engine says what the last user message asks for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pydantic
from gateway_players import THINKING, call_text

from polar.errors import EngineBusy, EngineOverloaded, EngineUnavailable
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.records import Completion
from polar.testing.engine import Call, Reply, ScriptedEngine
from polar.testing.gateway import CachedServed


def script(call: Call) -> Reply | str:
    """Says what the last user message asks for; `loop` is a tool loop of two turns and an end."""
    asked = call.text.rpartition("<|im_start|>user\n")[2] if "loop" not in call.text else "loop"
    match asked.split("<|im_end|>")[0].split(" ")[0]:
        case "loop":
            results = call.text.count("<tool_response>")
            answers = {
                0: THINKING + "I look." + call_text('{"command" : "ls \\u002e"}'),
                1: THINKING + call_text('{"command": "a"}') + "\n" + call_text('{"command":"b"}'),
            }
            return answers.get(results, "Done.")
        case "think":
            return THINKING + "Hi."
        case "json":
            return '{"a": 1}'
        case "busy":
            return Reply(error=EngineBusy("slow down", retry_after="7"))
        case "full":
            return Reply(error=EngineOverloaded("full"))
        case "slow":
            return Reply("late", delay_s=60)
        case "gone":
            return Reply(error=EngineUnavailable("gone"))
    return "Hi."


@dataclass
class Listener:
    """A gateway on 127.0.0.1 in a thread of its own. `key()` makes a session; `made()` reads what the last one recorded."""

    gateway: Gateway
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], None]
    session: str = ""

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def key(self, **options: Any) -> str:
        record, key = self.run(self.gateway.new_session(**options))
        self.session = record.id
        return str(key)

    def base(self, key: str) -> str:
        return self.gateway.base_url(key)

    def made(self) -> list[Completion]:
        async def read() -> list[Completion]:
            return [one async for one in self.gateway.store.completions(self.session)]

        return list(self.run(read()))


@contextmanager
def listening(tokenizer_dir: Path, store: str) -> Iterator[Listener]:
    """Serves until the block ends."""
    engine_config = EngineConfig(urls=[], tokenizer=str(tokenizer_dir), renderer="qwen3")
    config = GatewayConfig(
        engines={"default": engine_config}, store=store, port=0, admin_port=0, check=False, grace_s=0.05, first_ping_s=0.2
    )
    ready = threading.Event()
    found: list[Listener] = []

    async def run() -> None:
        engine = ScriptedEngine(script, tokenizer_dir=tokenizer_dir, context=4000)
        gateway = Gateway(config, served={"default": CachedServed("default", engine_config, [engine])})
        stop = asyncio.Event()
        async with serving(gateway):
            found.append(Listener(gateway, asyncio.get_running_loop(), stop.set))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield found[0]
    found[0].loop.call_soon_threadsafe(found[0].stop)
    thread.join(10)


def all_extend(made: list[Completion]) -> bool:
    return all(
        later.prompt_ids is not None and earlier.ids is not None and later.prompt_ids[: len(earlier.ids)].tolist() == earlier.ids.tolist()
        for earlier, later in pairwise(made)
    )


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class Shape(pydantic.BaseModel):
    a: int
