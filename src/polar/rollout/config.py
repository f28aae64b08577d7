"""`polar.yaml`: the settings of the rollout service, its nodes and their gateways. Every one has a working default.

The reference system's `topology.yaml` is read as it is. Unknown keys are refused with the nearest known one. Reading (files, environment,
errors) is in `polar.rollout.settings`; this module is the schema only.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from polar.folders import state_dir
from polar.gateway.config import EngineConfig, GatewayConfig, reachable
from polar.runtime.spec import RuntimeSpec


class _Strict(BaseModel):
    """No infinities: settings reach the nodes as JSON, which has none. A very large number does as well."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Retry(_Strict):
    """Waiting between attempts and deliveries: doubles from the first to the longest, with jitter."""

    first_seconds: float = Field(default=1.0, gt=0)
    longest_seconds: float = Field(default=60.0, gt=0)
    give_up_seconds: float = Field(default=86_400.0, gt=0)
    """For deliveries: after this long an undelivered result is kept and shown as such, and no more tried by itself."""


class RolloutConfig(_Strict):
    """The rollout service."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    public_url: str | None = None
    """How nodes and callbacks' receivers reach it; `None`: from host and port."""
    save_dir: str | None = None
    """Finished results as files, as the reference lays them out (`task_<id>/ses_<sid>.json`); `None`: `rollouts` in the state directory."""
    store: str | None = None
    """A path or a database URL; `None`: `rollout.db` in the state directory."""
    token: str | None = None
    """Bearer token of the API; `None`: one is generated and kept in the state directory, readable by its owner only."""
    compat_open: bool = False
    """A second listener, on loopback only, that asks for no token: the reference's clients send none. No sandbox can reach it, so
    `local` and `network: host` sandboxes are refused while it is on."""
    compat_port: int = Field(default=8079, ge=0, le=65535)
    dispatch_poll_interval_seconds: float = Field(default=1.0, gt=0)
    callback_grace_seconds: float = Field(default=120.0, gt=0)
    """How long a finished session's result may take to arrive after its lease was last renewed."""
    callback_retry: Retry = Field(default_factory=Retry)
    lease_seconds: float | None = Field(default=None, gt=0)
    """How long an attempt outlives its node's last heartbeat; `None`: three heartbeat intervals of that node."""
    max_open_sessions: int = Field(default=100_000, ge=1)
    """Submissions beyond it are refused with 429 and Retry-After."""
    retention_days: float = Field(default=30.0, gt=0)
    """How long finished tasks, their results and artefacts are kept."""


class InferenceConfig(_Strict):
    """The reference's short form of one engine."""

    engine: str = "vllm"
    base_url: str = "http://127.0.0.1:8000"


class Workers(_Strict):
    """One stage: how many sessions at once, and how many may wait before it (back-pressure: then the stage before it waits)."""

    workers: int = Field(ge=1)
    queue: int | None = Field(default=None, ge=0)


class NodeConfig(_Strict):
    """A node: a gateway and the stages that run sessions beside it."""

    id: str = Field(default_factory=socket.gethostname, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$")
    """Names a folder, and the node in URLs."""
    host: str = "127.0.0.1"
    port: int = Field(default=8081, ge=0, le=65535)
    """Of the model API, which sandboxes see. The control API is on `control_host`, at `control_port`."""
    control_host: str = "127.0.0.1"
    control_port: int | None = Field(default=None, ge=0, le=65535)
    """`None`: `port` + 1."""
    public_url: str | None = None
    """How the service reaches the control API; `None`: from `control_host` and `control_port`."""
    model_served: str = ""
    """The served model's name at the engine; empty: the first one that it serves."""
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    engines: dict[str, EngineConfig] = Field(default_factory=dict)
    """In place of `inference`: several engines, with all their settings."""
    gateway: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the gateway (`polar.gateway.config.GatewayConfig`)."""
    max_init_workers: int = Field(default=4, ge=1)
    max_run_workers: int = Field(default=2, ge=1)
    max_postrun_workers: int = Field(default=4, ge=1)
    max_ready: int | None = Field(default=None, ge=0)
    """Prepared sandboxes that wait for a run worker; `None`: as many as run workers."""
    max_queue: int | None = Field(default=None, ge=0)
    """Sessions accepted and not yet begun; `None`: twice the init workers. Beyond it dispatches are refused, and wait at the service."""
    default_runtime: RuntimeSpec = Field(default_factory=lambda: RuntimeSpec().whole())
    """Of tasks that name no backend; what they do say of their runtime is laid over it."""
    work_dir: str | None = None
    """Sandboxes, leases, undelivered results; `None`: `nodes/<id>` in the state directory."""
    artifacts_dir: str | None = None
    """Logs and artefacts of sessions; `None`: `artifacts` in the state directory."""
    artifacts_days: float = Field(default=30.0, gt=0)
    """How long logs and artefacts are kept."""
    artifacts_gb: float = Field(default=50.0, gt=0)
    """How much of them is kept, the newest first."""
    token: str | None = None
    """Of the node's control API; `None`: a new one at every start, told to the service."""
    warm: int = Field(default=0, ge=0)
    """Prepared sandboxes kept ready for each runtime in use (pools), beyond those that sessions wait with."""
    docker_host: str | None = None
    """`unix:///path.sock` or `tcp://...`; `None`: `DOCKER_HOST`, else the usual sockets of Docker and Podman."""
    init_seconds: float = Field(default=300.0, gt=0)
    evaluation_seconds: float = Field(default=900.0, gt=0)
    """Budgets of tasks that set none."""
    allow: list[str] = Field(default_factory=list)
    """Runtime backends that this node runs; empty: every one that the machine has."""

    @field_validator("default_runtime")
    @classmethod
    def _whole(cls, runtime: RuntimeSpec) -> RuntimeSpec:
        return runtime.whole()

    def runtime_of(self, asked: RuntimeSpec | None) -> RuntimeSpec:
        """The sandbox that this node makes for a task."""
        return self.default_runtime if asked is None else asked.over(self.default_runtime)

    @property
    def work_path(self) -> Path:
        return Path(self.work_dir) if self.work_dir else state_dir() / "nodes" / self.id

    @property
    def artifacts_path(self) -> Path:
        return Path(self.artifacts_dir) if self.artifacts_dir else state_dir() / "artifacts"

    @property
    def control(self) -> int:
        return (self.port + 1 if self.port else 0) if self.control_port is None else self.control_port

    @property
    def gateway_config(self) -> GatewayConfig:
        """The settings of this node's gateway. Raises `ValidationError`."""
        engines = self.engines or {
            "default": EngineConfig(urls=[self.inference.base_url], kind=self.inference.engine, model=self.model_served or None)
        }
        own = {"engines": engines, "host": self.host, "port": self.port, "admin_port": self.control, "render_process": True}
        return GatewayConfig.model_validate({**own, **self.gateway})


class CompletionPersistence(_Strict):
    """The reference's, accepted: completions are always kept here, whole."""

    enabled: bool = True
    max_field_bytes: int = 1 << 20
    queue_size: int = 1024


class NodesConfig(_Strict):
    """The `gateway` section: what nodes have in common, and the nodes."""

    heartbeat_interval_seconds: float = Field(default=5.0, gt=0)
    rollout_server_url: str | None = None
    """`None`: `rollout.public_url`."""
    completion_persistence: CompletionPersistence = Field(default_factory=CompletionPersistence)
    nodes: list[NodeConfig] = Field(default_factory=lambda: [NodeConfig()])


class PolarConfig(_Strict):
    """The whole file."""

    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    gateway: NodesConfig = Field(default_factory=NodesConfig)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def rollout_url(self) -> str:
        """How nodes reach the service."""
        own = self.rollout.public_url or f"http://{reachable(self.rollout.host)}:{self.rollout.port}"
        return self.gateway.rollout_server_url or own

    def node(self, node_id: str | None) -> NodeConfig:
        """That node, or the only one. Raises `KeyError` with what there is."""
        nodes = {node.id: node for node in self.gateway.nodes}
        if node_id is None and len(nodes) == 1:
            return next(iter(nodes.values()))
        if node_id not in nodes:
            raise KeyError(f"there is no node {node_id!r}; there are: {', '.join(nodes)}")
        return nodes[node_id]
