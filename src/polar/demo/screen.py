"""The demo's progress on a console: the trainer's own line, with the demo's words where the trainer's would ask for knowledge of it.

Knows the console only.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from polar.demo.learn import LEARNED
from polar.demo.plot import bar
from polar.train.evaluation import Outcome
from polar.train.progress import Screen


class DemoScreen(Screen):
    """Each step as a bar of what its sessions earned."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console, steps)
        self._out = console
        self._all = steps

    def stepped(self, step: int, values: Mapping[str, float]) -> None:
        share = values.get(f"reward/{LEARNED}", values.get("reward/mean", 0.0))
        line = Text(f"  step {step:2d} of {self._all}  ")
        line.append(f"{bar(share, 30):<30}", "green")
        line.append(f" {share:4.0%} of its sessions under {LEARNED} passed", "bold")
        took = f"{values.get('time/collect_s', 0):.0f} s sessions + {values.get('time/step_s', 0):.0f} s step"
        agree = f"log-probabilities agree within {values.get('gate/largest', 0.0):.0e}"
        line.append(f"   {values.get('tokens/stepped', 0):,.0f} tokens trained, {agree}, {took}", "dim")
        self._out.print(line, soft_wrap=True)

    def evaluated(self, outcome: Outcome) -> None:
        for harness in outcome.results:
            estimate = outcome.estimate(harness)
            when = "before training" if outcome.step == 0 else f"after step {outcome.step}"
            said = f"pass@1 {estimate}" if estimate else "no session counts"
            self._out.print(Text(f"{harness}, {when}: {said}", "bold"), soft_wrap=True)
