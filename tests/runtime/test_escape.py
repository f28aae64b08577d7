"""What a program inside may not reach, tried from inside of every backend. For `local`, what it does not refuse is tested too: it is the
table in `polar.runtime.local`."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sandboxes import Sandboxes

from polar.errors import ConfigError
from polar.runtime import Runtime, machine

OWN_USER = {"local"} if machine.privileged() else set()
"""Backends in which a program runs as another user of this machine's file system, seen as it is."""
CONTAINED = {"bubblewrap", "docker", "podman", "apptainer"}
"""Backends with a file system and a network of their own."""

pytestmark = pytest.mark.usefixtures("opened")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[None]:
    """Every folder above the tests' can be entered by everybody: what is refused, the sandbox refuses."""
    above = [one for one in tmp_path.parents if one.stat().st_uid == os.geteuid() and one not in (Path("/"), Path("/tmp"))]
    modes = {one: one.stat().st_mode & 0o7777 for one in (tmp_path, *above) if not one.stat().st_mode & 0o001}
    for one, mode in modes.items():
        one.chmod(mode | 0o011)
    yield
    for one, mode in modes.items():
        if one.exists():
            one.chmod(mode)


async def refused(runtime: Runtime, line: str) -> None:
    result = await runtime.exec(line, timeout_s=20)
    assert result.exit_code != 0, (line, result)
    assert b"SECRET" not in result.stdout + result.stderr


def secret(path: Path, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("SECRET")
    path.chmod(mode)
    return path


@asynccontextmanager
async def listening(host: str) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that answers SECRET; gives its port and what it heard."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nSECRET")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, host, 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


def fetch(host: str, port: int) -> str:
    """A shell line that prints what a server says; needs bash and nothing else."""
    return f"bash -c 'exec 3<>/dev/tcp/{host}/{port} && printf \"GET / HTTP/1.0\\r\\n\\r\\n\" >&3 && cat <&3'"


def outside_address() -> str | None:
    """An address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.77", 9))  # a documentation address: nothing is sent
        except OSError:
            return None
        found = str(one.getsockname()[0])
        return None if found.startswith("127.") else found


async def test_files_that_only_root_may_read(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in OWN_USER | CONTAINED:
        pytest.skip("here programs run as this user")
    runtime = await sandboxes.make()
    if sandboxes.name == "bubblewrap":
        await refused(runtime, "cat /etc/shadow")
    elif sandboxes.name == "local":
        await refused(runtime, "cat /etc/shadow")
        await refused(runtime, "ls /root/")


async def test_the_machines_private_files_and_the_store(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name not in OWN_USER | CONTAINED:
        pytest.skip("here programs run as this user")
    store, token = secret(tmp_path / "state" / "polar.db"), secret(tmp_path / "state" / "admin-token")
    runtime = await sandboxes.make()
    for path in (store, token):
        await refused(runtime, f"cat {path}")
        await refused(runtime, f"cat /proc/1/root{path}")
        await refused(runtime, f"cat /proc/self/root{path}")
        await refused(runtime, f"echo changed > {path}")
    assert store.read_text() == "SECRET"


async def test_files_that_everybody_may_read(sandboxes: Sandboxes, tmp_path: Path) -> None:
    path = secret(tmp_path / "open", 0o644)
    if str(tmp_path).startswith("/tmp") and sandboxes.name == "local":
        path = Path("/usr/lib/os-release")  # /tmp is the sandbox's own
    runtime = await sandboxes.make()
    result = await runtime.exec(["cat", str(path)])
    assert (result.exit_code == 0) == (sandboxes.name in ("local", "plain"))


async def test_what_the_place_hides_is_empty(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in ("local", "bubblewrap"):
        pytest.skip("without namespaces nothing can be hidden")
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as state:
        os.chmod(state, 0o755)
        store = secret(Path(state, "polar.db"), 0o644)
        seen = await (await sandboxes.make()).exec(["cat", str(store)])
        own_tmp = state.startswith("/tmp/")  # where this repository lies in /tmp, which is the sandbox's own
        assert seen.ok == (sandboxes.name == "local" and not own_tmp)
        runtime = await sandboxes.make(hidden=(Path(state),))
        await refused(runtime, f"cat {store}")
        await refused(runtime, f"cat /proc/self/root{store} /proc/1/root{store}")


async def test_nothing_outside_can_be_written(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces a program may write what this user may")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    runtime = await sandboxes.make()
    await runtime.exec(f"mkdir -p {open_to_all}; echo x > {open_to_all}/x; echo x > /var/tmp/polar-escape; echo x > /tmp/polar-escape")
    assert list(open_to_all.iterdir()) == []
    assert "polar-escape" not in [*os.listdir("/tmp"), *os.listdir("/var/tmp")]
    if sandboxes.name != "docker":  # a container's root is its own
        await refused(runtime, "echo x > /usr/polar-escape || echo x > /etc/polar-escape-2 && test -e /proc/1/root/usr/polar-escape")


async def test_another_sandboxes_folder(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces all sandboxes are the same user's")
    other = await sandboxes.make()
    await other.write("hidden", b"SECRET")
    runtime = await sandboxes.make()
    folder = other.place.folder
    await refused(runtime, f"find {folder} {folder.parent} {folder.parent.parent} -name hidden -exec cat {{}} + | grep SECRET")
    await refused(runtime, f"cat {folder / 'work' / 'hidden'}")


async def test_another_sandboxes_key(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces all processes are seen")
    other = await sandboxes.make(env={"KEY": "SECRET"})
    await other.exec("sleep 60 &")
    runtime = await sandboxes.make()
    await refused(runtime, "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep SECRET")


async def test_the_nodes_own_processes(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces all processes are seen")
    runtime = await sandboxes.make()
    await refused(runtime, f"test -e /proc/{os.getpid()}/status && grep -a pytest /proc/[0-9]*/cmdline")
    await runtime.exec(f"kill -9 {os.getpid()}")
    inside = (await runtime.exec("ls /proc | grep -c '^[0-9]'")).text
    assert int(inside) < 12


async def test_the_keeper_cannot_be_looked_into(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in ("local", "bubblewrap"):
        pytest.skip("there is no keeper")
    runtime = await sandboxes.make()
    stub = "for one in /proc/[0-9]*; do grep -qa polar.keeper $one/cmdline 2>/dev/null && echo $one; done"
    found = (await runtime.exec(stub)).text.split()
    assert found
    for path in found:
        await refused(runtime, f"cat {path}/environ")
        await refused(runtime, f"ls -l {path}/root/ {path}/fd/")
        await refused(runtime, f"dd if={path}/mem bs=1 count=1")


async def test_capabilities_and_setuid(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("nothing is dropped without namespaces")
    runtime = await sandboxes.make()
    status = (await runtime.exec("cat /proc/self/status")).text
    rights = {line.split(":")[0]: line.split(":")[1].strip() for line in status.splitlines() if line.startswith(("Cap", "NoNew"))}
    if sandboxes.name in ("local", "bubblewrap"):
        assert {int(rights[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert rights["NoNewPrivs"] == "1"
    await refused(runtime, "mount -t tmpfs none /tmp || unshare -m true && false")
    await refused(runtime, "mknod /tmp/disk b 8 0")
    await refused(runtime, "echo 1 > /proc/sys/kernel/sysrq || echo b > /proc/sysrq-trigger")


async def test_the_control_api_on_the_machines_loopback(sandboxes: Sandboxes) -> None:
    async with listening("127.0.0.1") as (port, heard):
        runtime = await sandboxes.make()
        if sandboxes.name in CONTAINED:
            await refused(runtime, fetch("127.0.0.1", port))
            assert heard == []
        else:
            assert runtime.shares_host_network  # as documented: the API asks for its token
            assert b"SECRET" in (await runtime.exec(fetch("127.0.0.1", port))).stdout


async def test_the_outside(sandboxes: Sandboxes) -> None:
    address = outside_address()
    if address is None:
        pytest.skip("this machine has no address but its loopback's")
    if sandboxes.name not in CONTAINED:
        pytest.skip("local shares the machine's network, as documented")
    async with listening(address) as (port, heard):
        runtime = await sandboxes.make(gateway=("127.0.0.1", port))
        await refused(runtime, fetch(address, port))
        await refused(runtime, "getent hosts example.com || exit 1")
        await refused(runtime, "timeout 2 bash -c 'exec 3<>/dev/udp/192.0.2.1/53 && echo x >&3 && read -t 1 x <&3'")
        assert heard == []


async def test_network_none_reaches_nothing(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces the network is the machine's")
    async with listening("127.0.0.1") as (port, heard):
        runtime = await sandboxes.make(network="none")
        await refused(runtime, fetch("127.0.0.1", port))
        assert heard == []
        with pytest.raises(ConfigError):
            assert runtime.gateway_url


async def test_the_model_api_is_the_one_way_out(sandboxes: Sandboxes) -> None:
    async with listening("127.0.0.1") as (port, heard):
        runtime = await sandboxes.make(gateway=("127.0.0.1", port))
        host, _, inner = runtime.gateway_url.removeprefix("http://").partition(":")
        assert b"SECRET" in (await runtime.exec(fetch(host, int(inner)))).stdout
        assert len(heard) == 1


async def test_unix_sockets_of_the_machine(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name not in CONTAINED:
        pytest.skip("local sees the machine's sockets; their rights protect them")
    runtime = await sandboxes.make()
    for path in ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket"):
        await refused(runtime, f"test -e {path}")
    assert b"@" not in (await runtime.exec("cat /proc/net/unix")).stdout


async def test_hidden_tests_are_not_there_before_grading(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name not in OWN_USER | CONTAINED:
        pytest.skip("here programs run as this user")
    tests = secret(tmp_path / "task" / "tests" / "test_hidden.py")
    tests.parent.chmod(0o700)
    runtime = await sandboxes.make(task_folder=tmp_path / "task")
    await refused(runtime, f"cat {tests}")
    await refused(runtime, "cat /tests/test_hidden.py")
