"""An agent's work brought into the evaluator's sandbox: its work folder, or its patch. Knows no tests and no reward.

The evaluator's sandbox was prepared like the agent's. Its work folder is emptied and filled with the agent's files, so that what the agent
removed is gone; then guarded files are put back (`polar.evaluator.guards`). Links that leave the folder are not carried, but for those to
plain files that the evaluator's sandbox has too (a virtual environment's interpreter): one to where hidden tests will lie would be a way
to read them. Setuid and setgid bits of files are dropped: they mean nothing to a grader, and must not come to this machine.

A top-level module that has the name of one of Python's own (`json.py`) runs inside of whatever Python starts there, `python -m pytest` too.
It is carried and noted: it may be what the task asks for (`calendar.py`), and it can do no more to the tests than any module that they
import. Whom that troubles lets tests run where the folder is not on the path (`python -P`), or judges outputs in another process.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from polar.chat import JsonObject
from polar.errors import EvaluatorError, UnsafePath
from polar.evaluator import patches
from polar.evaluator.base import Evidence
from polar.evaluator.budget import Budget
from polar.evaluator.guards import PARTLY, Trusted, guarded
from polar.runtime.base import Runtime
from polar.runtime.kept import used

How = Literal["workdir", "patch", "none"]
MAX_BYTES = 4 << 30
_MOST_LOOK_ALIKES = 50
"""In a report."""


@dataclass(frozen=True, slots=True)
class Carried:
    """`refused`: why the agent's work cannot be had, which is its own doing; `None` where it was brought over."""

    refused: str | None = None
    undone: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    bits: tuple[str, ...] = ()
    """Files that lost their setuid or setgid bit."""
    look_alikes: tuple[str, ...] = ()
    """Modules of the agent's that stand in for Python's own where the folder is on the path."""
    how: str = ""

    def report(self) -> JsonObject:
        said: JsonObject = {"how": self.how}
        if self.refused is not None:
            said["refused"] = self.refused
        if self.undone:
            said["undone"] = list(self.undone)
        if self.links:
            said["links_not_carried"] = list(self.links)
        if self.bits:
            said["setuid_dropped"] = list(self.bits)
        if self.look_alikes:
            said["named_as_pythons_own"] = list(self.look_alikes)
        return said


async def carry(
    evidence: Evidence, runtime: Runtime, how: How, *, protect: Sequence[str], budget: Budget, folder: str | None = None
) -> Carried:
    """Brings the work into `runtime`, unless that is the agent's own sandbox. `folder`: of the patch; `None`: the work folder.

    Raises `EvaluatorError` where there is nothing to bring for reasons that are not the agent's.
    """
    if runtime is evidence.agent:
        return Carried(how="in place")
    if how == "none":
        return Carried(how=how)
    target = folder or runtime.workdir
    trusted = await Trusted.take(runtime, target, protect, budget=budget)
    if how == "patch":
        done = await _patch(evidence, runtime, target, protect, budget)
    else:
        done = await _workdir(evidence, runtime, budget)
    if done.refused is not None:
        return done
    undone = await trusted.restore(runtime, budget=budget)
    return replace(done, undone=tuple(dict.fromkeys((*done.undone, *undone))))


async def _patch(evidence: Evidence, runtime: Runtime, target: str, protect: Sequence[str], budget: Budget) -> Carried:
    if evidence.patch is None and evidence.patch_refused is not None:
        return Carried(evidence.patch_refused, how="patch")
    if evidence.patch is None:
        raise EvaluatorError("no patch of the agent's work was taken (is git in its sandbox?), and the evaluator is to apply one")
    patch = evidence.patch

    def kept_of_it() -> tuple[bytes, tuple[str, ...]]:
        return patches.filtered(patch, lambda path: guarded(path, protect) and PurePosixPath(path).name not in PARTLY)

    kept, gone = await asyncio.to_thread(kept_of_it)  # it may have millions of lines, and others share the event loop
    applied = await patches.apply(runtime, kept, target, budget=budget)
    return Carried(None if applied.ok else f"the patch does not apply: {applied.how}", gone, how=f"patch: {applied.how}")


async def _workdir(evidence: Evidence, runtime: Runtime, budget: Budget) -> Carried:
    agent = evidence.agent
    if agent is None:
        raise EvaluatorError("the agent's sandbox is gone, and with it the work folder to grade")
    evidence.folder.mkdir(parents=True, exist_ok=True)
    local = evidence.folder / "work"
    links: dict[str, str] = {}
    bits: tuple[str, ...] = ()
    try:
        try:
            await agent.download(agent.workdir, local, max_bytes=MAX_BYTES)
        except UnsafePath:
            await asyncio.to_thread(shutil.rmtree, local, True)
            links, bits = await _unlink(agent, budget, _UNLINK), await _unset(agent, budget)
            try:
                await agent.download(agent.workdir, local, max_bytes=MAX_BYTES)
            except UnsafePath:
                await asyncio.to_thread(shutil.rmtree, local, True)
                links |= await _unlink(agent, budget, _UNCIRCLE)
                try:
                    await agent.download(agent.workdir, local, max_bytes=MAX_BYTES)
                except UnsafePath as error:
                    return Carried(f"the work folder cannot be taken out of the sandbox: {error}", how="workdir")
        except FileNotFoundError:
            local.mkdir()
        room_mb = runtime.spec.storage_mb
        if room_mb is not None and await asyncio.to_thread(used, local) > room_mb << 20:
            return Carried(f"the work folder takes more than the {room_mb} MB that a sandbox of the task has", how="workdir")
        emptied = await runtime.exec(
            ["sh", "-c", 'cd -- "$1" && ls -A && find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {} +', "sh", runtime.workdir],
            timeout_s=min(300.0, budget.left()),
        )
        if not emptied.ok:
            raise EvaluatorError(f"the evaluator's own work folder could not be emptied: {emptied.tail()}")
        look_alikes = await asyncio.to_thread(_look_alikes, local, frozenset(emptied.text.splitlines()))
        await runtime.upload(local, runtime.workdir)
    finally:
        await asyncio.to_thread(shutil.rmtree, local, True)  # a million files take longer than a node may be silent
    lost = await _relink(runtime, links, budget)
    return Carried(links=lost, bits=bits, look_alikes=look_alikes, how="workdir")


def _look_alikes(folder: Path, task: frozenset[str]) -> tuple[str, ...]:
    """Top-level modules that are called as one of Python's own, and that the task did not bring."""
    named = [path for path in folder.iterdir() if path.name.partition(".")[0] in sys.stdlib_module_names and path.name not in task]
    modules = [path for path in named if path.suffix in (".py", ".pyc", ".so") or (path / "__init__.py").is_file()]
    return tuple(sorted(path.name for path in modules)[:_MOST_LOOK_ALIKES])


_UNLINK = r"""
find . \( -type p -o -type s -o -type b -o -type c \) -exec rm -f -- {} +
find . -type l -exec sh -c '
for path do
    target=$(readlink -- "$path" && echo .) || continue
    target=${target%??}
    depth=0
    out=
    case $target in
    /*) out=1 ;;
    *)
        rest=${path#./}
        while [ "$rest" != "${rest#*/}" ]; do depth=$((depth + 1)); rest=${rest#*/}; done
        rest=$target/
        while [ -n "$rest" ]; do
            case ${rest%%/*} in
            ..) depth=$((depth - 1)) ;;
            "" | .) ;;
            *) depth=$((depth + 1)) ;;
            esac
            [ "$depth" -ge 0 ] || out=1
            rest=${rest#*/}
        done
        ;;
    esac
    if [ -n "$out" ]; then
        printf "%s\\0%s\\0" "$path" "$target"
        rm -f -- "$path"
    fi
done' sh {} +
"""
_UNCIRCLE = r"""
find . -type l -exec sh -c '
for path do
    [ ! -e "$path" ] || continue
    target=$(readlink -- "$path" && echo .) || continue
    printf "%s\\0%s\\0" "$path" "${target%??}"
    rm -f -- "$path"
done' sh {} +
"""
"""Links in a circle, or in a chain that no kernel follows, lead nowhere, and no copy takes them."""
_UNSET = r"""
find . -type f \( -perm -4000 -o -perm -2000 \) -exec sh -c '
for path do
    chmod ug-s -- "$path" && printf "%s\\0" "$path"
done' sh {} +
"""
_RELINK = r"""
while [ $# -gt 1 ]; do
    if [ -f "$2" ] && [ ! -e "$1" ] && ln -s -- "$2" "$1" 2> /dev/null; then :; else printf '%s\0' "$1"; fi
    shift 2
done
"""


async def _unlink(agent: Runtime, budget: Budget, script: str) -> dict[str, str]:
    """Takes links out of the agent's (finished) work folder: those that leave it, and sockets, pipes and devices with them (`_UNLINK`), or
    those that lead nowhere (`_UNCIRCLE`). Where each stood, and what it said."""
    done = await agent.exec(
        ["sh", "-c", f'cd -- "$1" || exit 1\n{script}', "sh", agent.workdir], timeout_s=min(120.0, budget.left()), keep_bytes=4 << 20
    )
    fields = [part.decode(errors="surrogateescape") for part in done.stdout.split(b"\0")[:-1]]
    return dict(zip(fields[::2], fields[1::2], strict=False))


async def _unset(agent: Runtime, budget: Budget) -> tuple[str, ...]:
    """Takes setuid and setgid bits off the files of the agent's (finished) work folder; which had one."""
    done = await agent.exec(
        ["sh", "-c", f'cd -- "$1" || exit 1\n{_UNSET}', "sh", agent.workdir], timeout_s=min(120.0, budget.left()), keep_bytes=4 << 20
    )
    return tuple(sorted(part.decode(errors="replace").removeprefix("./") for part in done.stdout.split(b"\0")[:-1]))


async def _relink(runtime: Runtime, links: dict[str, str], budget: Budget) -> tuple[str, ...]:
    """Makes links to plain files of the sandbox again; the others' paths."""
    lost: list[str] = []
    items = [(path, target) for path, target in links.items() if target.startswith("/") and "\0" not in path + target]
    lost.extend(path for path, target in links.items() if not target.startswith("/"))
    for start in range(0, len(items), 200):
        arguments = [text for item in items[start : start + 200] for text in item]
        done = await runtime.exec(
            ["sh", "-c", f'cd -- "$1" || exit 1; shift\n{_RELINK}', "sh", runtime.workdir, *arguments], timeout_s=min(60.0, budget.left())
        )
        if not done.ok:
            raise EvaluatorError(f"the links of the work folder could not be made again: {done.tail()}")
        lost.extend(part.decode(errors="replace") for part in done.stdout.split(b"\0") if part)
    return tuple(sorted(path.removeprefix("./") for path in lost))
