"""What evaluation rollouts say of a model: pass@1, pass@k and how sure one can be. Pure numpy; knows no session and no model.

The unit is the task: samples of one task are not independent of each other, so an interval that treated 8 tasks with 8 samples each as 64
draws would be far too narrow. Intervals here are for the mean over tasks like these.

* One sample a task: Wilson's score interval (Wilson 1927, J. Am. Stat. Assoc. 22:209; recommended for small n by Brown, Cai and DasGupta
  2001, Stat. Sci. 16:101).
* Several samples: a bootstrap that draws whole tasks (cluster bootstrap; Davison and Hinkley 1997, *Bootstrap Methods*, section 3.8;
  for evaluations of language models see Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640). Its deviations are widened by
  sqrt(m / (m - 1)) for m tasks, since the plain percentile interval is too narrow by that where m is small.
* Where all tasks agree, a bootstrap would claim to be certain: Wilson's, with a draw a task, stands in for it.

Everything random is drawn from a seed: the same outcomes give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Outcomes = Mapping[str, Sequence[float]]
"""By task, what each of its samples earned: 0 or 1; for k of 1, any finite number (then means are of rewards)."""
Method = Literal["wilson", "bootstrap", "newcombe"]

RESAMPLES = 10_000
_BLOCK = 4_000_000
"""Draws in memory at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its interval. `tasks` and `samples` are how many it rests on; for a difference, `samples` counts both sides.

    `left_out`: tasks of only one side of a difference.
    """

    mean: float
    low: float
    high: float
    tasks: int
    samples: int
    method: Method
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}]"

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0: of a difference, that it is one."""
        return self.low > 0 or self.high < 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of `k` samples passes, estimated without bias from `c` passes in `n` samples.

    Chen et al. 2021, arXiv:2107.03374, eq. 1: `1 - C(n - c, k) / C(n, k)`, as a product, whose factors neither overflow nor cancel.
    Raises `ValueError` unless `0 <= c <= n` and `1 <= k <= n`.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples passed: the first must lie between 0 and the second")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be told from {n} samples: k lies between 1 and their number")
    if n - c < k:
        return 1.0
    if k == 1:
        return c / n
    return -math.expm1(sum(math.log1p(-k / i) for i in range(n - c + 1, n + 1)))


def mean_pass_at_k(outcomes: Outcomes, k: int = 1) -> float:
    """The mean over tasks, each counting once however many samples it has. Raises as `interval` does."""
    return float(_scores(outcomes, k).mean())


def interval(outcomes: Outcomes, k: int = 1, *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """pass@k (for k of 1: the mean) over tasks, with its interval.

    Raises `ValueError` where there are no tasks, a task has fewer than `k` samples, an outcome is not finite, or, for k over 1, is neither
    0 nor 1.
    """
    scores = _scores(outcomes, k)
    samples = sum(map(len, outcomes.values()))
    single = all(len(values) == 1 for values in outcomes.values())
    if _binary(outcomes) and (single or np.ptp(scores) == 0):
        low, high = wilson(float(scores.sum()), len(scores), confidence)
        return Estimate(float(scores.mean()), low, high, len(scores), samples, "wilson")
    low, high = _bootstrap(scores, confidence, seed, resamples)
    if _binary(outcomes):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(float(scores.mean()), low, high, len(scores), samples, "bootstrap")


def difference(
    before: Outcomes, after: Outcomes, k: int = 1, *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """How much pass@k rose from `before` to `after`, paired by task: only tasks of both sides count, and what makes one task easier than
    another on both sides cancels.

    Where every task changed by the same amount, Newcombe's interval without pairing (1998, Stat. Med. 17:873, method 10) stands in for the
    bootstrap. Raises `ValueError` as `interval` does, and where the sides have no task in common.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ValueError("the two sides have no task in common: there is nothing to compare")
    first, second = ({task: side[task] for task in common} for side in (before, after))
    changes = _scores(second, k) - _scores(first, k)
    samples = sum(len(side[task]) for side in (first, second) for task in common)
    left_out = tuple(sorted(before.keys() ^ after.keys()))
    mean = float(changes.mean())
    bounded = _binary(first) and _binary(second)
    if bounded and np.ptp(changes) == 0:
        low, high = _newcombe(mean_pass_at_k(first, k), mean_pass_at_k(second, k), len(common), confidence)
        return Estimate(mean, low, high, len(common), samples, "newcombe", left_out)
    low, high = _bootstrap(changes, confidence, seed, resamples)
    if bounded:
        low, high = max(low, -1.0), min(high, 1.0)
    return Estimate(mean, low, high, len(common), samples, "bootstrap", left_out)


def wilson(passed: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a proportion. `passed` may be a sum of shares. Raises `ValueError` unless `0 <= passed <= trials`, `trials > 0`
    and `0 < confidence < 1`."""
    if trials < 1 or not 0 <= passed <= trials:
        raise ValueError(f"{passed:g} of {trials} trials is no proportion")
    z = _z(confidence)
    share = passed / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return (0.0 if passed == 0 else max(0.0, centre - half)), (1.0 if passed == trials else min(1.0, centre + half))


def _newcombe(before: float, after: float, trials: int, confidence: float) -> tuple[float, float]:
    low_before, high_before = wilson(before * trials, trials, confidence)
    low_after, high_after = wilson(after * trials, trials, confidence)
    change = after - before
    return (
        change - math.hypot(after - low_after, high_before - before),
        change + math.hypot(high_after - after, before - low_before),
    )


def _scores(outcomes: Outcomes, k: int) -> NDArray[np.float64]:
    """float64[tasks]: each task's own pass@k, in the mapping's order."""
    if not outcomes:
        raise ValueError("there are no tasks: nothing was evaluated")
    scores = []
    for task, values in outcomes.items():
        if len(values) < k or not values:
            raise ValueError(f"task {task!r} has {len(values)} samples: too few for pass@{k}")
        if not all(map(math.isfinite, values)):
            raise ValueError(f"task {task!r} has an outcome that is not finite")
        if k == 1:
            scores.append(math.fsum(values) / len(values))
        elif not set(values) <= {0, 1}:
            raise ValueError(f"task {task!r} has outcomes other than 0 and 1: pass@{k} counts passes")
        else:
            scores.append(pass_at_k(len(values), int(sum(values)), k))
    return np.array(scores, np.float64)


def _binary(outcomes: Outcomes) -> bool:
    return all(value in (0, 1) for values in outcomes.values() for value in values)


def _bootstrap(scores: NDArray[np.float64], confidence: float, seed: int, resamples: int) -> tuple[float, float]:
    """Of the mean of one number a task. A single task says nothing about others: the interval is the whole line."""
    count = len(scores)
    if resamples < 1:
        raise ValueError("a bootstrap needs resamples")
    tail = (1 - _checked(confidence)) / 2
    if count == 1:
        return -math.inf, math.inf
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _BLOCK // count)
    for start in range(0, resamples, step):
        part = means[start : start + step]
        part[:] = scores[generator.integers(0, count, (len(part), count))].mean(axis=1)
    mean = scores.mean()
    low, high = mean + (np.quantile(means, [tail, 1 - tail]) - mean) * math.sqrt(count / (count - 1))
    return float(low), float(high)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + _checked(confidence)) / 2)


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence} is none: it lies between 0 and 1")
    return confidence
