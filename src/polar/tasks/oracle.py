"""Agents without a model: one that applies the reference solution, one that does nothing. With them a task, and the whole path of a
rollout, is tested for what it should give.

The oracle's command carries the solution itself, packed, so it runs in any sandbox that has a shell, base64, gzip and tar, and leaves
nothing in the work folder but what the solution puts there.
"""

from __future__ import annotations

import base64
import gzip
import io
import tarfile

from polar.errors import ConfigError
from polar.harness.spec import AgentSpec
from polar.tasks.request import AnyTask

LONGEST_COMMAND = 120_000
"""Bytes; Linux takes 131,072 in one argument."""

_CALL = r"""
if command -v python3 > /dev/null && [ -n "${OPENAI_BASE_URL:-}" ]; then
    python3 - <<'POLAR_CALL' || echo "the model was not reached" >&2
import json, os, urllib.request
body = {"model": os.environ.get("POLAR_MODEL", "model"), "max_tokens": 16, "messages": [{"role": "user", "content": "Say done."}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "")},
)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open(request, timeout=300))["choices"][0]["message"].get("content") or "")
POLAR_CALL
else
    echo "no model call: there is no python3 here" >&2
fi
"""


def oracle_agent(task: AnyTask, *, call: bool = False) -> AgentSpec:
    """An agent that solves the task. With `call` it asks the model something first, for services that take a session without any model
    call for a fault. Raises `ConfigError` where the task has no solution, or one too large for a command."""
    return AgentSpec(harness="shell", custom_shell=(_CALL if call else "") + oracle_command(task))


def noop_agent(*, call: bool = False) -> AgentSpec:
    """An agent that leaves everything as it is."""
    return AgentSpec(harness="shell", custom_shell=(_CALL if call else "") + "true")


def oracle_command(task: AnyTask) -> str:
    """A shell command, for the work folder, that runs the reference solution."""
    files = task.oracle()
    if files is None:
        raise ConfigError(f"task {task.name} has no reference solution (solution/solve.sh, or `solution` of a line)")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    text = base64.encodebytes(gzip.compress(packed.getvalue(), mtime=0)).decode()
    command = f"""solution=$(mktemp -d) || exit 1
trap 'rm -rf "$solution"' EXIT
base64 -d <<'POLAR_SOLUTION' | tar -xzf - -C "$solution" || exit 1
{text}POLAR_SOLUTION
if command -v bash > /dev/null; then bash "$solution/solve.sh"; else sh "$solution/solve.sh"; fi
"""
    if len(command) > LONGEST_COMMAND:
        raise ConfigError(f"task {task.name}: its solution is too large to be run as a command ({len(command)} bytes)")
    return command
