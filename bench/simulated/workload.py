"""The times of simulated sessions, in simulated seconds, drawn by seed: the same seed gives every arm the same work.

Log-normal throughout, by median and sigma: most sessions are ordinary, some are long, as agents' are. The figures are of the order that
coding tasks in containers show with a model of some ten billion parameters: an answer of 300 tokens at 60 tokens a second, a container
and a CLI that are there after twenty seconds, a test suite of half a minute.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """`median * exp(sigma * N(0, 1))`, cut at `longest`."""

    median: float
    sigma: float
    longest: float

    def draw(self, random_: random.Random) -> float:
        return min(self.longest, self.median * math.exp(random_.gauss(0.0, self.sigma)))

    @property
    def text(self) -> str:
        return f"median {self.median:g}, sigma {self.sigma:g}, at most {self.longest:g}"


INIT = Times(20, 0.6, 120)
CALLS = Times(12, 0.6, 60)
CALL = Times(5, 0.7, 60)
TOOL = Times(2, 1.0, 60)
EVALUATION = Times(30, 0.8, 300)
TEARDOWN = Times(4, 0.5, 30)
STATED = {
    "init (s)": INIT,
    "calls a session": CALLS,
    "engine time of a call (s)": CALL,
    "tool time between calls (s)": TOOL,
    "evaluation with its sandbox (s)": EVALUATION,
    "teardown (s)": TEARDOWN,
}


@dataclass(frozen=True, slots=True)
class Session:
    """One session's times, scaled to real seconds. `calls` holds (engine, tool) for each model call."""

    init_s: float
    calls: tuple[tuple[float, float], ...]
    evaluation_s: float
    teardown_s: float

    @property
    def engine_s(self) -> float:
        return sum(engine for engine, _ in self.calls)

    @property
    def run_s(self) -> float:
        """On an engine that has always a slot free."""
        return sum(engine + tool for engine, tool in self.calls)

    @property
    def instruction(self) -> str:
        """What the agent program is told: a line a call."""
        return json.dumps([[round(engine, 5), round(tool, 5)] for engine, tool in self.calls])


def draw(seed: int, count: int, scale: float) -> list[Session]:
    """`count` sessions; `scale` real seconds stand for a simulated one."""
    random_ = random.Random(seed)
    sessions = []
    for _ in range(count):
        calls = tuple((CALL.draw(random_) * scale, TOOL.draw(random_) * scale) for _ in range(max(1, round(CALLS.draw(random_)))))
        sessions.append(
            Session(INIT.draw(random_) * scale, calls, EVALUATION.draw(random_) * scale, TEARDOWN.draw(random_) * scale),
        )
    return sessions
