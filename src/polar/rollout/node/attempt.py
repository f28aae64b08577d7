"""One attempt at one session, from its dispatch to its result. Knows no HTTP, no spool and no other attempt.

    INIT      install the CLI; open the capture session; make, prepare and configure the sandbox
    READY     wait for a run worker
    RUNNING   the agent works, within its own budget, watched
    POST_RUN  what it left is collected, rows are built, the evaluator judges; the sandbox is removed

`run` never raises and never takes longer than its budgets: whatever happens ends in a `SessionResult`, with the outcome that law 5 gives
it (`polar.rollout.node.outcome`). Cancelling goes through `cancel`, so that what was made is always removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar.errors import PolarError, SandboxError
from polar.evaluator import Evaluator, from_spec
from polar.gateway.gateway import Gateway
from polar.harness.agent import AgentRun, Collected, HarnessRun
from polar.rollout.config import NodeConfig
from polar.rollout.models import SessionDispatchRequest, SessionResult, SessionStatus
from polar.rollout.node.artifacts import Artifacts
from polar.rollout.node.capture import Capture
from polar.rollout.node.found import Found
from polar.rollout.node.grading import BuildThread, Grading
from polar.rollout.node.history import hide_solutions
from polar.rollout.node.limits import Late, ms_since, timed, within
from polar.rollout.node.outcome import Facts, Fault, Judgement, Part, judge
from polar.rollout.node.sandboxes import FreshSandboxes, Sandboxes
from polar.rollout.node.stages import Held, Stages
from polar.runtime import Runtime, RuntimeSpec

log = logging.getLogger("polar.node")

COLLECT_S = 300.0
"""How long reading what an agent left may take."""
WATCH_S = 0.25


@dataclass(frozen=True, slots=True)
class Equipment:
    """What every attempt of a node works with. `tell` is given each change of status and each warning."""

    config: NodeConfig
    gateway: Gateway
    stages: Stages
    sandboxes: Sandboxes
    artifacts: Artifacts
    build_thread: BuildThread
    tell: Callable[[Attempt, str | None], None]
    proven: dict[str, str] = field(default_factory=dict)
    """Images in which a harness was seen to run, with its version."""


@dataclass(frozen=True, slots=True)
class Made:
    """What INIT has made for the run."""

    agent: AgentRun
    runtime: Runtime
    capture: Capture
    fresh: FreshSandboxes


class Attempt:
    """Its state while it is in the books. `found`: what it has come to."""

    def __init__(self, request: SessionDispatchRequest, equipment: Equipment) -> None:
        self.request = request
        self.created = time.time()
        self.status: SessionStatus = "REGISTERED"
        self.changed = self.created
        self.found = Found(request)
        self.folder: Path = equipment.artifacts.folder(request.session_id, request.attempt)
        self.over = False
        """Whether the agent program has ended: nothing more comes to its log."""
        self._equipment = equipment
        self._held = Held()
        self._opening: asyncio.Task[Capture] | None = None
        """A cancelled attempt's session may be in the store before anyone has it in hand: it is closed all the same."""
        self._inner: asyncio.Task[None] | None = None
        self._part: Part = "init"
        self._cancelled: str | None = None
        self._shut_down = False
        self._ending = False
        self._runtime: Runtime | None = None
        self._fresh: FreshSandboxes | None = None
        self._evaluator: Evaluator[Any] | None = None

    @property
    def id(self) -> str:
        return self.request.attempt_id

    @property
    def capture(self) -> Capture | None:
        return self.found.capture

    @property
    def turns(self) -> int:
        return self.found.turns

    def cancel(self, why: str) -> None:
        """A caller does not want it any more. No effect once its result is being written."""
        if self._cancelled is None and not self._ending:
            self._cancelled = why
            if self._inner is not None:
                self._inner.cancel()

    def shut_down(self) -> None:
        """The node ends: the attempt is lost, by no fault of its own."""
        if not self._ending:
            self._shut_down = True
            if self._inner is not None:
                self._inner.cancel()

    async def run(self) -> SessionResult:
        """Through all stages to the result. The sandbox is gone, and the session closed, when it returns."""
        fault: Fault | None = None
        self._inner = asyncio.create_task(self._through_stages(), name=f"attempt {self.id}")
        if self._cancelled is not None or self._shut_down:  # before it began
            self._inner.cancel()
        await asyncio.wait([self._inner])
        self._ending = True
        if not self._inner.cancelled() and (error := self._inner.exception()) is not None:
            fault = self._fault(error)
        try:
            fault = fault or await self._closed()
            await self._tear_down()
            await self._salvage()
        finally:
            self._held.release()
        return await self.found.result(judge(self._facts(fault)), self._equipment.config, self.id)

    # --- stages ------------------------------------------------------------------------------------------------

    async def _through_stages(self) -> None:
        stages, priority = self._equipment.stages, self.request.priority
        waited = time.perf_counter()
        await self._held.move(stages.init, priority)
        self.found.timing.register_to_init_queue_ms = self.found.timing.queue_ms = ms_since(waited)
        self._enter("INITIALIZING")
        with timed(self.found.timing, "init_ms"):
            budget_s = self._init_seconds
            async with within(budget_s, lambda: SandboxError(f"the sandbox was not ready after {budget_s:g} s (init budget)")):
                made = await self._init()
        waited = time.perf_counter()
        if stages.ready is not None:
            await self._held.move(stages.ready, priority)
        self._enter("READY")
        await self._held.move(stages.run, priority)
        self.found.timing.ready_ms = ms_since(waited)
        self.found.timing.queue_ms += self.found.timing.ready_ms
        self._enter("RUNNING")
        with timed(self.found.timing, "run_ms"):
            ran = await self._run(made)
        waited = time.perf_counter()
        await self._held.move(stages.queued, priority)
        self._enter("POST_RUN")
        await self._held.move(stages.post, priority)
        self.found.timing.queue_ms += ms_since(waited)
        with timed(self.found.timing, "postrun_ms"):
            await self._post_run(made, ran)

    async def _init(self) -> Made:
        request, equipment = self.request, self._equipment
        await asyncio.to_thread(equipment.artifacts.make, request.session_id, request.attempt)
        spec = equipment.config.runtime_of(request.runtime)
        equipment.sandboxes.check(spec)
        task_folder = None if request.task_folder is None else Path(request.task_folder)
        variables = {"SESSION_ID": request.session_id, "TASK_ID": request.task_id}
        self.found.agent = agent = AgentRun(request.agent, task_folder=task_folder, variables=variables, proven=equipment.proven)
        self._evaluator = None if request.evaluator is None else from_spec(request.evaluator)
        with timed(self.found.timing, "install_ms"):
            await agent.install(lambda line: log.info(line, extra={"attempt": self.id}))
        self._opening = asyncio.create_task(Capture.open(equipment.gateway, request, agent.harness.name))
        self.found.capture = capture = await asyncio.shield(self._opening)
        mounted = spec.model_copy(update={"mounts": [*spec.mounts, *agent.mounts()]})
        self._runtime = await equipment.sandboxes.make(mounted, self.id, task_folder=task_folder, log_file=self.folder / "prepare.log")
        if request.evaluator is not None:
            await hide_solutions(self._runtime, request.evaluator)
        root = f"{self._runtime.gateway_url.rstrip('/')}/s/{capture.key}"
        endpoint = agent.endpoint(root, capture.key, capture.model)
        await agent.set_up(self._runtime, endpoint, context=capture.served.context)
        self._fresh = self._fresh_sandboxes(spec, task_folder)
        return Made(agent, self._runtime, capture, self._fresh)

    def _fresh_sandboxes(self, spec: RuntimeSpec, task_folder: Path | None) -> FreshSandboxes:
        folder = self.folder / "evaluator"
        folder.mkdir(mode=0o700)
        sandboxes, warm = self._equipment.sandboxes, self._equipment.stages.warm
        return FreshSandboxes(sandboxes, spec, self.id, warm, task_folder=task_folder, folder=folder, init_s=self._init_seconds)

    @property
    def _init_seconds(self) -> float:
        return self.request.budget.init_seconds or self._equipment.config.init_seconds

    async def _run(self, made: Made) -> HarnessRun:
        self._part = "run"
        if self._wants_fresh:
            made.fresh.warm_up()
        began = time.time()
        watch = asyncio.create_task(self._watch(made.capture, began))
        try:
            ran = await made.agent.run(made.runtime, self.request.instruction, folder=self.folder, timeout_s=self._agent_seconds)
        finally:
            watch.cancel()
            self.over = True
            first = made.capture.first_call
            self.found.timing.first_call_ms = None if first is None else max(0.0, 1000 * (first - began))
            await asyncio.gather(watch, return_exceptions=True)
        self.found.ran = ran
        if ran.problem is not None or ran.timed_out:
            self.found.engine_down = await made.capture.engine_down()
        return ran

    @property
    def _agent_seconds(self) -> float:
        return self.request.budget.agent_seconds or self.request.remaining_timeout_seconds

    @property
    def _wants_fresh(self) -> bool:
        spec = self.request.evaluator
        return self._evaluator is not None and spec is not None and spec.refresh_runtime and self._evaluator.needs_fresh

    async def _watch(self, capture: Capture, began: float) -> None:
        """Says so once if the harness makes no model call for long."""
        patience_s = self.request.budget.first_call_seconds
        while capture.first_call is None:
            if time.time() - began > patience_s:
                self._warn(f"the harness has made no model call in {patience_s:g} s; its output is in harness.stdout and harness.stderr")
                return
            await asyncio.sleep(WATCH_S)

    async def _post_run(self, made: Made, ran: HarnessRun) -> None:
        self._part = "collect"
        await made.runtime.end_processes()
        await made.capture.close()
        self.found.collected = collected = await self._collect(made)
        for warning in collected.warnings:
            self._warn(warning)
        self._part = "build"
        self._enter("BUILDING")
        self.found.grading = grading = Grading(self.request, made.capture, self._equipment.build_thread, self.folder)
        with timed(self.found.timing, "build_ms"):
            await grading.build()
            await grading.detect(made.agent.harness, collected.transcript)
        judgement = judge(self._facts(None))
        if judgement.outcome == "infrastructure":
            return
        self._part = "evaluate"
        self._enter("EVALUATING")
        with timed(self.found.timing, "evaluate_ms"):
            await self._evaluate(made, ran, collected, grading, judgement)
        self.found.timing.evaluator_wait_ms = 1000 * made.fresh.waited_s

    async def _collect(self, made: Made) -> Collected:
        """What the agent left. That reading it takes too long proves nothing of the sandbox: an agent can leave as much as it likes. A
        sandbox that hangs fails the evaluator, too."""
        late = f"what the agent left could not be read in {COLLECT_S:g} s"
        try:
            async with within(COLLECT_S, lambda: SandboxError(late)):
                return await made.agent.collect(made.runtime, self.folder)
        except Late:
            return Collected(None, None, (late,), patch_refused=late)

    async def _evaluate(self, made: Made, ran: HarnessRun, collected: Collected, grading: Grading, judgement: Judgement) -> None:
        request = self.request
        if judgement.outcome == "policy" and request.on_policy_failure != "grade":
            await grading.settle(None if request.on_policy_failure == "exclude" else float(request.on_policy_failure))
            return
        if self._evaluator is None or request.evaluator is None:
            return
        await grading.judged_by(
            self._evaluator,
            ran=ran,
            problem=judgement.why,
            collected=collected,
            agent=made.runtime,
            in_place=not request.evaluator.refresh_runtime,
            fresh=made.fresh,
            budget_s=request.budget.evaluation_seconds or self._equipment.config.evaluation_seconds,
        )

    # --- its end -----------------------------------------------------------------------------------------------

    def _facts(self, fault: Fault | None) -> Facts:
        return self.found.facts(fault, cancelled=self._cancelled, shut_down=self._shut_down)

    def _fault(self, error: BaseException) -> Fault:
        late = isinstance(error, Late)
        cause = error.error if isinstance(error, Late) else error
        if not isinstance(cause, PolarError | OSError):
            log.error("an attempt failed inside the node", exc_info=cause, extra={"attempt": self.id, "part": self._part})
        return Fault(self._part, cause, late)

    async def _closed(self) -> Fault | None:
        """The capture session closed, whatever happened. A store that cannot even do that is a fault of its own."""
        if self._opening is None:
            return None
        try:
            self.found.capture = await self._opening
            await self.found.capture.close()
        except Exception as error:  # whatever it is, the sandbox still has to go, and the result to be written
            return self._fault(error)
        return None

    async def _salvage(self) -> None:
        """Rows of an attempt that a boundary ended before they were built: without reward, but not lost."""
        capture = self.found.capture
        if self.found.grading is not None or capture is None or not capture.turns or self._cancelled is not None or self._shut_down:
            return
        grading = Grading(self.request, capture, self._equipment.build_thread, self.folder)
        try:
            await grading.build()
        except Exception as error:  # whatever ended the attempt is what its result tells; this is beside it
            log.warning("no rows of a failed attempt", extra={"attempt": self.id, "why": str(error)})
        self.found.grading = grading

    async def _tear_down(self) -> None:
        began = time.perf_counter()
        self.over = True
        if self._fresh is not None:
            await self._fresh.aclose()
        if self._runtime is not None:
            left = await self._equipment.sandboxes.remove(self._runtime)
            if left is not None:
                self._warn(f"the sandbox could not be removed completely: {left}")
        self.found.timing.teardown_ms = ms_since(began)

    # --- telling -----------------------------------------------------------------------------------------------

    def _enter(self, status: SessionStatus) -> None:
        self.status = status
        self.changed = time.time()
        self._equipment.tell(self, None)

    def _warn(self, warning: str) -> None:
        self.found.warnings.append(warning)
        self._equipment.tell(self, warning)
