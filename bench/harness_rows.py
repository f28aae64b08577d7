"""The rows that real CLIs give: a table per harness, dialect and mode.

    python bench/harness_rows.py [NAMES] [--all-dialects] [--kept FOLDER]

Runs `polar harness check` (real CLIs, a real gateway, a scripted model that has them use tools, a sub-agent and a compaction) and builds
rows of what was recorded. `--kept` reads the stores of an earlier run instead, and a run leaves its own there. In mode `tokens` a main
conversation is one row up to its compaction, a sub-agent one, and side calls stand in the ledger; in mode `messages` rows are roots plus
named breaks. Both are checked; the exit code tells.

The scripted engine's log-probabilities are made up and its captures marked untrainable, so the builder is told to take them all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polar.harness import named, registered
from polar.harness.check import check_async
from polar.harness.check.plan import PLANS
from polar.records import Completion
from polar.store import open_store
from polar.trajectory import Forest, Options, PrefixMerging, Trajectory
from polar.trajectory.tags import of

NAMES = ("codex", "claude-code", "gemini-cli", "qwen-code", "opencode", "pi")
KEPT = {"history_edited", "compaction", "sub_agent"}
"""What may break a prefix in mode `tokens`: only what the harness did to its own history."""


@dataclass
class Found:
    """One recorded run and its rows."""

    harness: str
    dialect: str
    mode: str
    calls: int
    trajectory: Trajectory
    opened: Mapping[int, str]
    """For each row, by the first completion that it trains, why it is not the row before it: a cause; `root` where there was none."""
    problems: list[str] = field(default_factory=list)

    @property
    def roles(self) -> Counter[str]:
        return Counter(trace.role for trace in self.trajectory.traces)


async def read(folder: Path) -> Found | None:
    """The rows of a kept run; the check's own last call, an edited history played again in mode `tokens`, is left out."""
    store = open_store(str(folder / "polar.db"))
    try:
        (session,) = await store.sessions()
        completions = [one async for one in store.completions(session.id)]
    finally:
        await store.aclose()
    if not completions:
        return None
    first = completions[0]
    if first.mode == "tokens" and completions[-1].broken is not None:
        completions.pop()
    harness = next(name for name in sorted(registered(), key=len, reverse=True) if folder.name.startswith(f"polar-check-{name}-"))
    forest = Forest(session.id, completions)
    made = PrefixMerging(Options(untrainable=True)).build(forest, session, of(named(harness)))
    causes = {line.completion: line.cause for line in made.drift}
    opened = {min(span.completion for span in trace.spans if span.trained): "" for trace in made.traces}
    found = Found(harness, first.dialect, first.mode, len(completions), made, {number: causes.get(number, "root") for number in opened})
    _judge(found, completions)
    return found


def _judge(found: Found, completions: list[Completion]) -> None:
    made, plan, problems = found.trajectory, PLANS[found.harness], found.problems
    prompts = {one.number: one.prompt_ids for one in completions}
    for trace in made.traces:
        for span in trace.spans:
            prompt = prompts[span.completion]
            if prompt is None or trace.ids[: span.start].tobytes() != prompt.tobytes():
                problems.append(f"completion {span.completion} stands after ids that the engine did not see")
    if len(made.traces) != made.builder["roots"] + made.builder["breaks"]:
        problems.append(f"{len(made.traces)} rows are not {made.builder['roots']} roots and {made.builder['breaks']} breaks")
    opened = Counter(found.opened.values())
    if opened["root"] != made.builder["roots"]:
        problems.append(f"{opened['root']} rows have no named cause, for {made.builder['roots']} roots")
    if plan.compaction and "compaction" not in made.ledger.by_reason():
        problems.append("no compaction in the ledger")
    if found.mode == "tokens":
        if set(opened) - {"root"} - KEPT:
            problems.append(f"rows broken by {', '.join(sorted(set(opened) - {'root'} - KEPT))}")
        if plan.sub_agent and found.roles["sub_agent"] != 1:
            problems.append(f"{found.roles['sub_agent']} rows for one sub-agent")


async def record(names: list[str], folder: Path, all_dialects: bool) -> None:
    for name in names:
        dialects = None if all_dialects else named(name).dialects[:1]
        rows = await check_async([name], dialects=dialects, keep=folder, progress=lambda line: print(line, file=sys.stderr))
        for row in rows:
            if not row.passed:
                print(f"{name}: {'; '.join(row.problems)}", file=sys.stderr)


def collect(folder: Path) -> list[Found]:
    runs = [asyncio.run(read(path.parent)) for path in sorted(folder.glob("polar-check-*/polar.db"))]
    return [run for run in runs if run is not None]


def table(runs: list[Found]) -> Table:
    made = Table(title="Rows of real CLIs")
    for name in ("harness", "dialect", "mode", "calls", "rows", "main", "sub-agent", "roots + breaks", "broken by", "ledger (tokens)", ""):
        made.add_column(name, justify="right" if name in ("calls", "rows", "main", "sub-agent") else "left")
    for run in sorted(runs, key=lambda run: (run.harness, run.dialect, run.mode == "messages")):
        causes = Counter(cause for cause in run.opened.values() if cause != "root")
        made.add_row(
            run.harness,
            run.dialect,
            run.mode,
            str(run.calls),
            str(len(run.trajectory.traces)),
            str(run.roles["main"]),
            str(run.roles["sub_agent"]),
            f"{run.trajectory.builder['roots']} + {run.trajectory.builder['breaks']}",
            ", ".join(f"{count} {cause}" for cause, count in causes.most_common()),
            ", ".join(f"{reason} {tokens}" for reason, tokens in run.trajectory.ledger.by_reason().items()),
            "; ".join(run.problems) or "ok",
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--all-dialects", action="store_true", help="not only the first of each harness")
    parser.add_argument("--kept", type=Path, help="a folder with an earlier run's stores, or for this run's")
    arguments = parser.parse_args()
    folder = arguments.kept or Path(tempfile.mkdtemp(prefix="polar-rows-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("polar-check-*")):
        asyncio.run(record(arguments.names or list(NAMES), folder, arguments.all_dialects))
    runs = collect(folder)
    Console(width=None if sys.stdout.isatty() else 200).print(table(runs))
    return 1 if any(run.problems for run in runs) or not runs else 0


if __name__ == "__main__":
    raise SystemExit(main())
