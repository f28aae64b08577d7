"""One CLI in one dialect and one mode: what was found, and the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from polar.chat import JsonObject
from polar.harness.base import Dialect
from polar.harness.check.rows import Built
from polar.harness.check.scenario import FILES
from polar.harness.check.verify import Broken
from polar.records import Mode


@dataclass(slots=True)
class Row:
    """`breaks_off` counts the breaks of the same run, played again with bridging switched off; `None` where it was not played.
    `edited` is the cause that the gateway named for the same history with one word changed. `built` are the session's rows."""

    harness: str
    version: str
    dialect: Dialect
    mode: Mode
    bridging: bool
    completions: int = 0
    conversations: int = 0
    extended: int = 0
    broken: list[Broken] = field(default_factory=list)
    roles: Counter[str] = field(default_factory=Counter)
    built: Built = field(default_factory=Built)
    files: int = 0
    breaks_off: Counter[str] | None = None
    edited: str | None = None
    duration_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def breaks(self) -> Counter[str]:
        return Counter(item.cause for item in self.broken)

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> JsonObject:
        """Everything above, and whether it passed."""
        return {**_plain(self), "passed": self.passed}


def render_table(rows: Sequence[Row]) -> Group:
    """A row per CLI, dialect and mode; then the training rows built of each; then where prefixes break and why; then what went wrong."""
    failed = [Text(f"{row.harness} {row.dialect} {row.mode}: {problem}", "red") for row in rows for problem in row.problems]
    return Group(_summary(rows), _built(rows), *([_breaks(rows)] if any(row.broken for row in rows) else []), *failed)


def _summary(rows: Sequence[Row]) -> Table:
    table = Table(title="Harness conformance", title_justify="left")
    for name in (
        "harness",
        "dialect",
        "mode",
        "calls",
        "extended",
        "breaks and causes",
        "bridging off",
        "edited",
        "sub / compact",
        "disk",
        "s",
        "",
    ):
        table.add_column(name, justify="right" if name in ("calls", "extended", "s") else "left")
    for row in rows:
        table.add_row(
            f"{row.harness} {row.version}",
            row.dialect,
            row.mode if row.bridging else f"{row.mode}, not bridged",
            str(row.completions),
            str(row.extended),
            _causes(row.breaks),
            "" if row.breaks_off is None else _causes(row.breaks_off),
            row.edited or "",
            f"{row.roles['sub_agent']} / {row.roles['compaction']}",
            f"{row.files}/{len(FILES)}",
            f"{row.duration_s:.0f}",
            "[green]pass[/]" if row.passed else "[red]FAIL[/]",
        )
    return table


def _built(rows: Sequence[Row]) -> Table:
    table = Table(title="Training rows (prefix_merging)", title_justify="left")
    for name in ("harness", "dialect", "mode"):
        table.add_column(name)
    for name in ("main", "sub-agent"):
        table.add_column(name, justify="right")
    table.add_column("rows + side = roots + breaks", min_width=20)
    for name in ("named breaks", "in the ledger, by rule", "tokens: rows + ledger = sampled"):
        table.add_column(name)
    for row in rows:
        built, breaks = row.built, row.built.breaks
        table.add_row(
            row.harness,
            row.dialect,
            row.mode if row.bridging else f"{row.mode}, not bridged",
            str(built.rows["main"]),
            str(built.rows["sub_agent"]),
            f"{built.rows.total()} + {built.side} = {built.roots} + {breaks.total()}",
            _causes(breaks),
            "\n".join(f"{count} {rule.replace(f'({row.harness}: ', '(')}" for rule, count in sorted(built.rules.items())) or "none",
            f"{built.in_rows} + {built.in_ledger} = {built.sampled}",
        )
    return table


def _breaks(rows: Sequence[Row]) -> Table:
    table = Table(title="Where prefixes break", title_justify="left", expand=True)
    for name in ("harness", "dialect", "mode"):
        table.add_column(name, min_width=len(name), overflow="fold")
    for name, width in (("call", 4), ("continues", 9), ("at token", 8), ("not reused", 10)):
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    table.add_column("cause", min_width=17, no_wrap=True)
    table.add_column("the difference", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        for item in row.broken:
            numbers = (str(item.call), str(item.parent), str(item.position), str(item.lost))
            table.add_row(row.harness, row.dialect, row.mode, *numbers, item.cause, Text(item.why))
    return table


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Counter):
        return dict(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _causes(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in counter.most_common()) or "none"
