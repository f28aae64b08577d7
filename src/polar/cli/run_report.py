"""What `polar run` shows: a live line while it runs (or plain lines where nobody watches), then the summary. Knows the console only."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
import typer
from rich.status import Status
from rich.table import Table
from rich.text import Text

from polar.cli.output import err, out
from polar.rollout.campaign import Campaign, Standing
from polar.rollout.models import Event, SessionResult, TaskResult
from polar.rollout.summary import STAGES, Line, summarise

_COLOURS = {"graded": "green", "policy": "yellow", "infrastructure": "red", "cancelled": "magenta"}


class Screen:
    """Progress on stderr: a line for every session that ends, and one that keeps changing."""

    def __init__(self, campaign: Campaign, folder: Path) -> None:
        self._campaign = campaign
        self._began = time.monotonic()
        self._status = Status("starting", console=err)
        self._names = {request.task_id: _title(request.metadata) for request in campaign.requests}
        sessions, groups = campaign.sessions, len(campaign.requests)
        counted = f"{sessions} session{'s' * (sessions != 1)} in {groups} group{'s' * (groups != 1)}"
        self.say(f"{counted}; everything goes to {folder}")

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._status.stop()

    def say(self, line: str) -> None:
        err.print(Text(f"{time.monotonic() - self._began:6.1f} s  {line}", style="dim"), soft_wrap=True)

    def event(self, event: Event, standing: Standing) -> None:
        if event.type in ("session.attempt_failed", "session.warning"):
            why = event.data.get("error") or event.data.get("warning") or event.data.get("error_code") or event.type
            self.say(f"{self._names.get(event.task_id or '', '')}: {str(why)[:200]}")
        running, waiting = standing.count("RUNNING"), standing.count("REGISTERED", "INITIALIZING", "READY")
        grading, done = standing.count("POST_RUN", "BUILDING", "EVALUATING"), standing.count("COMPLETED", "TIMEOUT", "ERROR")
        self._status.update(
            f"{done}/{standing.total} sessions done, {running} running, {grading} being graded, {waiting} getting ready, "
            f"{len(standing.groups)}/{len(self._campaign.requests)} groups"
        )

    def group(self, group: TaskResult, standing: Standing) -> None:
        rewards = [result.reward for result in group.results if result.reward is not None]
        mean = f"reward {sum(rewards) / len(rewards):.2f}" if rewards else "no reward"
        self.say(f"{self._names.get(group.task_id, group.task_id)}: {mean}, {len(group.results)} sessions ({_counts(group.results)})")


def report(standing: Standing, campaign: Campaign, folder: Path, seconds: float, as_json: bool) -> None:
    """The summary, on stdout."""
    asked = {request.task_id: request.metadata for request in campaign.requests}
    harnesses = summarise(standing.groups, by=lambda result: str(asked[result.task_id]["harness"]))
    groups = summarise(standing.groups, by=lambda result: _title(asked[result.task_id]))
    if as_json:
        body = {"seconds": seconds, "harnesses": [asdict(one) for one in harnesses], "groups": [asdict(one) for one in groups]}
        typer.echo(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode())
        return
    out.print()
    out.print(_table("Groups", "task · harness", groups))
    out.print(_table("Harnesses", "harness", harnesses))
    out.print(_stages(harnesses))
    sampled = sum(one.sampled_tokens for one in harnesses)
    problems = [result for group in standing.groups for result in group.results if result.outcome == "infrastructure"]
    for result in problems[:10]:
        out.print(Text(f"{result.session_id}: {result.error_code}: {result.error}"[:400], "red"), soft_wrap=True)
    out.print(
        f"{sum(one.sessions for one in harnesses)} of {campaign.sessions} sessions, {sum(one.rows for one in harnesses)} training rows, "
        f"{sampled:,} sampled tokens, {sum(one.retries for one in harnesses)} retries, {seconds:.0f} s. All of it is in {folder}",
        highlight=False,
        soft_wrap=True,
    )


def _table(title: str, what: str, lines: list[Line]) -> Table:
    table = Table(title=title)
    table.add_column(what, no_wrap=True)
    for name in ("sessions", "outcome", "reward", "passed", "95%", "turns", "tokens", "rows"):
        table.add_column(name, justify="left" if name == "outcome" else "right")
    for one in lines:
        low, high = one.pass_interval
        interval = "" if math.isnan(low) else f"{low:.0%}-{high:.0%}"
        table.add_row(
            one.name,
            str(one.sessions),
            _outcomes(one.outcomes),
            _number(one.reward, 2),
            str(one.passed),
            interval,
            _number(one.turns, 1),
            f"{one.sampled_tokens:,}",
            str(one.rows),
        )
    return table


def _stages(lines: list[Line]) -> Table:
    table = Table(title="Mean seconds in each stage")
    table.add_column("harness", no_wrap=True)
    for stage in STAGES:
        table.add_column(stage.removesuffix("_ms").replace("queue", "waiting"), justify="right")
    for one in lines:
        table.add_row(one.name, *(_number(one.stage_s[stage], 2) for stage in STAGES))
    return table


def _outcomes(outcomes: dict[str, int]) -> Text:
    text = Text()
    for name, count in sorted(outcomes.items()):
        text.append(f"{count} {name} ", _COLOURS.get(name, ""))
    return text


def _counts(results: list[SessionResult]) -> str:
    counts: dict[str, int] = {}
    for result in results:
        counts[result.outcome or "unknown"] = counts.get(result.outcome or "unknown", 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _title(metadata: dict[str, object]) -> str:
    return f"{metadata.get('task', '')} · {metadata.get('harness', '')}"


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"
