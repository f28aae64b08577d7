"""`train.yaml`: what `polar train` does. Everything but the model and the tasks has a working default.

The schema only, and no torch: a wrong setting is said before anything heavy is loaded. Values of the algorithm are those of
`polar.train.advantages`, `weights`, `loss` and `learner`, whose docstrings say what each does and where it is from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from polar.gateway.config import EngineConfig
from polar.harness.spec import AgentSpec
from polar.rollout.models import OnPolicyFailure
from polar.runtime.spec import RuntimeSpec
from polar.train.advantages import Advantage, Baseline, Scale, ZeroVariance
from polar.train.weights import Aggregation

if TYPE_CHECKING:
    from polar.train.learner import Optimisation
    from polar.train.loss import Loss

Schedule = Literal["constant", "linear", "cosine"]
Writer = Literal["jsonl", "tensorboard", "wandb", "trackio"]

EMBEDDED = "embedded"
"""The engine that a run starts by itself: `polar engine` with the model that is trained."""


def decays(betas: tuple[float, float]) -> tuple[float, float]:
    """AdamW's, checked."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError("each is 0 or more and less than 1")
    return betas


def agent_fields(fields: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Of an `AgentSpec`, whose harness is said elsewhere, checked."""
    try:
        AgentSpec.model_validate({"harness": "any", **fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}{where}: {said}" if where else f"{place}{said}") from error
    return fields


def _short(name: str) -> BeforeValidator:
    """A section given as a plain value stands for its setting `name`."""

    def expand(value: Any) -> Any:
        return value if value is None or isinstance(value, dict | BaseModel) else {name: value}

    return BeforeValidator(expand)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class LoraSection(_Strict):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) in place of all weights."""

    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """For `polar sft` alone: what an engine samples is without."""
    target_modules: list[str] | str = "all-linear"
    """Names of layers; `all-linear`: every linear one but the LM head."""


class ModelSection(_Strict):
    """What is trained. `model: PATH` is short for `model: {name: PATH}`."""

    name: str
    """A folder, a hub name, or a model that `polar engine` knows (`tiny-qwen3`)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 has float32 masters of what is trained."""
    lora: LoraSection | None = None
    """`lora: {}` takes its defaults."""
    gradient_checkpointing: bool = False
    """Layers run again in the backward pass: less memory, a third more arithmetic."""
    attention: str = "sdpa"
    """transformers' name of the implementation."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """With several processes (`torchrun`): `full` lays weights and optimiser out in pieces, `none` gives all of them to each; `auto` is
    `none` for LoRA and `full` else."""


class TasksSection(_Strict):
    """`tasks: SETS` is short for `tasks: {train: SETS}`. Sets, folders and files as `polar run --tasks` takes them."""

    train: str
    """Their tasks that do not call themselves held out are trained on."""
    held_out: str | None = None
    """Evaluated on, never trained on; `None`: those of `train` that call themselves held out."""
    train_limit: int | None = Field(default=None, ge=1)
    """At most so many of them."""
    held_out_limit: int | None = Field(default=None, ge=1)


class EngineSection(EngineConfig):
    """`engine: embedded`, a URL, or a mapping with `urls` and what else the gateway shall know of them."""

    urls: list[str] = Field(default_factory=list)
    """Empty: the embedded engine."""

    @property
    def embedded(self) -> bool:
        return not self.urls

    def for_gateway(self, urls: list[str]) -> EngineConfig:
        return EngineConfig.model_validate({**self.model_dump(), "urls": urls})


def _engine(value: Any) -> Any:
    if isinstance(value, str):
        return {} if value == EMBEDDED else {"urls": [value]}
    return {"urls": value} if isinstance(value, list) else value


class RolloutSection(_Strict):
    """Where and how sessions run."""

    url: str | None = None
    """A running rollout service; `None`: the run starts one of its own, with one node, for as long as it trains."""
    token: str | None = None
    """Of that service; `None`: as `polar submit` finds it."""
    at_once: int = Field(default=2, ge=1)
    """Sessions at the same time on the run's own node."""
    runtime: Annotated[RuntimeSpec, _short("backend")] = Field(default_factory=lambda: RuntimeSpec(backend="local"))
    """`runtime: docker` is short for `runtime: {backend: docker}`."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """The agent's; `None`: what the task says."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls of a session."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of a session."""
    max_output: int | None = Field(default=None, ge=1)
    """The longest answer, in tokens, that a harness is told to ask for."""
    builder: str = "prefix_merging"
    """What makes rows of completions; or `per_request`."""
    on_policy_failure: OnPolicyFailure = "grade"
    """What becomes of a session that the policy failed: graded all the same, no reward, or this reward."""
    credit: Literal["broadcast", "main_only", "last_row", "per_row"] = "broadcast"
    """Which rows of a session get its reward."""
    max_attempts: int = Field(default=3, ge=1, le=20)
    """Of a session that the infrastructure fails."""
    min_usable: int | None = Field(default=None, ge=1)
    """Once so many sessions of a group have a reward, the rest of it is cancelled: slow sessions hold nobody up, and long ones are trained
    less often than they would be."""
    min_usable_grace_seconds: float = Field(default=0.0, ge=0)
    """How much longer the rest gets."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each agent (`AgentSpec`): `settings`, `env`, `mcp_servers`, ..."""
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The same by harness, over `agent`: `settings` are in a harness's own vocabulary."""

    @field_validator("agent")
    @classmethod
    def _agent(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return agent_fields(fields)

    @field_validator("agents")
    @classmethod
    def _agents(cls, agents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {name: agent_fields(fields, f"{name}.") for name, fields in agents.items()}


class BatchSection(_Strict):
    """What a step trains on."""

    groups: int = Field(default=4, ge=1)
    """Groups with something to learn from; those whose rewards agree are replaced by fresh ones."""
    samples: int = Field(default=16, ge=2, le=4096)
    """Sessions of a group."""
    most_groups: int | None = Field(default=None, ge=1)
    """Groups taken for one batch at most, the dropped ones included; `None`: four times `groups`. Then the batch is what it is."""

    @property
    def most(self) -> int:
        return self.most_groups or 4 * self.groups


class AdvantageSection(_Strict):
    """`polar.train.advantages.Advantage`."""

    baseline: Baseline = "mean"
    """The group's mean, the mean of the others, or nothing."""
    scale: Scale = "std"
    """Divided by the deviation of the group, or not."""
    zero_variance: ZeroVariance = "drop"
    """Groups whose rewards agree are left out, or kept with advantages of 0."""


class LossSection(_Strict):
    """`polar.train.loss.Loss` and `polar.train.weights.Aggregation`."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The clip of the ratio reaches from 1 - this."""
    clip_high: float = Field(default=0.28, ge=0)
    """To 1 + this."""
    tis_cap: float | None = Field(default=2.0, gt=0)
    """The largest weight of truncated importance sampling between engine and trainer; `None` leaves it out."""
    beta: float = Field(default=0.0, ge=0)
    """Of the KL term; beyond 0 a frozen copy of the starting model is kept in memory."""
    unbiased_kl: bool = False
    """The KL term is multiplied with the ratio: its gradient is without bias away from the proximal policy, too."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with a negative advantage, too."""
    aggregation: Aggregation = "token_mean"
    """Every token weighs the same, every rollout does, or neither (Dr. GRPO)."""
    fixed_length: int | None = Field(default=None, ge=1)
    """Of the aggregation `fixed_length`: the longest that a rollout may sample, in tokens."""

    @model_validator(mode="after")
    def _complete(self) -> LossSection:
        if self.aggregation == "fixed_length" and self.fixed_length is None:
            raise ValueError(
                "fixed_length: the aggregation of that name (loss.aggregation) needs it: the longest that a rollout may sample, in tokens"
            )
        return self


class OptimisationSection(_Strict):
    """`polar.train.learner.Optimisation`."""

    lr: float = Field(default=1e-6, gt=0)
    """Of AdamW. Adapters take ten times more and upwards."""
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices."""
    schedule: Schedule = "constant"
    """`linear` and `cosine` reach 0 at the run's last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps until the rate is reached."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to it."""
    token_budget: int = Field(default=32_768, ge=1)
    """Tokens of a micro-batch; a longer row goes alone. Memory, and nothing else, depends on it."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps a batch."""

    _decays = field_validator("betas")(decays)


class GateSection(_Strict):
    """Before a step, the trainer's log-probabilities of delivered rows are compared with the recorded ones (`polar.train.gate`)."""

    rows: int = Field(default=8, ge=0)
    """How many of each batch; 0 switches the gate off."""
    mean: float = Field(default=0.02, gt=0)
    """Nats that trainer and engine may differ by on the mean."""
    largest: float = Field(default=1.0, gt=0)
    """And at the 99.9th percentile."""
    action: Literal["stop", "warn"] = "stop"
    """What happens beyond."""


class EvaluationSection(_Strict):
    """Held-out tasks, before, during and after."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before and after."""
    before: bool = True
    """Before the first step."""
    after: bool = True
    """After the last step."""
    samples: int = Field(default=4, ge=1, le=4096)
    """Sessions of each task and harness."""
    k: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [1])
    """For pass@k, none over `samples`."""
    harnesses: list[str] = Field(default_factory=list)
    """Empty: those of the training."""
    sampling: Literal["harness", "trainer"] = "harness"
    """Whose sampling parameters: the harness's own, as people use it, or those of the training."""
    passed: float = 1.0
    """The reward from which on a session has passed."""


class CheckpointsSection(_Strict):
    every: int = Field(default=10, ge=1)
    """Steps between checkpoints. A killed run goes on from the last one; a stopped one writes one first."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest stay."""


class SyncSection(_Strict):
    """How new weights reach the engines (`polar.train.sync`), which the gateways of the rollout service's nodes name."""

    drain_seconds: float = Field(default=120.0, ge=0)
    """How long calls in flight may go on before the weights change."""
    on_slow: Literal["interrupt", "fail"] = "interrupt"
    """What becomes of calls that take longer: ended and begun anew with the new weights, or the run stops."""
    load_seconds: float = Field(default=600.0, gt=0)
    """How long an engine may take for new weights."""
    folder: str | None = None
    """Where weights are written for the engines, of this run alone, on a disk that they see, too; `None`: in the run's folder."""
    mount: tuple[str, str] | None = None
    """A folder of this machine, and the same as the engines see it, where the two differ."""
    adapter: str | None = None
    """With LoRA: engines get the adapter alone, served under this name; `None`: they get it merged into the model."""


class PriceSection(_Strict):
    """What `polar train --dry-run` reckons with where nothing was measured (`polar.train.price`). Means over sessions."""

    sampled_tokens: float | None = Field(default=None, gt=0)
    """Of a session."""
    row_tokens: float | None = Field(default=None, gt=0)
    """Of all its training rows, prompts included: what a step computes."""
    session_seconds: float | None = Field(default=None, gt=0)
    """For which a session occupies a place of `rollout.at_once`."""
    teaching: float | None = Field(default=None, gt=0, le=1)
    """The share of groups whose rewards do not agree."""
    train_tokens_per_second: float | None = Field(default=None, gt=0)
    """Of a step, over all its devices."""
    tflops: float | None = Field(default=None, gt=0)
    """Sustained by a step over all devices, where tokens a second are not known."""


class TrainConfig(_Strict):
    """The whole file."""

    model: Annotated[ModelSection, _short("name")]
    tasks: Annotated[TasksSection, _short("train")] | None = None
    """What to roll out; not needed with `recorded`."""
    recorded: str | None = None
    """A file of results (`results.jsonl` of `polar run`), trained on in its order, in place of live rollouts."""
    harnesses: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: {"pi": 1.0})
    """The mix: how often each harness gets a group. A list gives all the same weight."""
    steps: int = Field(default=100, ge=1)
    """Of the whole run."""
    output: str | None = None
    """The run's folder; one that holds a run is gone on with; `None`: a new one in `runs/`."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Of the order of tasks and of everything else that the trainer draws."""
    engine: Annotated[EngineSection, BeforeValidator(_engine)] = Field(default_factory=EngineSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    max_staleness: int = Field(default=1, ge=0)
    """Steps that a trained token's policy may be behind: rollouts for so many batches run ahead of the step. 0: rollouts and steps take
    turns."""
    temperature: float = Field(default=1.0, gt=0)
    """Of training sessions, and of the log-probabilities that the trainer computes."""
    advantage: AdvantageSection = Field(default_factory=AdvantageSection)
    loss: LossSection = Field(default_factory=LossSection)
    optimisation: OptimisationSection = Field(default_factory=OptimisationSection)
    gate: GateSection = Field(default_factory=GateSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoints: CheckpointsSection = Field(default_factory=CheckpointsSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    metrics: list[Writer] = Field(default_factory=list)
    """Beside `metrics.jsonl`, which there is always."""
    price: PriceSection = Field(default_factory=PriceSection)
    shuffle_rewards: bool = False
    """A control: rewards are shuffled within each group, so nothing can be learned from them."""

    @model_validator(mode="before")
    @classmethod
    def _mix(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        mix = given.get("harnesses")
        names = [mix] if isinstance(mix, str) else mix
        return {**given, "harnesses": dict.fromkeys(names, 1.0)} if isinstance(names, list) else given

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if (self.tasks is None) == (self.recorded is None):
            raise ValueError("tasks: give either tasks, to roll them out, or recorded, a file of results to train on")
        if not self.harnesses:
            raise ValueError("harnesses: name at least one")
        if self.model.lora is not None and self.model.lora.dropout:
            raise ValueError("model.lora.dropout: it is for polar sft; engines sample without, so that steps would be of another policy")
        over = [k for k in self.evaluation.k if k > self.evaluation.samples]
        if over:
            raise ValueError(f"evaluation.k: pass@{over[0]} needs {over[0]} samples, and evaluation.samples is {self.evaluation.samples}")
        if self.rollout.min_usable is not None and self.rollout.min_usable > self.batch.samples:
            raise ValueError(f"rollout.min_usable: it is more than the {self.batch.samples} sessions of a group (batch.samples)")
        if self.batch.most < self.batch.groups:
            raise ValueError(f"batch.most_groups: it is less than batch.groups, {self.batch.groups}")
        if self.sync.adapter is not None and self.model.lora is None:
            raise ValueError("sync.adapter: the model is trained whole, there is no adapter to serve (model.lora)")
        if self.sync.adapter is not None and self.live and self.engine.embedded and self.rollout.url is None:
            raise ValueError("sync.adapter: the embedded engine takes no adapters; leave it out, and it gets them merged into the model")
        return self

    @property
    def live(self) -> bool:
        return self.recorded is None

    def make_advantage(self) -> Advantage:
        return Advantage(**self.advantage.model_dump())

    def make_loss(self) -> Loss:
        from polar.train.loss import Loss

        return Loss(**self.loss.model_dump(exclude={"aggregation", "fixed_length"}))

    def make_optimisation(self) -> Optimisation:
        from polar.train.learner import Optimisation

        total = None if self.optimisation.schedule == "constant" else self.steps * self.optimisation.minibatches
        return Optimisation(**self.optimisation.model_dump(), total_steps=total)
