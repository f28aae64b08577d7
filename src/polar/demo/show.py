"""What the demo prints: a table of sessions, what was not trained and why, and one trace with its mask in colour.

Knows the console and nothing else of the outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from polar.demo.play import Played
from polar.trajectory import Trace, Trajectory

Decode = Callable[[list[int]], str]
HEAD_CHARACTERS = 200
"""How much of a trace's beginning (the harness's own prompt) is shown."""


def sessions_table(played: Sequence[tuple[Played, Trajectory]]) -> Table:
    """A row per session, in tokens."""
    table = Table(title="Sessions")
    table.add_column("task", no_wrap=True, min_width=max((len(one.task.name) for one, _ in played), default=0))
    table.add_column("result")
    for name in ("turns", "prompt", "sampled", "trained", "rows", "s"):
        table.add_column(name, justify="right")
    for one, made in played:
        prompt = sum(len(call.prompt_ids) for call in one.completions if call.prompt_ids is not None)
        numbers = (len(one.completions), prompt, made.sampled, made.in_rows, len(made.traces))
        table.add_row(one.task.name, result(one), *(f"{number:,}" for number in numbers), f"{one.run.duration_s:.1f}")
    return table


def result(one: Played) -> Text:
    if one.grade.passed:
        return Text("passed", "bold green")
    if one.run.timed_out:
        return Text("timed out", "yellow")
    return Text("failed" if one.run.ok else f"failed: {one.run.problem}"[:60], "red")


def ledger_table(played: Sequence[tuple[Played, Trajectory]]) -> Table | Text:
    """What was sampled and is not trained, and why; and every prompt that did not extend its predecessor."""
    table = Table("task", "what", "why", title="Not trained, or worth a look")
    for one, made in played:
        for line in made.ledger:
            why = line.reason if line.rule == line.reason else f"{line.reason} ({line.rule})"
            table.add_row(one.task.name, f"{line.tokens:,} sampled tokens of call {line.completion}", why)
        for broken in made.drift:
            where = f"call {broken.completion} does not extend call {broken.parent}"
            table.add_row(one.task.name, where, f"{broken.cause}: a row of its own, {broken.repeated:,} ids of context again")
        for completion in one.completions:
            for tag in sorted(completion.tags & {"tool_call_malformed", "thinking_open", "clamped"}):
                table.add_row(one.task.name, "trained all the same", f"call {completion.number}: {tag.replace('_', ' ')}")
    if table.row_count:
        return table
    return Text("Nothing was left out: every sampled token stands in exactly one training row, and every prompt extended its predecessor.")


def totals(played: Sequence[tuple[Played, Trajectory]]) -> Text:
    """The conservation law in one line, and the pass rate."""
    sampled = sum(made.sampled for _, made in played)
    rows = sum(made.in_rows for _, made in played)
    ledger = sum(made.ledger.tokens for _, made in played)
    passed = sum(one.grade.passed for one, _ in played)
    text = Text(f"{passed} of {len(played)} sessions passed.  ", "bold")
    for split in ("train", "held_out"):
        side = [one for one, _ in played if one.task.split == split]
        if side:
            text.append(f"{split.replace('_', ' ')}: {sum(one.grade.passed for one in side)}/{len(side)}  ", "")
    text.append(f"\n{rows:,} sampled tokens in rows + {ledger:,} in the ledger = {sampled:,} sampled", "")
    return text


def example(played: Sequence[tuple[Played, Trajectory]]) -> tuple[Played, Trace] | None:
    """The trace to show: of a session that passed if one did, the one of most calls."""
    traces = [(one, row) for one, made in played for row in made.traces]
    return max(traces, key=lambda pair: (pair[0].grade.passed, len(pair[1].completions)), default=None)


def trace_panel(one: Played, row: Trace, decode: Decode) -> Panel:
    """A trace as text: what is trained in green, what the model only read dimmed; the harness's prompt is cut short."""
    text = Text()
    at = 0
    for sampled, run in groupby(row.mask.tolist()):
        length = len(list(run))
        piece = decode(row.ids[at : at + length].tolist())
        if at == 0 and len(piece) > 2 * HEAD_CHARACTERS:
            tail = max(piece.rfind("<|im_start|>user"), len(piece) - 4 * HEAD_CHARACTERS)
            hidden = tail - HEAD_CHARACTERS
            piece = f"{piece[:HEAD_CHARACTERS]}\n[... {hidden:,} characters of the harness's prompt ...]\n{piece[tail:]}"
        text.append(piece, "bold green" if sampled else "dim")
        at += length
    logprobs = row.logprobs[row.mask]
    mean = float(np.mean(logprobs)) if len(logprobs) else 0.0
    title = f"A trace of {one.task.name}: {len(row.ids):,} tokens, {row.trained:,} of them trained (green)"
    return Panel(
        text, title=title, subtitle=f"mean log-probability of the trained tokens {mean:.3f}", title_align="left", subtitle_align="left"
    )


def data_lines(folder: Path, session_id: str, program: str) -> Text:
    """Where everything lies and how to look at it, with `program` as the name that the shell knows this command by."""
    store = folder / "polar.db"
    return Text(
        f"All of it is on disk: {folder}\n"
        f"  {program} session list --store {store}\n"
        f"  {program} session show {session_id} --store {store}\n"
        f"  {program} session export {session_id} --store {store}\n"
        f"  {program} export {folder / 'sft'} --store {store} --rewards {folder / 'rewards.jsonl'} --min-reward 1"
    )


def show_all(console: Console, played: Sequence[tuple[Played, Trajectory]], decode: Decode, folder: Path, program: str = "polar") -> None:
    console.print()
    console.print(sessions_table(played))
    console.print()
    console.print(ledger_table(played))
    console.print()
    chosen = example(played)
    if chosen is not None:
        console.print(trace_panel(*chosen, decode))
        console.print()
    console.print(totals(played))
    if played:
        session_id = (chosen[0] if chosen else played[0][0]).session_id
        console.print(data_lines(folder, session_id, program), soft_wrap=True, highlight=False)
