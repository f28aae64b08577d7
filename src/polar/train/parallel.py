"""Several processes train one policy, one process a GPU; with one process, nothing of this is in the way.

    with join() as group:                                  # alone, or as torchrun and `accelerate launch` say (RANK, WORLD_SIZE, ...)
        policy = group.load(model, dtype="bfloat16")       # every process, with the same arguments
        learner = group.learner(policy, how, loss, reference)
        if not group.leads:
            group.follow(learner)                          # does what the leader's learner does, until the leader leaves `join`
            return
        ...                                                # rank 0 alone: service, engine, files, `learner.step(rows)`, checkpoints

Only rank 0 talks to the rollout service, to engines and to the disk. Its learner is used as one of a single process: what it is asked, the
others are told to do as well. A batch's weights are of the whole batch, so gradients are sums over processes, and a step is what it would
be in a single one, up to the order of the sums. Two ways to lay out the weights:

* `none`: each process has all of them; gradients are added up once a step. For LoRA, and models that are small.
* `full`: in pieces (`polar.train.sharded`). For whole models, whose optimiser alone takes 12 bytes a weight.

Where one process fails, the launcher ends the others; the run goes on from its last checkpoint, with as many processes as there then are.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polar.errors import ConfigError
from polar.train import loading, sharded
from polar.train.learner import Learner, Optimisation
from polar.train.loss import Objective
from polar.train.optimizer import HALVES
from polar.train.policy import Policy
from polar.train.shares import ORDERS, SharedLearner

Sharding = Literal["auto", "none", "full"]
"""`auto`: `none` for LoRA, `full` else."""

WAIT = timedelta(days=30)
"""For the leader's next word: rollouts may take long. That the leader is gone is noticed at once, by its connection."""


class Parallel(Protocol):
    """The processes that train together, as one of them sees it."""

    rank: int
    world: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""

    def broadcast(self, thing: Any) -> Any:
        """Rank 0's `thing`, on every rank. All of them call it."""

    def load(self, model: str, *, sharding: Sharding = "auto", temperature: float = 1.0, **how: Any) -> Policy:
        """As `load_policy`; all ranks call it, with the same arguments. Only rank 0 reads the model."""

    def reference(self, policy: Policy, model: str, *, sharding: Sharding = "auto", **how: Any) -> Policy:
        """As `reference_of`; all ranks call it."""

    def learner(self, policy: Policy, how: Optimisation, loss: Objective | None = None, reference: Policy | None = None) -> Learner:
        """All ranks call it; the leader's is used, the others' is given to `follow`."""

    def follow(self, learner: Learner) -> None:
        """For all but the leader: takes part in whatever the leader's learner does, until the leader says `release`, or leaves `join`."""

    def release(self) -> None:
        """The leader is done with its learner."""


class Solo:
    """One process."""

    rank = 0
    world = 1
    leads = True

    def broadcast(self, thing: Any) -> Any:
        return thing

    def load(self, model: str, *, sharding: Sharding = "auto", temperature: float = 1.0, **how: Any) -> Policy:
        return loading.load_policy(model, temperature=temperature, **how)

    def reference(self, policy: Policy, model: str, *, sharding: Sharding = "auto", **how: Any) -> Policy:
        return loading.reference_of(policy, model, **how)

    def learner(self, policy: Policy, how: Optimisation, loss: Objective | None = None, reference: Policy | None = None) -> Learner:
        return Learner(policy, how, loss, reference)

    def follow(self, learner: Learner) -> None:
        raise RuntimeError("a single process leads; there is nobody to follow")

    def release(self) -> None:
        pass


@contextmanager
def join() -> Iterator[Parallel]:
    """The group that this process was started in. On leaving, the leader lets the others go; with one that failed amid a step they cannot
    be spoken to, and end by their launcher or because its connection has closed."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield Solo()
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ConfigError(f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; start as many processes")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    group = Several(device)
    try:
        yield group
    finally:
        if group.leads and not group.busy:
            group.release()
        if not group.busy:
            group.close()


class Several:
    """Of `world` processes, this one. `busy`: amid something that all of them do; `failed`: here, and for good."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.busy = self.failed = False
        self.control = dist.new_group(backend="gloo", timeout=WAIT)
        self._followed = False
        self._lock = threading.Lock()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, thing: Any) -> Any:
        box = [thing]
        dist.broadcast_object_list(box, 0, group=self.control)
        return box[0]

    def load(self, model: str, *, sharding: Sharding = "auto", temperature: float = 1.0, **how: Any) -> Policy:
        mine, refused = None, None
        if self.leads:
            try:
                mine = loading.load_model(model, **{**how, "device": "cpu"})
            except ConfigError as error:
                refused = error
        if (said := self.broadcast(refused)) is not None:
            raise said
        shape = self.broadcast(loading.shape_of(mine) if mine is not None else None)
        if mine is None:
            mine = loading.empty_model(shape, **how)
        if sharding == "none" or (sharding == "auto" and shape.adapter is not None):
            return self._replicated(mine, temperature)
        return self._sharded(mine, temperature)

    def reference(self, policy: Policy, model: str, *, sharding: Sharding = "auto", **how: Any) -> Policy:
        if loading.is_lora(policy):
            return loading.WithoutAdapter(policy)
        return self.load(model, sharding=sharding, temperature=policy.temperature, **how, trainable=False)

    def learner(self, policy: Policy, how: Optimisation, loss: Objective | None = None, reference: Policy | None = None) -> Learner:
        self._followed = self.leads
        return SharedLearner(self, policy, how, loss, reference)

    def follow(self, learner: Learner) -> None:
        """Signals are the leader's affair: it stops after the step, and says so."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while (order := self.broadcast(None)) is not None:
            name, arguments = order
            self._do(name, learner, arguments)

    def release(self) -> None:
        if self._followed:
            self._followed = False
            self.broadcast(None)

    def close(self) -> None:
        """Gloo's threads drop the last message's tensor when they get to it; one that does so while Python is ending aborts the process.
        The group's end waits for its threads, and comes with the last reference to it."""
        del self.control
        dist.destroy_process_group()

    def together(self, name: str, learner: Learner, *arguments: Any) -> Any:
        """On the leader: all do `name`, from whatever thread. What it returns here. Raises `RuntimeError` once something of that kind has
        failed: the others may wait in the middle of it, and would not hear."""
        with self._lock:
            if self.failed:
                raise RuntimeError("one of the processes failed amid something that all of them do: nothing more can be done together")
            self.broadcast((name, arguments))
            return self._do(name, learner, arguments)

    def _do(self, name: str, learner: Learner, arguments: Sequence[Any]) -> Any:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own
        self.busy = True
        try:
            result = ORDERS[name](learner, *arguments)
        except BaseException:
            self.failed = True
            raise
        self.busy = False
        return result

    def _replicated(self, model: Any, temperature: float) -> Policy:
        model.to(self.device)
        for one in (*model.parameters(), *model.buffers()):
            sharded.fill(one, one if self.leads else None)
        return Policy(model, temperature=temperature)

    def _sharded(self, model: Any, temperature: float) -> Policy:
        """What is trained is float32 in pieces, and computes in the format that was asked for. Main memory holds the whole of it on rank 0
        only: elsewhere nothing is written before the pieces come."""
        half = next((one.dtype for one in model.parameters() if one.dtype in HALVES), None)
        for one in model.parameters():
            if one.requires_grad and one.dtype in HALVES:
                one.data = one.data.float() if self.leads else torch.empty_like(one.data, dtype=torch.float32)
        values = [one.detach() if self.leads else None for one in model.parameters()]
        model = sharded.shard(model, init_device_mesh(self.device.type, (self.world,)), half)
        model.to(self.device)
        for one, value in zip(model.parameters(), values, strict=True):
            sharded.fill(one, value)
        for one in model.buffers():
            sharded.fill(one, one if self.leads else None)
        return sharded.ShardedPolicy(model, temperature=temperature, half=half)
