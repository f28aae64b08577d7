"""How a session's outcome reaches its rows, and how a group's outcomes become advantages. Pure.

A row whose reward is `None` is not trained: no policy turns "no credit" into a zero. Statistics of a group count a rollout once, however
many rows it has (a rollout that was split into three rows must not weigh three times in the baseline).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from polar.errors import ConfigError
from polar.trajectory.row import Trace, Trajectory

Policy = Literal["broadcast", "main_only", "last_row", "per_row"]


def credit(trajectory: Trajectory, reward: float | None, policy: Policy = "broadcast", rows: Sequence[float | None] = ()) -> Trajectory:
    """The trajectory with its rows rewarded.

    * `broadcast`: every row gets `reward`.
    * `main_only`: the rows of the main conversation get it; sub-agents and others get none.
    * `last_row`: the row that trains the session's last trained turn gets it.
    * `per_row`: the evaluator gave one reward a row, `rows`; `None` for a row without credit.

    A `reward` of `None` (no outcome: an infrastructure failure, say) leaves every row without one. Raises `ConfigError` for an unknown
    policy, `ValueError` for rewards that are not finite or, with `per_row`, not as many as rows.
    """
    traces = trajectory.traces
    if policy not in get_args(Policy):
        raise ConfigError(f"no credit policy is called {policy!r}; there are: {', '.join(get_args(Policy))}")
    if policy == "per_row":
        if len(rows) != len(traces):
            raise ValueError(f"session {trajectory.session!r} has {len(traces)} rows, and its evaluator gave {len(rows)} rewards")
        return trajectory.with_traces(trace.with_reward(one) for trace, one in zip(traces, rows, strict=True))
    if rows:
        raise ValueError(f"rewards by row need the policy per_row, not {policy}")
    gets: Callable[[Trace], bool]
    if policy == "broadcast":
        gets = _always
    elif policy == "main_only":
        gets = _is_main
    else:
        last = max((_last_turn(trace) for trace in traces), default=-1)
        gets = lambda trace: _last_turn(trace) == last  # noqa: E731
    return trajectory.with_traces(trace.with_reward(reward if gets(trace) else None) for trace in traces)


@dataclass(frozen=True, slots=True)
class Group:
    """The outcomes of one group's rollouts. `std` is the population's, as GRPO uses it."""

    outcomes: Mapping[str, float]
    """By rollout."""

    @property
    def mean(self) -> float:
        return math.fsum(self.outcomes.values()) / len(self.outcomes)

    @property
    def std(self) -> float:
        mean = self.mean
        return math.hypot(*(value - mean for value in self.outcomes.values())) / math.sqrt(len(self.outcomes))


def groups(traces: Iterable[Trace]) -> dict[str, Group]:
    """The groups of rows by `group_id`; a row without one belongs to the group of its own rollout.

    A rollout's outcome is the mean of its rows' rewards, rows without one left out: with `broadcast`, just its reward. Rollouts without any
    rewarded row are not counted.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        if trace.reward is not None:
            found[group_of(trace)][trace.rollout_id].append(trace.reward)
    return {
        group: Group({rollout: math.fsum(rewards) / len(rewards) for rollout, rewards in rollouts.items()})
        for group, rollouts in found.items()
    }


def advantages(traces: Sequence[Trace], *, normalise: bool = False, epsilon: float = 1e-6) -> list[float | None]:
    """For each row, its reward minus its group's mean, over `std + epsilon` if `normalise`; `None` for a row without reward."""
    known = groups(traces)
    found: list[float | None] = []
    for trace in traces:
        if trace.reward is None:
            found.append(None)
            continue
        group = known[group_of(trace)]
        advantage = trace.reward - group.mean
        found.append(advantage / (group.std + epsilon) if normalise else advantage)
    return found


def group_of(trace: Trace) -> str:
    return trace.group_id if trace.group_id is not None else f"rollout {trace.rollout_id}"


def _always(_: Trace) -> bool:
    return True


def _is_main(trace: Trace) -> bool:
    return trace.role == "main"


def _last_turn(trace: Trace) -> int:
    return max((span.completion for span in trace.spans if span.trained), default=-1)
