"""From delivered groups to what a step trains on, with every sampled token accounted for (law 3). Knows no model and no service.

sampled = in rows + ledger                      the trajectories' own law, counted again here
in rows = stepped + stale + dropped             by reason: why a rollout, or a row of it, is not trained
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polar.chat import JsonObject
from polar.errors import NotTrainable
from polar.rollout.models import SessionResult
from polar.train.advantages import Advantage, Advantages, advantages, spread
from polar.train.groups import Group, reward_of, rollouts_of
from polar.train.place import not_of_the_model
from polar.train.rows import Row, row_of
from polar.train.weights import Aggregation, version_number, weights
from polar.trajectory.row import Mask, Trace, Trajectory


@dataclass(frozen=True, slots=True)
class Recipe:
    """How groups become rows. `max_staleness` of `None`: a token's policy version does not matter (recorded groups)."""

    advantage: Advantage = field(default_factory=Advantage)
    aggregation: Aggregation = "token_mean"
    fixed_length: int | None = None
    max_staleness: int | None = 1
    shuffle_rewards: bool = False
    seed: int = 0
    vocabulary: int | None = None
    """How many ids the model has; `None` does not look."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens. `dropped`: by reason; `ledger`: by the trajectories' own reasons."""

    sampled: int = 0
    in_rows: int = 0
    stepped: int = 0
    stale: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raises `NotTrainable` if a token is counted twice or not at all: a bug, or a trajectory that was tampered with."""
        if self.sampled != self.in_rows + sum(self.ledger.values()):
            raise NotTrainable(f"{self.sampled} tokens were sampled, {self.in_rows} are in rows and {sum(self.ledger.values())} in ledgers")
        if self.in_rows != self.stepped + self.stale + sum(self.dropped.values()):
            raise NotTrainable(
                f"{self.in_rows} tokens are in rows: {self.stepped} trained, {self.stale} stale, {sum(self.dropped.values())} dropped"
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows`: what the learner gets, those with something to train. `traces`: all rows of the groups; `provenance[i]`: what is recorded of
    row i's engine."""

    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    traces: tuple[Trace, ...]
    provenance: tuple[JsonObject, ...]
    counts: Counts
    taught: int
    """Groups with an advantage."""
    ages: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by how many versions their policy is behind."""

    @property
    def results(self) -> list[SessionResult]:
        return [result for group in self.groups for result in group.results]


def make_batch(groups: Sequence[Group], recipe: Recipe, *, policy_version: int) -> Batch:
    """The batch of these groups at this policy version; groups that teach nothing are counted in it, too.

    A row with images is not trained: its ids alone are not what the engine saw. Its rollout counts in its group all the same.

    A row's advantage is its rollout's. Where an evaluator gave rows rewards of their own, each row is compared with the group by its own.
    Raises `NotTrainable` where tokens do not add up, for what is no trajectory, and for ids that the model does not have or that
    cannot be trained, `ValueError` for rewards that are not finite.
    """
    traces: list[Trace] = []
    provenance: list[JsonObject] = []
    shares: list[float | None] = []
    whys: list[str] = []
    sampled = 0
    ledger: Counter[str] = Counter()
    taught = 0
    for group in groups:
        shown = _shuffled(group, recipe.seed) if recipe.shuffle_rewards else group
        found = advantages(rollouts_of(shown), recipe.advantage)
        taught += bool(found.values)
        scale = _scale(shown, recipe.advantage)
        for result in shown.results:
            if result.trajectory is None:
                continue
            trajectory = _trajectory(result)
            counted = "sampled_tokens" in (result.trajectory.get("metadata") or {})  # the reference's trajectories do not say
            sampled += trajectory.sampled if counted else trajectory.in_rows + trajectory.ledger.tokens
            for line in trajectory.ledger:
                ledger[line.reason] += line.tokens
            for number, trace in enumerate(trajectory.traces):
                _check_ids(trace, result, number, recipe.vocabulary)
                share, why = _share(trace, result, found, scale, recipe.shuffle_rewards)
                traces.append(_owned(trace, result, group))
                provenance.append(_engine(result))
                shares.append(share)
                whys.append(why)
    weighed = weights(
        traces,
        [share is not None for share in shares],
        aggregation=recipe.aggregation,
        fixed_length=recipe.fixed_length,
        policy_version=policy_version,
        max_staleness=recipe.max_staleness,
    )
    dropped: Counter[str] = Counter()
    rows = []
    for trace, share, why, mask, weight in zip(traces, shares, whys, weighed.masks, weighed.rows, strict=True):
        if share is None:
            dropped[why] += trace.trained
        elif mask.any():
            rows.append(row_of(trace, mask=mask, weights=weight, advantage=share))
    counts = Counts(sampled, sum(trace.trained for trace in traces), weighed.stepped, weighed.stale, dict(dropped), dict(ledger))
    counts.check()
    ages = _ages(traces, weighed.masks, policy_version)
    return Batch(tuple(groups), tuple(rows), tuple(traces), tuple(provenance), counts, taught, ages)


def _trajectory(result: SessionResult) -> Trajectory:
    try:
        return Trajectory.from_json(result.trajectory or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise NotTrainable(f"session {result.session_id}: its trajectory cannot be read: {why}") from error


def _check_ids(trace: Trace, result: SessionResult, number: int, vocabulary: int | None) -> None:
    """A GPU would end the process for an id that is not there, and an id with nothing before it has no log-probability."""
    if len(trace) and trace.mask[0]:
        raise NotTrainable(f"session {result.session_id}, row {number}: its first id is to be trained, and nothing stands before it")
    if vocabulary is None or not len(trace.ids):
        return
    beyond = trace.ids[(trace.ids < 0) | (trace.ids >= vocabulary)]
    if len(beyond):
        raise NotTrainable(f"session {result.session_id}, row {number}: {not_of_the_model(int(beyond[0]), vocabulary)}")


def _engine(result: SessionResult) -> JsonObject:
    """What a node of ours says of it. A caller's metadata may hold anything under that name, and other nodes give them back as they are."""
    run = result.metadata.get("run")
    engine = run.get("engine") if isinstance(run, dict) else None
    return engine if isinstance(engine, dict) else {}


def _share(trace: Trace, result: SessionResult, found: Advantages, scale: float, shuffled: bool) -> tuple[float | None, str]:
    """A row's advantage, or `None` and why it has none."""
    advantage = found.values.get(result.session_id)
    if advantage is None:
        why = found.dropped[result.session_id]
        return None, (result.outcome or why) if why == "no_reward" and result.outcome in ("infrastructure", "cancelled") else why
    if trace.reward is None:
        return None, "no_credit"
    if trace.has_images:
        return None, "images"
    own = 0.0 if shuffled or result.reward is None else (trace.reward - result.reward) / scale
    return advantage + own, ""


def _scale(group: Group, how: Advantage) -> float:
    rewards = [reward for result in group.results if (reward := reward_of(result)) is not None]
    return spread(rewards, how)


def _shuffled(group: Group, seed: int) -> Group:
    """The rewards of a group's sessions in another order, the same for the same seed and group: a control from which nothing can be
    learned, with the same number of groups that teach."""
    places = [place for place, result in enumerate(group.results) if reward_of(result) is not None]
    rewards = [group.results[place].reward for place in places]
    random.Random(f"{seed}/shuffle {group.number}").shuffle(rewards)
    results = list(group.results)
    for place, reward in zip(places, rewards, strict=True):
        results[place] = results[place].model_copy(update={"reward": reward})
    return Group(group.number, tuple(results), group.task, group.harness)


def _owned(trace: Trace, result: SessionResult, group: Group) -> Trace:
    """The row under the names that are unique in this run, whatever its recorder called them."""
    return replace(trace, rollout_id=f"{group.number}/{result.session_id}", group_id=str(group.number))


def _ages(traces: Sequence[Trace], masks: Sequence[Mask], policy_version: int) -> dict[int, int]:
    found: Counter[int] = Counter()
    for trace, mask in zip(traces, masks, strict=True):
        for span in trace.spans:
            version = version_number(span.policy_version)
            count = int(np.count_nonzero(mask[span.start : span.end]))
            if version is not None and count:
                found[policy_version - version] += count
    return dict(found)
