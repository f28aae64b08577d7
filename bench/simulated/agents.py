"""The agent programs of all simulated sandboxes, in a process of their own as real ones are, so that a node's memory and CPU are Polar's.

A line of JSON in on a Unix socket (`id`, `url`, `key`, `instruction`), a line out when that agent has ended (`id`, `exit_code`, `said`).
An instruction is a list of (engine seconds, tool seconds), one for each call; a string in place of the first is passed on as it is, and a
tool that takes `"hold"` takes until SIGUSR1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp

SYSTEM = "You are a coding agent. You read files, change them and run the tests, one step at a time."


async def agent(http: aiohttp.ClientSession, let_go: asyncio.Event, url: str, key: str, instruction: str) -> tuple[int, str]:
    """Exit code and what it said last."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    headers = {"authorization": f"Bearer {key}"}
    said = ""
    for work, tool_s in json.loads(instruction):
        messages.append({"role": "user", "content": f"work {work}"})
        async with http.post(f"{url}/chat/completions", json={"model": "any", "messages": messages}, headers=headers) as answer:
            if answer.status != 200:
                return 1, f"status {answer.status}: {(await answer.text())[:200]}"
            message = (await answer.json())["choices"][0]["message"]
        said = message["content"] or ""
        messages.append({"role": "assistant", "content": said})
        if tool_s == "hold":
            await let_go.wait()
        elif tool_s:
            await asyncio.sleep(tool_s)
    return 0, said


async def serve(path: Path) -> None:
    running: set[asyncio.Task[None]] = set()
    let_go = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, let_go.set)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async def run(asked: dict[str, Any]) -> None:
                try:
                    exit_code, said = await agent(http, let_go, asked["url"], asked["key"], asked["instruction"])
                except aiohttp.ClientError as error:
                    exit_code, said = 1, str(error) or type(error).__name__
                writer.write(json.dumps({"id": asked["id"], "exit_code": exit_code, "said": said}).encode() + b"\n")

            while line := await reader.readline():
                task = asyncio.create_task(run(json.loads(line)))
                running.add(task)
                task.add_done_callback(running.discard)
            writer.close()

        server = await asyncio.start_unix_server(connected, path, limit=1 << 20)
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    asyncio.run(serve(parser.parse_args().socket))


if __name__ == "__main__":
    main()
