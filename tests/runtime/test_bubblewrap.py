"""What only `bubblewrap` has: a root file system of one's own, the internet by another program, the machine's network when asked."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import Sandboxes, sandboxes_of
from test_escape import fetch, listening, outside_address

from polar.errors import ConfigError


@pytest.fixture
async def sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandboxes]:
    async with sandboxes_of("bubblewrap", tmp_path / "sandboxes", monkeypatch) as made:
        yield made


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The smallest root file system: one static program under the names that it answers to."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox here: apt-get install busybox-static")
    root = tmp_path / "image"
    (root / "bin").mkdir(parents=True)
    for name in ("sh", "sleep", "cat", "ls", "echo", "id", "touch", "ps"):
        shutil.copy2(busybox, root / "bin" / name)
    (root / "etc").mkdir()
    (root / "etc" / "motd").write_text("the image\n")
    for one in (root, root / "bin", root / "etc"):
        one.chmod(0o755)
    return root


async def test_a_root_file_system_is_writable_and_stays_as_it_was(sandboxes: Sandboxes, image: Path) -> None:
    runtime = await sandboxes.make(image=str(image), workdir="/app")
    result = await runtime.exec("cat /etc/motd; ls /usr; id -u; touch /made-here && echo made; pwd")
    assert result.text.split() == ["the", "image", "1000", "made", "/app"]
    assert b"/usr" in result.stderr
    await runtime.write("/tests/x", b"echo tested")
    assert (await runtime.exec("sh /tests/x")).stdout == b"tested\n"
    assert sorted(one.name for one in await asyncio.to_thread(lambda: list(image.iterdir()))) == ["bin", "etc"]


async def test_a_timeout_in_a_root_file_system_without_python(sandboxes: Sandboxes, image: Path) -> None:
    runtime = await sandboxes.make(image=str(image))
    assert (await runtime.exec("sleep 50 & sleep 60", timeout_s=0.3)).timed_out
    assert "sleep 50" not in (await runtime.exec("ps")).text


async def test_the_machines_network_when_asked(sandboxes: Sandboxes) -> None:
    async with listening("127.0.0.1") as (port, _):
        runtime = await sandboxes.make(network="host", gateway=("127.0.0.1", port))
        assert runtime.gateway_url == f"http://127.0.0.1:{port}"
        assert b"SECRET" in (await runtime.exec(fetch("127.0.0.1", port))).stdout


async def test_bridge_reaches_the_outside_but_not_the_machines_loopback(sandboxes: Sandboxes) -> None:
    address = outside_address()
    if address is None or shutil.which("slirp4netns") is None:
        pytest.skip("needs slirp4netns and an address that is not loopback")
    async with listening("127.0.0.1") as (control, heard), listening(address) as (port, _):
        runtime = await sandboxes.make(network="bridge", gateway=(address, port))
        assert b"SECRET" in (await runtime.exec(fetch(address, port), timeout_s=20)).stdout
        assert b"SECRET" in (await runtime.exec(fetch("127.0.0.1", 8100), timeout_s=20)).stdout
        for host in ("127.0.0.1", "10.0.2.2"):
            assert not (await runtime.exec(fetch(host, control), timeout_s=20)).ok
        assert heard == []


async def test_without_a_model_api_there_is_no_url(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    with pytest.raises(ConfigError, match="no way to a model API"):
        assert runtime.gateway_url
