"""The JSON of the rollout API, as pydantic models. Field names and defaults of the reference system stand first in each; what it lacks
comes after. Knows no HTTP, no store and no stage.

Requests refuse unknown fields by name: a setting that does nothing would be noticed only in the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from polar.harness.spec import AgentSpec
from polar.runtime.spec import RuntimeSpec

SessionStatus = Literal[
    "REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING", "COMPLETED", "ERROR", "TIMEOUT"
]
"""The reference's. The last three are final. What they mean for training is told by `outcome`."""

Outcome = Literal["graded", "policy", "infrastructure", "cancelled"]
"""Law 5. `graded`: an evaluator judged a run that ended by itself. `policy`: the run failed by what the policy did (time, turns, tokens, a
crash after its first call) and was treated as `on_policy_failure` says. `infrastructure`: no reward, never a zero; comes only when
the attempts are used up. `cancelled`: by a caller, or by the early stop of its group."""

OUTCOMES: Mapping[str, Outcome] = {"COMPLETED": "graded", "TIMEOUT": "policy", "ERROR": "infrastructure"}
"""Of a result that tells none, by its status: it is of a node of the reference's kind."""
FINAL: frozenset[str] = frozenset(OUTCOMES)

TaskState = Literal["running", "completed", "failed"]
"""The reference's: `failed` when no session of the task ended other than by infrastructure or cancellation."""

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"


Count = Annotated[int, Field(ge=0, lt=1 << 31)]
"""What fits into the database."""
Tokens = Annotated[int, Field(ge=0, lt=1 << 63)]


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):  # as a number `true` would be a full reward for whatever failed
        raise ValueError("grade, exclude, or a reward")
    return value


OnPolicyFailure = Annotated[Literal["grade", "exclude"] | float, BeforeValidator(_no_truth_value)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BuilderSpec(_Request):
    strategy: str = "prefix_merging"
    """The reference's default is `per_request`; see `docs/decisions.md`."""
    config: dict[str, Any] = Field(default_factory=dict)


class WeightedEvaluator(_Request):
    """One part of a composition."""

    strategy: str
    config: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    """Beside the composition's, which all parts get: a judge's key belongs here, where commands that run the agent's code do not see it."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    required: bool = False
    """A reward of 0 here makes the whole 0."""


class EvaluatorSpec(_Request):
    strategy: str
    """A registered name, `composition`, or `module:Class`."""
    config: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    refresh_runtime: bool = True
    """Grade in a fresh sandbox. False grades in the agent's own, where nothing is trusted to be as it was."""


class Budget(_Request):
    """Seconds for each part; `None`: what is left of the task's `timeout_seconds`."""

    init_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    agent_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    evaluation_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_turns: int | None = Field(default=None, ge=1, lt=1 << 31)
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 63)
    """Model calls and sampled tokens of a session; a call beyond is refused by its name, and the run has failed by policy."""
    first_call_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """How long a harness may run without any model call before it is said so, in events and logs."""


class EarlyStop(_Request):
    """Ends a group before all its sessions have."""

    min_usable: int = Field(ge=1)
    """Once so many sessions are graded or failed by policy with a reward, the rest is cancelled."""
    grace_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class TaskRequest(_Request):
    """One task: `num_samples` sessions of it are rolled out, and form a group."""

    task_id: str = Field(pattern=ID_PATTERN)
    instruction: str
    num_samples: int = Field(default=1, ge=1, le=4096)
    timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """The agent's budget where `budget.agent_seconds` is not given. Init and evaluation have their own and take nothing from it."""
    runtime: RuntimeSpec | None = None
    agent: AgentSpec
    builder: BuilderSpec = Field(default_factory=BuilderSpec)
    evaluator: EvaluatorSpec | None = None
    callback_url: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The caller's own. `group_id` and `rollout_id` go into the rows; by default the task and the session are these. Samples of one task
    are rollouts of their own all the same: after the first, with `/` and the sample's number."""

    kind: Literal["train", "eval"] = "train"
    """What sampling the gateway uses: the trainer's, or the harness's own."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Over the gateway's `train_sampling`."""
    budget: Budget = Field(default_factory=Budget)
    on_policy_failure: OnPolicyFailure = "grade"
    """`grade`: the evaluator judges what is there; a number: that reward; `exclude`: no reward (law 5)."""
    credit: Literal["broadcast", "main_only", "last_row", "per_row"] = "broadcast"
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher first. Evaluation tasks usually go before training ones."""
    max_attempts: int = Field(default=3, ge=1, le=20)
    """How often a session is started anew after failures of the infrastructure, before it ends as one."""
    early_stop: EarlyStop | None = None
    session_callbacks: bool = False
    """Whether `callback_url` also gets every session's result as it comes (the task's comes in any case)."""
    task_folder: str | None = None
    """A folder on every node that relative paths of the task are relative to."""

    @property
    def agent_seconds(self) -> float:
        return self.budget.agent_seconds or self.timeout_seconds


class SessionDispatchRequest(BaseModel):
    """What a node gets to run: one attempt at one session."""

    model_config = ConfigDict(extra="forbid")

    session_id: str
    task_id: str
    instruction: str
    remaining_timeout_seconds: float
    runtime: RuntimeSpec | None = None
    agent: AgentSpec
    builder: BuilderSpec = Field(default_factory=BuilderSpec)
    evaluator: EvaluatorSpec | None = None
    callback_url: str | None = None
    """Where the result goes; `None`: to the rollout service that the node is registered with."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    kind: Literal["train", "eval"] = "train"
    sampling: dict[str, Any] = Field(default_factory=dict)
    budget: Budget = Field(default_factory=Budget)
    on_policy_failure: OnPolicyFailure = "grade"
    credit: Literal["broadcast", "main_only", "last_row", "per_row"] = "broadcast"
    priority: int = 0
    task_folder: str | None = None
    attempt: int = Field(default=0, ge=0)
    sample: int = Field(default=0, ge=0)
    """Which of the group's samples this is."""

    @property
    def attempt_id(self) -> str:
        """Names this attempt in sandboxes, folders, the capture store and results: at-least-once delivery is told apart by it."""
        return f"{self.session_id}.{self.attempt}"


class Timing(BaseModel):
    """Milliseconds."""

    register_to_init_queue_ms: float = 0.0
    init_ms: float = 0.0
    run_ms: float = 0.0
    postrun_ms: float = 0.0
    ready_ms: float = 0.0
    """From the end of init to the start of the run: what it waited for a slot."""
    install_ms: float = 0.0
    first_call_ms: float | None = None
    """From the start of the run to the first model call."""
    build_ms: float = 0.0
    evaluate_ms: float = 0.0
    evaluator_wait_ms: float = 0.0
    """What the evaluation waited for its sandbox, after prewarming."""
    teardown_ms: float = 0.0
    queue_ms: float = 0.0
    """All waiting for a worker of any stage."""


class SessionResult(BaseModel):
    """One attempt's result, from the node to the service, and from there to callers."""

    session_id: str
    task_id: str
    status: SessionStatus
    trajectory: dict[str, Any] | None = None
    """`Trajectory.to_json()`; its `status` is COMPLETED, TIMEOUT or ERROR."""
    timing: Timing = Field(default_factory=Timing)
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    outcome: Outcome | None = None
    reward: float | None = None
    attempt: Count = 0
    sample: Count = 0
    turns: Count = 0
    sampled_tokens: Tokens = 0
    error_code: str | None = None
    """Stable, for programs: `sandbox`, `engine`, `store`, `evaluator`, `harness_no_call`, `lease_lost`, `agent_timeout`, `max_turns`,
    `max_tokens`, `context_overflow`, `out_of_memory`, `harness_exit`, `cancelled`, ..."""
    answer: str | None = None
    exit_code: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    delivery_id: str | None = None
    """The same for every delivery of this result."""

    @property
    def usable(self) -> bool:
        """Whether it has a reward to train on."""
        return self.outcome in ("graded", "policy") and self.reward is not None

    def completed(self) -> SessionResult:
        """With what its maker may leave out. The reference's rewards stand in the rows only: a session's is their mean. Only what the
        policy did has one, and no reader gets one that is no number. Raises `ValueError` for a status that is not final."""
        if self.status not in FINAL:
            raise ValueError(f"status: {self.status} is not how a session ends; that are {', '.join(sorted(FINAL))}")
        outcome = self.outcome or OUTCOMES[self.status]
        reward = rows_reward(self.trajectory) if self.outcome is None and self.reward is None else self.reward
        if outcome not in ("graded", "policy") or reward is None or not math.isfinite(reward):
            reward = None
        return self.model_copy(update={"outcome": outcome, "reward": reward})


def rows_reward(trajectory: Mapping[str, Any] | None) -> float | None:
    """The mean of the rewards of a trajectory's rows, in their JSON form, those without one left out; `None`: none has one."""
    rows = (trajectory or {}).get("traces")
    rewards = [row.get("reward") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    found = [float(reward) for reward in rewards if isinstance(reward, int | float)]
    return math.fsum(found) / len(found) if found else None


class TaskStatus(BaseModel):
    task_id: str
    status: TaskState
    total_sessions: int
    completed_sessions: int
    results: list[SessionResult] = Field(default_factory=list)
    result_paths: list[str] = Field(default_factory=list)
    error: str | None = None
    counts: dict[str, int] = Field(default_factory=dict)
    """Sessions by outcome, and `open`."""
    created: float = 0.0
    finished: float | None = None
    waits_for: str | None = None
    """Why its sessions that have not begun cannot: no node is up, or none that runs their backend."""


class TaskResult(BaseModel):
    """The body of a task's callback."""

    task_id: str
    status: TaskState
    results: list[SessionResult] = Field(default_factory=list)
    result_paths: list[str] = Field(default_factory=list)
    delivery_id: str | None = None


class NodeMetrics(BaseModel):
    """What a node's heartbeat tells of its stages."""

    model_config = ConfigDict(extra="allow")

    init_queue_depth: int = 0
    init_inflight: int = 0
    ready_depth: int = 0
    run_inflight: int = 0
    postrun_queue_depth: int = 0
    postrun_inflight: int = 0


class NodeRegistration(BaseModel):
    """`token` is what the service sends to the node's control API; the node proves itself with the service's own."""

    model_config = ConfigDict(extra="forbid")

    node_id: str = Field(pattern=ID_PATTERN)
    gateway_url: str
    """Of the node's control API, as the service reaches it."""
    max_init_workers: Count = 4
    max_run_workers: Count = 2
    max_postrun_workers: Count = 4
    heartbeat_interval_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    token: str | None = None
    instance: str | None = None
    """New at every start of the node: attempts of an earlier instance are lost, whatever its name."""
    metrics: NodeMetrics = Field(default_factory=NodeMetrics)
    """As in heartbeats. Further facts that the service heeds, here or there: `backends` (runtime backends that it runs; none: any),
    `default_runtime` (backend and network of its default sandbox), `capacity` (sessions it takes at once, all stages together, where
    that is fewer than its workers say)."""


class Heartbeat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    metrics: NodeMetrics = Field(default_factory=NodeMetrics)
    instance: str | None = None
    attempts: list[str] | None = None
    """Attempts that the node has, queued or running or waiting to be delivered: what their leases are renewed for."""
    draining: bool = False


class Event(BaseModel):
    """One line of the event stream. `seq` grows without gaps in the order of commits, and is the SSE id."""

    seq: int
    time: float
    type: str
    """`task.submitted`, `task.finished`, `session.state_changed`, `session.attempt_failed`, `session.warning`, `session.finished`,
    `node.registered`, `node.lost`, `node.drained`, `callback.failed`, ..."""
    task_id: str | None = None
    session_id: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
