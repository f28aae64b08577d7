"""Streams over the wire, byte by byte: whatever a server sends, and however it is split, ends as events or as a named error."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.chat import Sampling
from polar.engines import connection, http
from polar.engines.base import TokensRequest
from polar.engines.connection import MAX_HEAD, Answer, Connections, NotHttp
from polar.engines.http import HttpEngine
from polar.engines.vllm import VllmEngine
from polar.errors import EngineBusy, EngineOverloaded, EngineTimeout, EngineUnavailable
from polar.sockets import IDLE_S

EVENTS = [{"n": number, "text": "é漢🙂"} for number in range(5)]
STREAM = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in EVENTS) + b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(body: bytes, size: int = 50) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def bare_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def sized(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n" % len(body) + body


GZIPPED = gzip.compress(STREAM)
WHOLE = {
    "chunked": OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM),
    "with a length": OK + sized(STREAM),
    "until the end": OK + b"connection: close\r\n\r\n" + STREAM,
    "after 100 Continue": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + sized(STREAM),
    "gzip": OK + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(GZIPPED),
    "deflate": OK + b"content-encoding: deflate\r\n" + sized(zlib.compress(STREAM)),
    "bare deflate": OK + b"content-encoding: deflate\r\n" + sized(bare_deflate(STREAM)),
}

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


class Wire:
    """A server that plays `handlers`, one a connection and the last one for good, and notes the connections and how they ended."""

    def __init__(self, *handlers: Handler) -> None:
        self.handlers = list(handlers)
        self.opened = 0
        self.left = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        handler = self.handlers.pop(0) if len(self.handlers) > 1 else self.handlers[0]
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        finally:
            writer.close()


@asynccontextmanager
async def wire(*handlers: Handler) -> AsyncIterator[tuple[Wire, HttpEngine]]:
    playing = Wire(*handlers)
    server = await asyncio.start_server(playing.serve, "127.0.0.1", 0)
    playing.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engine = VllmEngine(playing.url, timeout_s=5.0)
    try:
        yield playing, engine
    finally:
        await engine.aclose()
        server.close()


def says(answer: bytes, *, then_waits: bool = False) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            writer.write(answer)
            await writer.drain()
            if b"connection: close" in answer:
                return
            if then_waits:
                await reader.readexactly(1)

    return handler


async def cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)


async def collect(engine: HttpEngine) -> list[Any]:
    found: list[Any] = []
    await engine.events("/v1/completions", {}, found.extend)
    return found


@pytest.mark.parametrize("kind", WHOLE)
async def test_events_arrive_however_the_body_is_framed(kind: str) -> None:
    async with wire(says(WHOLE[kind])) as (_, engine):
        assert await collect(engine) == EVENTS


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.integers(1, 2000), max_size=12), st.booleans())
def test_an_answer_is_the_same_however_it_is_split(kind: str, cutting: list[int], bytewise: bool) -> None:
    raw = WHOLE[kind]
    cut_at = range(len(raw) + 1) if bytewise else [0, *sorted({at for at in cutting if at < len(raw)}), len(raw)]

    async def feed() -> bytes:
        body = bytearray()

        def take(data: bytes) -> bool:
            body.extend(data)
            return False

        answer = Answer(take)
        for start, end in pairwise(cut_at):
            answer.feed(raw[start:end])
        assert answer.complete or answer.ends_with_connection()
        return bytes(body)

    assert asyncio.run(feed()) == STREAM


async def test_each_event_is_given_away_before_the_next_one_is_sent() -> None:
    came = asyncio.Event()

    async def in_step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
        for event in EVENTS:
            came.clear()
            writer.write(b"%x\r\n%b\r\n" % (len(line := b"data: %b\n\n" % json.dumps(event).encode()), line))
            await asyncio.wait_for(came.wait(), 2)
        writer.write(chunked(b"data: [DONE]\n\n"))
        await writer.drain()

    found: list[Any] = []

    def take(events: list[Any]) -> None:
        found.extend(events)
        came.set()

    async with wire(in_step) as (_, engine):
        await engine.events("/x", {}, take)
    assert found == EVENTS


async def test_the_end_of_the_events_does_not_wait_for_the_end_of_the_body() -> None:
    async with wire(says(OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM)[:-5], then_waits=True)) as (_, engine):
        assert await asyncio.wait_for(collect(engine), 2) == EVENTS


async def test_a_connection_is_used_again() -> None:
    async with wire(says(WHOLE["chunked"])) as (playing, engine):
        for _ in range(3):
            assert await collect(engine) == EVENTS
        assert playing.opened == 1


@pytest.mark.parametrize("kind", ["until the end", "with a length"])
async def test_a_connection_that_the_server_gives_up_is_not_used_again(kind: str) -> None:
    answer = WHOLE[kind] if kind == "until the end" else OK + b"connection: close\r\n" + sized(STREAM)
    async with wire(says(answer)) as (playing, engine):
        for _ in range(2):
            assert await collect(engine) == EVENTS
        assert playing.opened == 2


async def test_an_idle_connection_ends_before_the_server_would_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.05)
    async with wire(says(WHOLE["chunked"])) as (playing, engine):
        await collect(engine)
        await asyncio.sleep(0.2)
        assert playing.left == 1
        await collect(engine)
        assert playing.opened == 2


async def test_a_kept_connection_that_was_just_closed_is_replaced_once() -> None:
    async def once_then_cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(WHOLE["chunked"])
        await request_of(reader)

    async with wire(once_then_cuts, says(WHOLE["chunked"])) as (playing, engine):
        assert await collect(engine) == EVENTS
        assert await collect(engine) == EVENTS
        assert playing.opened == 2


async def test_a_fresh_connection_that_is_cut_is_not_tried_again() -> None:
    async with wire(cuts) as (playing, engine):
        with pytest.raises(EngineUnavailable, match="went away in the middle"):
            await collect(engine)
        assert playing.opened == 1


async def test_what_nobody_asked_for_ends_the_connection() -> None:
    async with wire(says(WHOLE["with a length"] + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as (_, engine):
        for _ in range(2):  # a second answer in one write must never be taken for that of the next request
            assert await collect(engine) == EVENTS


async def test_an_engine_that_dies_in_the_middle_keeps_what_had_come() -> None:
    part = chunked(STREAM)[:180]
    found: list[Any] = []
    async with wire(says(OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + part)) as (_, engine):
        with pytest.raises(EngineUnavailable, match="went away in the middle"):
            await engine.events("/x", {}, found.extend)
    assert found
    assert found == EVENTS[: len(found)]


@pytest.mark.parametrize("kind", ["chunked", "with a length", "until the end"])
async def test_a_stream_without_its_mark_of_the_end_is_cut(kind: str) -> None:
    body = STREAM.removesuffix(b"data: [DONE]\n\n")
    frames = {
        "chunked": OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(body),
        "with a length": OK + sized(body),
        "until the end": OK + b"connection: close\r\n\r\n" + body,
    }
    async with wire(says(frames[kind])) as (_, engine):
        with pytest.raises(EngineUnavailable, match="ended its stream in the middle"):
            await collect(engine)


async def test_a_stalled_engine_is_a_timeout_and_learns_of_it() -> None:
    async with wire(says(OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM)[:180], then_waits=True)) as (playing, engine):
        engine.timeout_s = 0.2
        found: list[Any] = []
        with pytest.raises(EngineTimeout, match=r"did not answer within 0\.2 s"):
            await engine.events("/x", {}, found.extend)
        assert found
        await asyncio.sleep(0.1)
        assert playing.left == 1


@pytest.mark.parametrize("way", ["whole", "streamed", "asked what it serves"])
async def test_a_host_that_takes_no_connection_is_unavailable(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without power, or behind a network that is cut: nothing refuses, nothing answers. Another engine can take the call."""
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.2)
    with deaf() as url:
        engine = VllmEngine(url)
        ask = {"whole": lambda: engine.post("/x", {}), "streamed": lambda: collect(engine), "asked what it serves": engine.info}[way]
        with pytest.raises(EngineUnavailable, match=r"no engine answers at .*: no connection within 0\.2 s"):
            await ask()
        await engine.aclose()


@contextmanager
def deaf() -> Iterator[str]:
    """The URL of a port whose queue of connections is full: Linux lets further ones wait, as if there were no host."""
    with ExitStack() as held:
        listening = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listening.getsockname()
        for _ in range(8):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"


@pytest.mark.parametrize("way", ["whole", "streamed"])
async def test_a_silent_engine_is_probed(way: str) -> None:
    """openai/openai-python#3269, netclaw-dev/netclaw#1272: behind a router that forgets idle connections, or before an engine that lost
    its power, a long answer was waited for in vain."""
    probed: list[int] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        probed.append(idle_before_a_probe(writer.get_extra_info("peername")))
        writer.write(OK + sized(STREAM if way == "streamed" else b"{}"))

    async with wire(handler) as (_, engine):
        await (collect(engine) if way == "streamed" else engine.post("/v1/completions", {}))
    assert probed == [IDLE_S]


def idle_before_a_probe(name: tuple[str, int]) -> int:
    """In seconds, of this process's own socket at that address."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.getsockname() == name:
                    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        except OSError:  # no socket, or closed meanwhile
            continue
    raise AssertionError(f"nothing here is at {name}")


async def test_leaving_closes_the_connection_at_once() -> None:
    async with wire(says(OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM)[:180], then_waits=True)) as (playing, engine):
        task = asyncio.create_task(collect(engine))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert playing.left == 1


async def test_closing_the_engine_ends_its_streams() -> None:
    async with wire(says(OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM)[:180], then_waits=True)) as (_, engine):
        task = asyncio.create_task(collect(engine))
        await asyncio.sleep(0.1)
        await engine.aclose()
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(task, 2)


async def test_who_takes_the_events_may_fail() -> None:
    def fail(events: list[Any]) -> None:
        raise KeyError("mine")

    async with wire(says(WHOLE["chunked"], then_waits=True)) as (playing, engine):
        with pytest.raises(KeyError, match="mine"):
            await engine.events("/x", {}, fail)
        await asyncio.sleep(0.1)
        assert playing.left == 1


async def test_no_engine_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable, match="no engine answers at"):
        await collect(VllmEngine("http://127.0.0.1:9"))
    with pytest.raises(EngineUnavailable, match="no engine answers at"):
        await collect(VllmEngine("http://nowhere.invalid"))


async def test_a_plain_server_is_no_encrypted_one() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with wire(plain) as (playing, _):
        with pytest.raises(EngineUnavailable, match="no engine answers at"):
            await collect(VllmEngine(playing.url.replace("http:", "https:")))


async def test_a_redirect_is_refused_and_names_its_target() -> None:
    raw = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n"
    async with wire(says(raw)) as (playing, engine):
        with pytest.raises(EngineUnavailable, match="redirects to http://elsewhere/"):
            await collect(engine)
        assert playing.opened == 1


@pytest.mark.parametrize("framing", [b"content-length: 24\r\n\r\n%b", b"connection: close\r\n\r\n%b"])
async def test_an_error_answer_keeps_its_words_and_retry_after(framing: bytes) -> None:
    raw = b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\n" + framing % b'{"message": "slow down"}'
    async with wire(says(raw)) as (_, engine):
        with pytest.raises(EngineBusy, match="slow down") as caught:
            await collect(engine)
    assert caught.value.retry_after == "7"


async def test_an_error_event_is_raised_after_the_events_before_it() -> None:
    body = b'data: {"n": 0}\n\ndata: {"error": {"message": "full", "code": 503}}\n\ndata: [DONE]\n\n'
    found: list[Any] = []
    async with wire(says(OK + sized(body))) as (_, engine):
        with pytest.raises(EngineOverloaded, match="full"):
            await engine.events("/x", {}, found.extend)
    assert found == [{"n": 0}]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP answer"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nxx", "no HTTP answer"),
        (OK + b"content-encoding: br\r\n" + sized(b"xx"), "encoding that was not asked for: br"),
        (OK + b"content-encoding: gzip\r\n" + sized(b"this is not gzip"), "incorrect header check"),
        (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "no HTTP answer"),
    ],
    ids=["not http", "upgrade", "unknown encoding", "broken gzip", "broken chunk"],
)
async def test_an_answer_that_cannot_be_read_is_unavailable(raw: bytes, words: str) -> None:
    async with wire(says(raw, then_waits=True)) as (_, engine):
        with pytest.raises(EngineUnavailable, match=words):
            await asyncio.wait_for(collect(engine), 2)


def test_headers_without_an_end_are_refused() -> None:
    async def feed() -> None:
        answer = Answer(lambda data: False)
        answer.feed(OK)
        for _ in range(MAX_HEAD // 1000 + 1):
            answer.feed(b"x-a: " + b"a" * 1000 + b"\r\n")

    with pytest.raises(NotHttp, match="no end"):
        asyncio.run(feed())


async def test_a_small_body_that_unpacks_to_a_large_one_comes_in_pieces() -> None:
    packed = gzip.compress(b"\0" * (64 << 20))
    sizes: list[int] = []

    def take(data: bytes) -> bool:
        sizes.append(len(data))
        return False

    Answer(take).feed(OK + b"content-encoding: gzip\r\n" + sized(packed))
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= connection.INFLATE


async def test_only_the_beginning_of_a_long_error_is_kept() -> None:
    answer = Answer(lambda data: False)
    answer.feed(b"HTTP/1.1 500 Oops\r\n\r\n")
    for _ in range(40):
        answer.feed(b"x" * 100_000)
    assert len(answer.refusal) == connection.MAX_REFUSAL


async def test_the_request_says_what_the_engine_needs() -> None:
    seen: list[bytes] = []

    async def notes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(WHOLE["until the end"])

    async with wire(notes) as (playing, _):
        engine = VllmEngine(playing.url + "/a%20b/é", api_key="k")
        await engine.events("/v1/completions", {"a": 1}, lambda events: None)
        await engine.aclose()
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /a%20b/%C3%A9/v1/completions HTTP/1.1"
    assert lines[1] == "Host: " + playing.url.removeprefix("http://")
    assert {"Content-Type: application/json", "Authorization: Bearer k", f"Content-Length: {len(body)}"} < set(lines)
    assert json.loads(body) == {"a": 1}


def test_a_key_of_two_lines_is_no_header() -> None:
    with pytest.raises(ValueError, match="one line"):
        Connections({"Authorization": "Bearer a\r\nX: b"}, connect_timeout_s=1, keepalive_s=1)


async def test_many_streams_at_once_do_not_mix() -> None:
    async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            number = json.loads((await request_of(reader)).partition(b"\r\n\r\n")[2])["number"]
            writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(5):
                writer.write(chunked(b'data: {"number": %d}\n\n' % number)[:-5])
                await asyncio.sleep(0.001)
            writer.write(chunked(b"data: [DONE]\n\n"))

    async def one(engine: HttpEngine, number: int) -> None:
        found: list[Any] = []
        await engine.events("/x", {"number": number}, found.extend)
        assert found == [{"number": number}] * 5

    async with wire(echoes) as (playing, engine):
        for _ in range(3):
            await asyncio.gather(*(one(engine, number) for number in range(40)))
        assert playing.opened == 40


async def test_a_stream_can_be_asked_for_chunk_by_chunk_and_left() -> None:
    event = (
        b'data: {"choices": [{"index": 0, "logprobs": {"tokens": ["token_id:%d"], "token_logprobs": [-0.5]}, "finish_reason": null}]}\n\n'
    )
    raw = OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(event % 5 + event % 6)[:-5]
    async with wire(says(raw, then_waits=True)) as (playing, engine):
        chunks = engine.stream(TokensRequest("m", np.array([1], np.int32), Sampling(max_tokens=5)))
        assert [(await anext(chunks)).token_ids, (await anext(chunks)).token_ids] == [[5], [6]]
        began = time.monotonic()
        await chunks.aclose()
        await asyncio.sleep(0.1)
        assert playing.left == 1
        assert time.monotonic() - began < 2
