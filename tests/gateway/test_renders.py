"""Long renders in a process of their own: the same prompts, the same refusals, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from gateway_players import Chat

from polar.testing.gateway import scripted_gateway

LONG = "All work and no play makes a long prompt. " * 600


async def prompts(folder: Path, tokenizer_dir: Path, *, process: bool) -> list[np.ndarray]:
    async with scripted_gateway(lambda call: "Hi.", folder, tokenizer_dir=tokenizer_dir, render_process=process) as gw:
        session, client = await gw.session()
        player = Chat().user(LONG)
        await player.turn(client)
        player.user("And on.")
        await player.turn(client)
        served = gw.gateway.models.find("any")
        assert (served.renders is not None) == process
        return [made.prompt_ids for made in await gw.completions(session)]


async def test_the_prompts_are_those_of_the_gateway_itself(tmp_path_factory: pytest.TempPathFactory, qwen3_tokenizer_dir: Path) -> None:
    here = await prompts(tmp_path_factory.mktemp("here"), qwen3_tokenizer_dir, process=False)
    there = await prompts(tmp_path_factory.mktemp("there"), qwen3_tokenizer_dir, process=True)
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


async def test_an_overflow_there_is_the_callers(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    options = {"engine": {"context": 2000}, "render_process": True}
    async with scripted_gateway(lambda call: "Hi.", tmp_path, tokenizer_dir=qwen3_tokenizer_dir, **options) as gw:
        _, client = await gw.session()
        answer = await client.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": LONG}]})
        assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_without_the_process_the_gateway_renders_itself(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with scripted_gateway(lambda call: "Hi.", tmp_path, tokenizer_dir=qwen3_tokenizer_dir, render_process=True) as gw:
        _, client = await gw.session()
        await Chat().user(LONG).turn(client)
        (child,) = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        child.kill()
        assert (await Chat().user(LONG + "Again.").turn(client)).text == "Hi."


CHILD = """
import sys, time
from polar.gateway.renders import PathSpec, RenderProcess
if __name__ == "__main__":
    settings = {"model": "m", "renderer": "qwen3", "mode": "tokens"}
    RenderProcess(PathSpec(sys.argv[1], tuple(settings.items())))
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent is Linux's")
def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    parent = subprocess.Popen([sys.executable, str(script), str(qwen3_tokenizer_dir)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    children: list[psutil.Process] = []
    for _ in range(200):
        children = psutil.Process(parent.pid).children(recursive=True)
        if any("spawn_main" in " ".join(one.cmdline()) for one in children):
            break
        time.sleep(0.05)
    time.sleep(3)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
