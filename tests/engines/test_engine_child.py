"""An engine that a command starts for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, os, pathlib, signal, sys, urllib.request
from polar.engine.child import running_engine

async def main():
    async with running_engine("tiny-qwen3", pathlib.Path(sys.argv[1])) as url:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
        os.killpg(0, signal.SIGINT)  # as a terminal does
        await asyncio.sleep(2)
        print(await asyncio.to_thread(lambda: urllib.request.urlopen(url + "/health", timeout=30).status))

asyncio.run(main())
"""


@pytest.mark.real
def test_a_ctrl_c_in_the_terminal_leaves_the_engine_to_its_command(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=240, start_new_session=True, check=False
    )
    assert ended.stdout.strip() == "200", ended.stderr
