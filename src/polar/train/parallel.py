"""Several processes train one policy, one process a GPU; with one process, nothing of this is in the way.

    with join() as group:                                  # alone, or as torchrun and `accelerate launch` say (RANK, WORLD_SIZE, ...)
        policy = group.load(model, dtype="bfloat16")       # every process, with the same arguments
        learner = group.learner(policy, how, loss, reference)
        if not group.leads:
            group.follow(learner)                          # does what the leader's learner does, until the leader leaves `join`
            return
        ...                                                # rank 0 alone: service, engine, files, `learner.step(rows)`, checkpoints

Only rank 0 talks to the rollout service, to engines and to the disk. Its learner is used as one of a single process: what it is asked, the
others are told to do as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from polar.train.learner import Learner, Optimisation
from polar.train.loading import load_policy
from polar.train.loss import Loss
from polar.train.policy import Policy


class Parallel(Protocol):
    """The processes that train together, as one of them sees it."""

    rank: int
    world: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""

    def broadcast(self, thing: Any) -> Any:
        """Rank 0's `thing`, on every rank. All of them call it."""

    def load(self, model: str, **how: Any) -> Policy:
        """As `load_policy`; all ranks call it, with the same arguments. Sharded over them where asked."""

    def learner(self, policy: Policy, how: Optimisation, loss: Loss | None = None, reference: Policy | None = None) -> Learner:
        """All ranks call it; the leader's is used, the others' is given to `follow`."""

    def follow(self, learner: Learner) -> None:
        """For all but the leader: takes part in whatever the leader's learner does. Returns when the leader leaves `join`."""


class Solo:
    """One process."""

    rank = 0
    world = 1
    leads = True

    def broadcast(self, thing: Any) -> Any:
        return thing

    def load(self, model: str, **how: Any) -> Policy:
        return load_policy(model, **how)

    def learner(self, policy: Policy, how: Optimisation, loss: Loss | None = None, reference: Policy | None = None) -> Learner:
        return Learner(policy, how, loss, reference)

    def follow(self, learner: Learner) -> None:
        raise RuntimeError("a single process leads; there is nobody to follow")


@contextmanager
def join() -> Iterator[Parallel]:
    """The group that this process was started in."""
    yield Solo()
