"""A gateway process to kill and restart, and clients that talk to it over HTTP and note what they were told to the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from polar.engine.api import Tokenizer
from polar.records import Completion
from polar.store.base import Store
from polar.testing.engine import Call, Reply, fake_logprob
from polar.tokens import pointers

CHILD = str(Path(__file__).with_name("crash_child.py"))
TOKEN = "crash-admin"


# --- the engine's side ----------------------------------------------------------------------------------------------------


def sampled(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """What the engine samples for a prompt: always the same, in ids that encoding its text again would not give."""
    rng = random.Random(zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes()))
    pieces = ["<think>\n", "Hm", "m.", "\n</think>\n\n"] if rng.random() < 0.5 else []
    pieces += [rng.choice(["Fin", "ish", "ed ", "größ", "er ", "🦙", "\n", "1", "7"]) for _ in range(rng.randrange(4, 40))]
    return [one for piece in [*pieces, "!"] for one in tokenizer.encode(piece)] + list(tokenizer.eos_ids[:1])


def slowly(call: Call) -> Reply:
    """Some answers come at once, some token by token."""
    return Reply(ids=sampled(call.prompt_ids, call.tokenizer), token_delay_s=random.choice([0.0, 0.001, 0.004]))


# --- the gateway process --------------------------------------------------------------------------------------------------


class GatewayProcess:
    """One child. `url` is the model API's, `admin` the control API's."""

    def __init__(self, engine: str, tokenizer_dir: Path, store: Path, *, prefix: Sequence[str] = (), **settings: Any) -> None:
        served = {"urls": [engine], "tokenizer": str(tokenizer_dir), "renderer": "qwen3", "mode": "tokens"}
        config = {"engines": {"default": served}, "store": str(store), "port": 0, "admin_port": 0, "admin_token": TOKEN, "check": False}
        command = [*prefix, sys.executable, CHILD, json.dumps({**config, "shutdown_s": 2.0, **settings})]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 60)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            self.kill()
            raise AssertionError(f"the gateway did not start: exit code {self.process.returncode}")
        port, admin_port = line.split()
        self.url, self.admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """The whole group: behind a tracer the gateway is a grandchild, which would outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def stop(self) -> None:
        """Ends it gracefully, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def gateway_process(*args: Any, **options: Any) -> Iterator[GatewayProcess]:
    process = GatewayProcess(*args, **options)
    try:
        yield process
    finally:
        process.stop()


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that no proxy setting of the environment misleads, and that waits 60 s at most."""
    async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=60)) as client:
        yield client


# --- the harness's side -----------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The gateway answered with an error, as a status or in the stream."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body


@dataclass
class Told:
    """An answer whose final event came."""

    answer_id: str
    text: str


@dataclass
class Harness:
    """One session of one dialect. `told` are its acknowledged answers, in order; the conversation consists of exactly those."""

    client: aiohttp.ClientSession
    dialect: str
    stream: bool
    session: str
    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)

    @classmethod
    async def open(
        cls, client: aiohttp.ClientSession, gateway: GatewayProcess, dialect: str, *, stream: bool, live: bool = False
    ) -> Harness:
        settings = {"stream": "live" if live else "replay"}
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with client.post(f"{gateway.admin}/sessions", json={"settings": settings}, headers=headers) as answer:
            made = await answer.json()
            assert answer.status == 201, made
        return cls(client, dialect, stream, made["session_id"], made["key"])

    async def turn(self, gateway: GatewayProcess, text: str) -> Told:
        """One turn, retried word for word by calling it again. Raises `Refused`, or aiohttp's error where the connection broke."""
        if not self.messages or self.messages[-1]["role"] == "assistant":
            self.messages.append({"role": "user", "content": text})
        body = {"model": "m", "max_tokens": 500, "stream": self.stream, "messages": self.messages}
        path, headers = {
            "anthropic": ("/v1/messages", {"x-api-key": self.key, "anthropic-version": "2023-06-01"}),
            "openai_chat": ("/v1/chat/completions", {"authorization": f"Bearer {self.key}"}),
        }[self.dialect]
        async with self.client.post(gateway.url + path, json=body, headers=headers) as answer:
            if answer.status != 200:
                raise Refused(answer.status, await answer.json())
            if self.stream:
                told = await (self._anthropic(answer) if self.dialect == "anthropic" else self._chat(answer))
            else:
                told = self._whole(await answer.json())
        self.told.append(told)
        self.messages.append({"role": "assistant", "content": told.text})
        return told

    def _whole(self, body: Any) -> Told:
        if self.dialect == "anthropic":
            return Told(body["id"], "".join(block.get("text", "") for block in body["content"]))
        return Told(body["id"], body["choices"][0]["message"]["content"])

    async def _anthropic(self, answer: aiohttp.ClientResponse) -> Told:
        told = Told("", "")
        async for event in events(answer):
            if event["type"] == "message_start":
                told.answer_id = event["message"]["id"]
            elif event["type"] == "content_block_delta":
                told.text += event["delta"].get("text", "")
            elif event["type"] == "error":
                raise Refused(200, event)
            elif event["type"] == "message_stop":
                return told
        raise aiohttp.ClientPayloadError("the stream ended before its last event")

    async def _chat(self, answer: aiohttp.ClientResponse) -> Told:
        told = Told("", "")
        async for event in events(answer):
            if event is None:
                return told
            if "error" in event:
                raise Refused(200, event)
            told.answer_id = event["id"]
            for choice in event["choices"]:
                told.text += choice["delta"].get("content") or ""
        raise aiohttp.ClientPayloadError("the stream ended before its last event")


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Server-sent events as they come; `None` for `[DONE]`."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield None if line.strip() == b"data: [DONE]" else json.loads(line[6:])


# --- what must be on disk ---------------------------------------------------------------------------------------------------


async def recorded(store: Store, harness: Harness, told: Told) -> Completion:
    """The completion of an acknowledged answer. Fails unless it is there in full, with the ids that the engine sampled."""
    session = await store.session(harness.session)
    assert session is not None
    number = pointers.find(session.secret, told.answer_id)
    assert number is not None
    completion = await store.completion(harness.session, number)
    assert completion is not None, f"acknowledged completion {number} of {harness.session} is lost"
    assert completion.status == "complete"
    assert completion.answer.text == told.text
    return completion


def check_ids(completion: Completion, tokenizer: Tokenizer) -> None:
    assert completion.prompt_ids is not None
    assert completion.sampled_ids is not None
    assert completion.logprobs is not None
    ids = sampled(completion.prompt_ids.tolist(), tokenizer)
    assert completion.sampled_ids.tolist() == ids
    assert completion.logprobs.tolist() == [fake_logprob(one, at) for at, one in enumerate(ids)]


def check_bridge(before: Completion, after: Completion) -> None:
    """`after` is the next turn of `before`, on its very ids."""
    assert after.parent == before.number
    assert after.broken is None
    assert before.ids is not None
    assert after.prompt_ids is not None
    assert np.array_equal(after.prompt_ids[: len(before.ids)], before.ids)


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - it is another process that is waited for
            await asyncio.sleep(0.1)


async def health(client: aiohttp.ClientSession, gateway: GatewayProcess) -> tuple[int, int]:
    """The status of `/health` on the model API and on the control API."""
    async with client.get(f"{gateway.url}/health") as public, client.get(f"{gateway.admin}/health") as control:
        return public.status, control.status
