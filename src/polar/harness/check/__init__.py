"""`polar harness check`: real CLIs, a real gateway, a scripted model, and the laws checked on what was captured.

Each row is one CLI in one dialect and one mode. The CLI does the exercise of `scenario` in a folder of its own; the work must be
on disk, the records must hold the laws (`verify`), and so must the training rows built of them (`rows`). In mode `tokens` the same run
is then played again, request for request, on a gateway with bridging switched off, where it must show breaks; and once more with one
word of its history changed, which must not be bridged.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import aiohttp

from polar.errors import ConfigError
from polar.harness.base import Dialect, Endpoint, Options
from polar.harness.check.lab import Lab, laboratory, tokenizer_folder
from polar.harness.check.relay import Recorded, Relay, relaying
from polar.harness.check.row import Row, render_table
from polar.harness.check.rows import judge_rows
from polar.harness.check.scenario import FILES
from polar.harness.check.subject import Subject, all_names, subject
from polar.harness.check.verify import extends, judge
from polar.harness.install import Progress
from polar.harness.run import launch
from polar.records import Completion, Mode

__all__ = ["Row", "all_names", "check", "check_async", "render_table"]

_ORIGINAL, _EDITED = b"step-1-done", b"step-1-dOne"
_REPLAY_TIMEOUT_S = 60.0


def check(
    names: Sequence[str] | None = None,
    *,
    modes: Iterable[Mode] = ("tokens", "messages"),
    dialects: Sequence[Dialect] | None = None,
    bridging: bool = True,
    progress: Progress = lambda line: None,
    keep: Path | None = None,
    jobs: int = 1,
) -> list[Row]:
    """Runs the conformance check; see `check_async`."""
    return asyncio.run(check_async(names, modes=modes, dialects=dialects, bridging=bridging, progress=progress, keep=keep, jobs=jobs))


async def check_async(
    names: Sequence[str] | None = None,
    *,
    modes: Iterable[Mode] = ("tokens", "messages"),
    dialects: Sequence[Dialect] | None = None,
    bridging: bool = True,
    progress: Progress = lambda line: None,
    keep: Path | None = None,
    jobs: int = 1,
) -> list[Row]:
    """A row for each harness in `names` (default: all), each of its dialects (or those of `dialects`) and each mode.

    Missing harnesses are installed first. `jobs` rows run at a time; each has an engine, gateway, home and folder of its own. `keep`
    names a folder in which homes, work and stores stay for a look. Raises `ConfigError` for an unknown name and `HarnessError` where an
    installation fails; what a CLI does wrong is in its row's `problems`.
    """
    chosen, modes = tuple(names) if names else all_names(), tuple(modes)
    unknown = [name for name in chosen if name not in all_names()]
    if unknown:
        raise ConfigError(f"cannot check {', '.join(unknown)}; there are: {', '.join(all_names())}")
    tokenizer_dir = await asyncio.to_thread(tokenizer_folder, progress)
    subjects = [await asyncio.to_thread(subject, name, progress) for name in chosen]
    free = asyncio.Semaphore(jobs)

    async def one(item: Subject, dialect: Dialect, mode: Mode) -> Row:
        async with free:
            row = await _check_one(item, dialect, mode, bridging, tokenizer_dir, keep)
        state = "pass" if row.passed else "FAIL: " + "; ".join(row.problems[:3])
        progress(f"{item.name} {dialect} {mode}: {state} ({row.duration_s:.0f} s)")
        return row

    wanted = [(item, dialect) for item in subjects for dialect in item.dialects if dialects is None or dialect in dialects]
    return await asyncio.gather(*(one(item, dialect, mode) for item, dialect in wanted for mode in modes))


async def _check_one(item: Subject, dialect: Dialect, mode: Mode, bridging: bool, tokenizer_dir: Path, keep: Path | None) -> Row:
    row = Row(item.name, item.version, dialect, mode, bridging)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"polar-check-{item.name}-{dialect}-{mode}-", dir=keep))
    try:
        async with laboratory(tokenizer_dir, folder, mode, bridging=bridging, abilities=item.plan.abilities) as lab:
            async with relaying(lab.url) as relay:
                await _run_legs(item, dialect, lab, relay, folder, row)
            await _judge(item, lab, mode, bridging, row)
            if mode == "tokens" and bridging:
                await _edit_history(lab, relay, row)
        if mode == "tokens" and bridging:
            await _play_without_bridging(item, lab, relay, tokenizer_dir, folder, row)
    except (aiohttp.ClientError, TimeoutError) as error:
        row.problems.append(f"the gateway did not answer a request that was played again: {error!r}")
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    row.duration_s = time.monotonic() - started
    return row


async def _run_legs(item: Subject, dialect: Dialect, lab: Lab, relay: Relay, folder: Path, row: Row) -> None:
    work, home = folder / "work", folder / "home"
    await asyncio.to_thread(_git_folder, work)
    endpoint = Endpoint(f"{relay.url}/s/{lab.key}", lab.key, dialect, "polar-check")
    for leg in item.plan.legs:
        options = Options(compact_at=leg.compact_at, retries=1, settings=leg.settings)
        result = await launch(
            item.harness.name,
            leg.prompt,
            endpoint,
            cwd=work,
            home=home,
            timeout_s=item.plan.timeout_s,
            options=options,
            installation=item.installation,
            resume=leg.resume,
        )
        refused = result.problem is not None and not result.timed_out
        if leg.refused != refused or result.timed_out:
            said = result.problem or "it reported success"
            row.problems.append(f"{'the refused run' if leg.refused else 'the run'} ended wrongly: {said}")
    for name, content in FILES.items():
        path = work / name
        if path.exists() and path.read_text(encoding="utf-8") == content:
            row.files += 1
        else:
            row.problems.append(f"{name} is not on disk as it should be")


def _git_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    if shutil.which("git"):
        subprocess.run(("git", "init", "--quiet", str(folder)), check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)


async def _judge(item: Subject, lab: Lab, mode: Mode, bridging: bool, row: Row) -> None:
    completions = await lab.completions()
    found = judge(completions, item.harness, item.plan, mode, bridging, lab.render_new)
    row.completions, row.conversations, row.extended = found.completions, found.conversations, found.extended
    row.broken, row.roles = found.broken, found.roles
    row.problems += found.problems
    row.built = judge_rows(completions, item.harness, item.plan, mode, bridging)
    row.problems += row.built.problems
    if mode == "tokens" and not bridging and not found.broken:
        row.problems.append("bridging is off, but there is no break")


async def _edit_history(lab: Lab, relay: Relay, row: Row) -> None:
    """Sends the longest request again with one word of an early tool result changed: it must be rendered afresh, and be called an edit."""
    candidates = [item for item in relay.requests if item.status == 200 and _ORIGINAL in item.body and b"step-2-done" in item.body]
    before = await lab.completions()
    if not candidates:
        row.problems.append("no request to edit: the first tool result was never sent back")
        return
    chosen = max(candidates, key=lambda item: len(item.body))
    async with _client() as client:
        status = await relay.send(client, chosen, to=lab.url, body=chosen.body.replace(_ORIGINAL, _EDITED))
    new = [item for item in await lab.completions() if item.number not in {old.number for old in before}]
    if status != 200 or not new:
        row.problems.append(f"the edited request was answered with {status} and recorded {len(new)} times")
        return
    edited = new[0]
    row.edited = edited.broken.cause.value if edited.broken is not None else "no cause"
    bridged = [old.number for old in before if _mentions(old, _ORIGINAL.decode()) and extends(edited, old)]
    if bridged:
        row.problems.append(f"an edited history was bridged to call {bridged[0]}")
    if row.edited != "history_edited":
        row.problems.append(f"the cause of an edited history is called {row.edited}")


async def _play_without_bridging(item: Subject, lab: Lab, relay: Relay, tokenizer_dir: Path, folder: Path, row: Row) -> None:
    """The same requests on a gateway with bridging off: what the capture would have been without it."""
    other = folder / "not-bridged"
    other.mkdir()
    async with laboratory(tokenizer_dir, other, "tokens", bridging=False, abilities=item.plan.abilities) as second, _client() as client:
        for recorded in relay.requests:
            await relay.send(client, _rekeyed(recorded, lab.key, second.key), to=second.url)
        found = judge(await second.completions(), item.harness, item.plan, "tokens", False, second.render_new)
    row.breaks_off = found.causes
    if not found.broken:
        row.problems.append("the same run with bridging off shows no break: the check proves nothing")
    row.problems += [f"bridging off: {problem}" for problem in found.problems if "no cause is named" in problem]


def _rekeyed(recorded: Recorded, old: str, new: str) -> Recorded:
    headers = {name: value.replace(old, new) for name, value in recorded.headers.items()}
    return Recorded(recorded.method, recorded.path.replace(old, new), headers, recorded.body, recorded.status)


def _mentions(completion: Completion, text: str) -> bool:
    return any(text in message.text for message in completion.messages if message.role == "tool")


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REPLAY_TIMEOUT_S))
