"""What a run shows while it goes: one line that keeps changing where somebody watches, a line a step everywhere. Knows the console only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress(Protocol):
    """`step` counts steps done so far."""

    def say(self, line: str) -> None: ...

    def collecting(self, step: int, groups: int, wanted: int) -> None: ...

    def stepping(self, step: int, rows: int, tokens: int) -> None: ...

    def stepped(self, step: int, values: Mapping[str, float]) -> None: ...

    def syncing(self, version: int) -> None: ...

    def evaluating(self, step: int, done: int, sessions: int) -> None: ...

    def session(self) -> None:
        """A session of the training has ended."""


class Silent:
    """Shows nothing."""

    def say(self, line: str) -> None: ...

    def collecting(self, step: int, groups: int, wanted: int) -> None: ...

    def stepping(self, step: int, rows: int, tokens: int) -> None: ...

    def stepped(self, step: int, values: Mapping[str, float]) -> None: ...

    def syncing(self, version: int) -> None: ...

    def evaluating(self, step: int, done: int, sessions: int) -> None: ...

    def session(self) -> None: ...


class Screen:
    """On a console. `steps`: those of the whole run."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._began = time.monotonic()
        self._status = Status("starting", console=console)
        self._sessions = 0
        self._reward = ""

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._status.stop()

    def say(self, line: str) -> None:
        self._console.print(Text(f"{time.monotonic() - self._began:7.1f} s  {line}", style="dim"), soft_wrap=True)

    def collecting(self, step: int, groups: int, wanted: int) -> None:
        self._show(step, f"{groups} of {wanted} groups, {self._sessions} sessions so far")

    def stepping(self, step: int, rows: int, tokens: int) -> None:
        self._show(step, f"training on {tokens:,} tokens in {rows} rows")

    def stepped(self, step: int, values: Mapping[str, float]) -> None:
        if "reward/mean" in values:
            self._reward = f"reward {values['reward/mean']:.2f}"
        self.say(step_line(step, self._steps, values))

    def syncing(self, version: int) -> None:
        self._status.update(f"bringing the weights of version {version} to the engines")

    def evaluating(self, step: int, done: int, sessions: int) -> None:
        self._show(step, f"evaluating, {done} of {sessions} sessions")

    def session(self) -> None:
        self._sessions += 1

    def _show(self, step: int, what: str) -> None:
        parts = [f"step {step + 1} of {self._steps}", what, self._reward]
        self._status.update(" · ".join(part for part in parts if part))


def step_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """A step in one line: what was earned, what was trained, how far trainer and engine differ, where the time went."""
    parts = [f"step {step}/{steps}"]
    if "reward/mean" in values:
        parts.append(f"reward {values['reward/mean']:.3f}")
    parts.append(f"{values.get('groups/taught', 0):.0f} of {values.get('groups', 0):.0f} groups teach")
    parts.append(f"{values.get('tokens/stepped', 0):,.0f} tokens")
    if "step/loss" in values:
        parts.append(f"loss {values['step/loss']:.4f}, gradient {values['step/grad_norm']:.3g}")
    if values.get("step/skipped"):
        parts.append("the gradient was not finite, the weights stay")
    if "step/mismatch" in values:
        parts.append(f"mismatch {values['step/mismatch']:.2g}")
    if values.get("gate/tokens"):
        parts.append(f"gate {values['gate/mean']:.2g}")
    parts.append(f"{values.get('time/collect_s', 0):.1f} s waiting, {values.get('time/step_s', 0):.1f} s training")
    return " · ".join(parts)
