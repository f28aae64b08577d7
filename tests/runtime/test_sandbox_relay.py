"""The relay: bytes go through whole, both ways, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from polar.errors import SandboxError
from polar.runtime import machine
from polar.runtime import relay as relay_module
from polar.runtime.relay import Relay

INSIDE = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def networked() -> Iterator[int]:
    """A process in a network namespace of its own, with its loopback up."""
    if machine.namespaces() is not None:
        pytest.skip(f"no namespaces here: {machine.namespaces()}")
    enter = "views.enter(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS); kernel.loopback_up()"
    code = f"from polar.keeper import kernel, views; {enter}; {INSIDE}"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"ready\n"
    yield child.pid
    child.stdin.close()
    child.wait()
    child.stdout.close()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[str, int]]:
    """A server that answers each connection with its own bytes, and ends when the other side ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write(b"|end")
            await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    yield server.sockets[0].getsockname()[:2]
    server.close()


async def inside(pid: int, code: str) -> bytes:
    """Runs Python in that process's network."""
    program = (
        "import os, socket; from polar.keeper import kernel\n"
        f"fd = os.open('/proc/{pid}/ns/net', os.O_RDONLY)\n"
        "kernel.may_administer() or kernel.setns(kernel.user_namespace_of(fd), kernel.CLONE_NEWUSER)\n"
        f"kernel.setns(fd, kernel.CLONE_NEWNET)\n{code}"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    return out


async def test_half_closed_connections_go_on(networked: int, echo: tuple[str, int]) -> None:
    relay = await Relay.open(networked, echo)
    assert relay.url == "http://127.0.0.1:8100"
    code = (
        "import threading\n"
        "s = socket.create_connection(('127.0.0.1', 8100))\n"
        "send = lambda: (s.sendall(b'x' * 3_000_000), s.shutdown(socket.SHUT_WR))\n"
        "threading.Thread(target=send).start()\n"
        "heard = b''\n"
        "while data := s.recv(65536): heard += data\n"
        "print(len(heard), heard[-4:].decode())"
    )
    assert (await inside(networked, code)).split() == [b"3000004", b"|end"]
    await relay.close()
    assert relay.connections == 0


async def test_bytes_are_passed_on_as_they_come(networked: int, echo: tuple[str, int]) -> None:
    relay = await Relay.open(networked, echo, port=0)
    port = int(relay.url.rpartition(":")[2])
    code = (
        f"s = socket.create_connection(('127.0.0.1', {port}))\n"
        "for n in range(50): s.sendall(b'%d' % n); assert s.recv(100) == b'%d' % n\n"
        "print('ok')"
    )
    assert await inside(networked, code) == b"ok\n"
    await relay.close()


async def test_thousands_of_connections_and_nothing_leaks(networked: int, echo: tuple[str, int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    relay = await Relay.open(networked, echo)
    code = (
        "for round in range(4):\n"
        "    many = [socket.create_connection(('127.0.0.1', 8100)) for _ in range(500)]\n"
        "    for n, s in enumerate(many): s.sendall(b'%d' % n)\n"
        "    for n, s in enumerate(many): assert s.recv(100) == b'%d' % n\n"
        "    for s in many: s.close()\n"
        "print('ok')"
    )
    assert await inside(networked, code) == b"ok\n"
    async with asyncio.timeout(10):
        while relay.connections:  # noqa: ASYNC110 - the other side's closing is waited for
            await asyncio.sleep(0.02)
    await relay.close()
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_a_model_api_that_is_gone_is_a_broken_connection(networked: int) -> None:
    relay = await Relay.open(networked, ("127.0.0.1", 1))
    code = "s = socket.create_connection(('127.0.0.1', 8100))\ntry: print(s.recv(10))\nexcept ConnectionError: print('broken')"
    assert await inside(networked, code) in (b"broken\n", b"b''\n")
    await relay.close()


async def test_closing_breaks_open_connections(networked: int, echo: tuple[str, int]) -> None:
    relay = await Relay.open(networked, echo)
    code = (
        "s = socket.create_connection(('127.0.0.1', 8100)); s.sendall(b'a'); s.recv(1)\n"
        "try: print(s.recv(10))\n"
        "except ConnectionError: print('broken')"
    )
    running = asyncio.create_task(inside(networked, code))
    async with asyncio.timeout(10):
        while not relay.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    await relay.close()
    assert await running in (b"broken\n", b"b''\n")


async def test_a_process_that_is_gone_is_a_sandbox_error() -> None:
    with pytest.raises(SandboxError, match="no listener"):
        await Relay.open(2**22 - 3, ("127.0.0.1", 1))


async def test_a_flood_of_connections_waits_and_takes_no_descriptors(
    networked: int, echo: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MOST", 8)
    before = len(os.listdir("/proc/self/fd"))
    relay = await Relay.open(networked, echo)
    flood = (
        "import time\nopen_here = [socket.create_connection(('127.0.0.1', 8100)) for _ in range(300)]\n"
        "for one in open_here: one.sendall(b'x'); one.shutdown(1)\n"
        "print(sum(one.recv(9) != b'' for one in open_here))"
    )
    most = 0
    work = asyncio.create_task(inside(networked, flood))
    while not work.done():
        most = max(most, relay.connections)
        await asyncio.sleep(0.005)
    assert (await work).strip() == b"300"
    assert 0 < most <= 8
    await relay.close()
    assert relay.connections == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 2
