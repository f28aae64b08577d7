"""Law 4, seen from the kernel: the write-ahead log is synced before the last event of an answer is sent."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash_parts import GatewayProcess, Harness, http, sampled

from polar.testing.engine import Reply, serve_scripted

CALLS = "fsync,fdatasync,pwrite64,write,writev,sendto,sendmsg"
LAST = {"anthropic": (rb"message_stop", rb"\"stop_reason\":\""), "openai_chat": (rb"data: [DONE]", rb"\"finish_reason\":\"")}
"""What the last piece of an answer holds, streamed and whole, as strace quotes it."""


@pytest.fixture(scope="module")
def strace() -> str:
    """strace, installed with apt where it is missing."""
    if shutil.which("strace") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "strace"], check=False, timeout=200)
    found = shutil.which("strace")
    if found is None or subprocess.run([found, "-qq", "true"], capture_output=True, check=False, timeout=20).returncode != 0:
        pytest.skip("needs strace and the right to trace a process")
    return found


@dataclass
class Syscall:
    """One call that succeeded: where it began and where it had returned, in the order of the trace."""

    name: str
    began: int
    ended: int
    text: bytes


def read_trace(path: Path) -> list[Syscall]:
    """The calls of all threads; strace splits one that another thread's output interrupts into two lines."""
    calls: list[Syscall] = []
    unfinished: dict[bytes, Syscall] = {}
    for at, line in enumerate(path.read_bytes().splitlines()):
        thread, _, rest = line.partition(b" ")
        rest = rest.strip()
        if resumed := re.match(rb"<\.\.\. (\w+) resumed>", rest):
            call = unfinished.pop(thread, None)
            if call is not None and call.name == resumed[1].decode():
                call.ended, call.text = at, call.text + rest[resumed.end() :]
                calls.append(call)
        elif started := re.match(rb"(\w+)\(", rest):
            call = Syscall(started[1].decode(), at, at, rest)
            if rest.endswith(b"<unfinished ...>"):
                unfinished[thread] = call
            else:
                calls.append(call)
    return [call for call in calls if not re.search(rb"= -1 ", call.text[-60:])]


@pytest.mark.real
@pytest.mark.parametrize(
    ("dialect", "stream", "live"),
    [("anthropic", False, False), ("anthropic", True, False), ("anthropic", True, True), ("openai_chat", True, False)],
    ids=["whole", "replayed", "live", "chat-replayed"],
)
async def test_the_log_is_synced_before_the_last_event_is_sent(
    dialect: str, stream: bool, live: bool, tmp_path: Path, strace: str, qwen3_tokenizer_dir: Path
) -> None:
    trace = tmp_path / "trace"
    prefix = [strace, "-f", "--seccomp-bpf", "-qq", "-y", "-s", "100000", "-o", str(trace), "-e", f"trace={CALLS}", "-e", "signal=none"]
    with serve_scripted(lambda call: Reply(ids=sampled(call.prompt_ids, call.tokenizer)), tokenizer_dir=qwen3_tokenizer_dir) as engine:
        gateway = GatewayProcess(engine.url, qwen3_tokenizer_dir, tmp_path / "polar.db", prefix=prefix, max_body_mb=1)
        try:
            async with http() as client:
                harness = await Harness.open(client, gateway, dialect, stream=stream, live=live)
                for _ in range(3):
                    await harness.turn(gateway, "Go on.")
                    await asyncio.sleep(1.5)  # the note that it was delivered is written within a second
        finally:
            gateway.stop()
    calls = read_trace(trace)
    log = [call for call in calls if b"polar.db-wal>" in call.text[:200]]
    written = [call for call in log if call.name == "pwrite64"]
    synced = [call for call in log if call.name in ("fsync", "fdatasync")]
    told = [call for call in calls if call.name not in ("fsync", "fdatasync", "pwrite64") and LAST[dialect][not stream] in call.text]
    assert len(told) == 3
    before = 0
    for call in told:
        mine = [write for write in written if before < write.began < call.began]
        assert mine, "nothing was written to the log before the last event"
        assert any(mine[-1].ended < sync.began and sync.ended < call.began for sync in synced), "the log was not synced before it"
        before = call.ended
