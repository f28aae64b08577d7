"""The same sandboxes for a user who is not root. Started by root, this runs itself again as nobody in particular."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polar

USER = 54321
SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from polar.runtime import Owner, Place, RuntimeSpec, create, named

async def main(backend, root):
    problem = await named(backend).unavailable()
    if problem:
        print("SKIP", problem)
        return
    owner = Owner.open(Path(root))
    server = await asyncio.start_server(lambda r, w: (w.write(b"SECRET"), w.close()), "127.0.0.1", 0)
    spec = RuntimeSpec(backend=backend, pids=100, memory_mb=500)
    runtime = create(spec, Place("s", owner.id, owner.sandbox("s"), server.sockets[0].getsockname()[:2]))
    async with runtime:
        assert (await runtime.exec("whoami")).stdout == b"agent\\n"
        assert (await runtime.exec("sleep 50 & setsid sleep 60 & exit 3")).exit_code == 3
        await runtime.end_processes()
        hiding = await runtime.exec("(env -i setsid sleep 61 &); sleep 62", timeout_s=0.5)
        assert hiding.timed_out
        listed = (await runtime.exec("cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '")).text
        assert "sleep 6" not in listed and "sleep 50" not in listed, listed
        killed = await runtime.exec("kill -9 -1; echo survived")
        assert killed.exit_code in (0, 137)
        assert (await runtime.exec("echo well")).stdout == b"well\\n"
        await runtime.write("/tests/x", b"content")
        assert await runtime.read("/tests/x") == b"content"
        assert not (await runtime.exec(["cat", str(owner.folder / "alive.lock")])).ok
        assert not (await runtime.exec("touch /usr/x || touch " + os.path.expanduser("~") + "/x")).ok
        url = runtime.gateway_url.removeprefix("http://").replace(":", "/")
        heard = await runtime.exec(f"bash -c 'exec 3<>/dev/tcp/{url}; cat <&3'")
        assert heard.stdout == b"SECRET", heard
        rights = (await runtime.exec("grep -E 'CapEff|CapBnd' /proc/self/status")).text.split()
        assert {int(one, 16) for one in rights[1::2]} == {0}, rights
    owner.close()
    print("DONE")

asyncio.run(main(*sys.argv[1:]))
"""


def interpreter() -> list[str]:
    """A Python that any user may run, with this one's packages."""
    packages = [str(Path(polar.__file__).parent.parent), *(one for one in sys.path if one.endswith("site-packages"))]
    for program in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""):
        command = [
            "env",
            "-i",
            f"PYTHONPATH={':'.join(packages)}",
            "PYTHONDONTWRITEBYTECODE=1",
            "HOME=/nonexistent",
            "PATH=/usr/bin:/bin",
            program,
        ]
        done = subprocess.run(
            [*command, "-c", "import polar.runtime"], user=USER, group=USER, extra_groups=[], capture_output=True, timeout=60, check=False
        )
        if done.returncode == 0:
            return command
    pytest.skip("no Python here that another user may run")


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests of sandboxes are these, then")
@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
def test_a_user_who_is_not_root(backend: str) -> None:
    root = Path("/tmp") / f"polar-unprivileged-{os.getpid()}-{backend}"
    root.mkdir(mode=0o700)
    os.chown(root, USER, USER)
    try:
        done = subprocess.run(
            [*interpreter(), "-c", SCRIPT, backend, str(root)],
            user=USER,
            group=USER,
            extra_groups=[],
            capture_output=True,
            timeout=120,
            check=False,
            cwd="/",
        )
        if done.stdout.startswith(b"SKIP"):
            pytest.skip(done.stdout.decode())
        assert (done.returncode, done.stdout) == (0, b"DONE\n"), done.stderr.decode()
    finally:
        shutil.rmtree(root)
