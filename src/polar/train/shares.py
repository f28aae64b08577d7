"""A learner of which each process does its share: rows balanced by tokens, gradients and sums over all.

On rank 0 it is used like any learner. `ORDERS` are what it makes the others do with it; a process that follows is told one by name, so that
all make the same collectives in the same order. Knows no launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polar.train import loading, sharded
from polar.train.learner import Learner, Optimisation, StepReport
from polar.train.loss import Objective, Terms
from polar.train.optimizer import MasterAdamW
from polar.train.packing import balance
from polar.train.policy import Policy, Way
from polar.train.rows import Row


class Together(Protocol):
    """What the learner needs of its group (`polar.train.parallel.Several`). `control`: a process group on CPUs; `failed`: this process,
    amid something that all of them do."""

    rank: int
    world: int
    failed: bool
    control: dist.ProcessGroup

    @property
    def leads(self) -> bool: ...
    def together(self, name: str, learner: Learner, *arguments: Any) -> Any: ...


class SharedLearner(Learner):
    """`policy`: whole in each process, or a `ShardedPolicy`, and the reference alike."""

    def __init__(
        self, group: Together, policy: Policy, how: Optimisation, loss: Objective | None = None, reference: Policy | None = None
    ) -> None:
        super().__init__(policy, how, loss, reference)
        self.group = group
        self.pieces = policy if isinstance(policy, sharded.ShardedPolicy) else None
        self._incoming: Mapping[str, Any] = {}
        if self.pieces is not None and group.leads:
            setattr(policy.model, loading.GATHER, lambda: group.together("gather", self))

    @property
    def whole(self) -> bool:
        return not self.group.failed

    # --- what the leader is asked ---------------------------------------------------------------------------------

    def step(self, rows: Sequence[Row], way: Way | None = None) -> StepReport:
        if not any(len(row.places) for row in rows):
            return super().step(rows, way)  # which refuses it, before anybody is told
        report: StepReport = self.group.together("step", self, self.steps, list(rows), way)
        return report

    def logprobs(self, rows: Sequence[Row], way: Way | None = None) -> list[Tensor]:
        found: list[Tensor] = self.group.together("logprobs", self, list(rows), way)
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """In one piece, as a single process would have it: any number of processes can go on from it."""
        if self.pieces is None:
            return super().optimizer_state()
        state: dict[str, Any] = self.group.together("optimizer_state", self)
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._check(state)
        self._incoming = state
        self.group.together("load_optimizer_state", self, _outline(state))
        self._incoming = {}

    # --- what all of them do --------------------------------------------------------------------------------------

    def share_step(self, steps: int, rows: Sequence[Row], way: Way | None) -> StepReport:
        """`steps`: the leader's counter, which a checkpoint may have set."""
        self.steps = steps
        return super().step(rows, way)

    def share_logprobs(self, rows: Sequence[Row], way: Way | None) -> list[Tensor]:
        return self._logprobs_of(self.policy, rows, way)

    def share_gather(self) -> dict[str, Tensor]:
        assert self.pieces is not None
        return sharded.gather(self.pieces, self.group.leads)

    def share_optimizer_state(self) -> dict[str, Any]:
        keep = self.group.leads
        state = self.optimizer.state_dict()
        state["state"] = {
            number: {name: sharded.whole(value, keep) for name, value in values.items()} for number, values in state["state"].items()
        }
        if self._masters():
            state["masters"] = [sharded.whole(one, keep) for one in self._masters()]
        return state if keep else {}

    def share_load_optimizer_state(self, outline: dict[str, Any]) -> None:
        def received(value: Any, like: Tensor, *path: Any) -> Any:
            if not isinstance(value, _Piece):
                return value
            mine: Any = self._incoming
            for part in path if self.group.leads else ():
                mine = mine[part]
            return sharded.received(like, mine if self.group.leads else None)

        state = dict(outline)
        state["state"] = {
            number: {name: received(value, self.parameters[number], "state", number, name) for name, value in values.items()}
            for number, values in outline["state"].items()
        }
        masters = [
            received(value, like, "masters", number)
            for number, (value, like) in enumerate(zip(state.pop("masters", ()), self._masters(), strict=True))
        ]
        if isinstance(self.optimizer, MasterAdamW):
            state["masters"] = masters
        self.optimizer.load_state_dict(state)
        if self.pieces is not None:
            with torch.no_grad():
                for one, value in zip(self._masters(), masters, strict=True):
                    one.copy_(value)

    def _masters(self) -> list[Tensor]:
        """The float32 weights that the ones computed with are rounded from, where these are not the same."""
        if isinstance(self.optimizer, MasterAdamW):
            return [master for _, master in self.optimizer.pairs]
        return self.parameters if self.pieces is not None and self.pieces.has_masters else []

    def _check(self, state: Mapping[str, Any]) -> None:
        """Before anybody is told. Raises `ValueError`."""
        if bool(state.get("masters")) != bool(self._masters()):
            raise ValueError("one is of a run in bfloat16, the other is not")
        held = len(state.get("masters") or ()), len(self._masters())
        if held[0] != held[1]:  # a layout keeps float32 masters of parts that another computes with in float32
            raise ValueError(f"it has float32 masters of {held[0]} parameters, this has {held[1]}: go on with the sharding that saved it")
        counts = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], self.optimizer.param_groups)]
        if counts[0] != counts[1]:
            raise ValueError(f"it has {counts[0]} parameters, this has {counts[1]}")
        for number, values in state["state"].items():
            if values["exp_avg"].shape != self.parameters[number].shape:
                raise ValueError(f"parameter {number} is {tuple(values['exp_avg'].shape)}, not {tuple(self.parameters[number].shape)}")

    # --- a share of a batch ---------------------------------------------------------------------------------------

    def _mine(self, policy: Policy, rows: Sequence[Row], numbers: Sequence[int], way: Way | None) -> list[list[int]]:
        """Row numbers of each of this process's passes. With a policy in pieces, all processes make as many: an empty one is idle."""
        share = balance([len(rows[number]) for number in numbers], self.group.world)[self.group.rank]
        mine = [numbers[place] for place in share]
        parts = [[mine[place] for place in part] for part in policy.pack([rows[number] for number in mine], self.how.token_budget, way)]
        if self.pieces is not None:
            most = torch.tensor(len(parts))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group.control)
            parts += [[] for _ in range(int(most) - len(parts))]
        return parts

    def _micro_batches(self, rows: Sequence[Row], numbers: list[int]) -> list[list[int]]:
        return self._mine(self.policy, rows, numbers, None)

    def _terms(
        self, rows: Sequence[Row], part: list[int], old: list[Tensor] | None, reference: list[Tensor] | None, way: Way | None
    ) -> Terms:
        if part:
            return super()._terms(rows, part, old, reference, way)
        new = torch.cat(self.policy.logprobs([_idle(rows)]))
        nothing = torch.zeros_like(new)
        return self.loss.terms(new, nothing, nothing, nothing, old=None, reference=None if reference is None else nothing)

    def _logprobs_of(self, policy: Policy, rows: Sequence[Row], way: Way | None) -> list[Tensor]:
        """Each row once, by some process; all of them get all. Without dropout, if there is any."""
        mine: dict[int, Tensor] = {}
        with policy.quietly():
            for part in self._mine(policy, rows, range(len(rows)), way):
                chosen = [rows[number] for number in part] or [_idle(rows)]
                mine.update(zip(part, (values.cpu() for values in policy.logprobs(chosen, way)), strict=False))
        shares: list[dict[int, Tensor]] = [{} for _ in range(self.group.world)]
        dist.all_gather_object(shares, mine, group=self.group.control)
        found = {number: values for share in shares for number, values in share.items()}
        return [found[number] for number in range(len(rows))]

    def _clip(self) -> float:
        if self.pieces is None:
            for one in self.parameters:
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
                dist.all_reduce(one.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.how.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _everywhere(self, totals: Tensor) -> Tensor:
        dist.all_reduce(totals, group=self.group.control)
        return totals


ORDERS: Mapping[str, Callable[..., Any]] = {
    "step": SharedLearner.share_step,
    "logprobs": SharedLearner.share_logprobs,
    "gather": SharedLearner.share_gather,
    "optimizer_state": SharedLearner.share_optimizer_state,
    "load_optimizer_state": SharedLearner.share_load_optimizer_state,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor that is not here."""


def _outline(state: Any) -> Any:
    """A state without its big tensors."""
    if isinstance(state, Tensor) and state.ndim:
        return _Piece()
    if isinstance(state, dict):
        return {key: _outline(value) for key, value in state.items()}
    return [_outline(value) for value in state] if isinstance(state, list) else state


def _idle(rows: Sequence[Row]) -> Row:
    """The shortest thing that goes through the model."""
    nothing = torch.zeros(1)
    return Row(rows[0].ids[:2], torch.ones(1, dtype=torch.int64), nothing, nothing, 0.0)
