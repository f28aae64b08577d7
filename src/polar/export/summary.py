"""What became of many sessions' tokens: rows, ledger, and breaks by harness, dialect and cause. Pure.

Its size does not grow with the number of sessions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from polar.chat import JsonObject
from polar.trajectory.drift import DriftLine, DriftTotal, aggregate
from polar.trajectory.row import Trajectory

WARNINGS = 10
"""Sessions whose warnings are kept."""


@dataclass(slots=True)
class Summary:
    """Filled by `add`; `in_rows + sum(ledger) == sampled`."""

    sessions: int = 0
    rows: int = 0
    roots: int = 0
    sampled: int = 0
    in_rows: int = 0
    ledger: Counter[str] = field(default_factory=Counter)
    rules: dict[str, str] = field(default_factory=dict)
    """For each ledger reason, a rule that decided it."""
    warnings: list[str] = field(default_factory=list)
    breaks: tuple[DriftLine, ...] = ()
    """One by one, as long as there is one session only."""
    _totals: dict[tuple[str, str, str], DriftTotal] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        self.sessions += 1
        self.rows += len(trajectory.traces)
        self.roots += trajectory.roots
        self.sampled += trajectory.sampled
        self.in_rows += trajectory.in_rows
        self.ledger.update(trajectory.ledger.by_reason())
        for line in trajectory.ledger:
            self.rules.setdefault(line.reason, line.rule)
        if self.sessions <= WARNINGS:
            self.warnings += [f"{trajectory.session}: {warning}" for warning in trajectory.warnings]
        self.breaks = trajectory.drift if self.sessions == 1 else ()
        for more in aggregate(trajectory.drift):
            total = self._totals.setdefault((more.harness, more.dialect, more.cause), DriftTotal(more.harness, more.dialect, more.cause))
            total.breaks += more.breaks
            total.dropped += more.dropped
            total.repeated += more.repeated
            total.lost += more.lost

    def totals(self) -> list[DriftTotal]:
        """The costliest first."""
        return sorted(self._totals.values(), key=lambda total: (-(total.repeated + total.lost), total.harness, total.dialect, total.cause))

    def as_json(self) -> JsonObject:
        return {
            "sessions": self.sessions,
            "rows": self.rows,
            "conversations": self.roots,
            "tokens": {"sampled": self.sampled, "in_rows": self.in_rows, "ledger": dict(self.ledger)},
            "totals": [asdict(total) | {"fix": total.fix} for total in self.totals()],
            "breaks": [asdict(line) | {"fix": line.fix} for line in self.breaks],
            "warnings": self.warnings,
        }
