"""What an attempt has come to, as far as it has come, and the result that is made of it. Starts nothing and ends nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from polar.chat import JsonObject
from polar.harness.agent import AgentRun, Collected, HarnessRun
from polar.rollout.config import NodeConfig
from polar.rollout.models import SessionDispatchRequest, SessionResult, Timing
from polar.rollout.node.capture import Capture
from polar.rollout.node.grading import Grading
from polar.rollout.node.outcome import Facts, Fault, Judgement
from polar.trajectory.text import well_formed


@dataclass(slots=True)
class Found:
    """`None`: it has not come to that. Big things (trajectory, completions) live in `grading`, as long as the stage that needs them."""

    request: SessionDispatchRequest
    timing: Timing = field(default_factory=Timing)
    warnings: list[str] = field(default_factory=list)
    agent: AgentRun | None = None
    capture: Capture | None = None
    ran: HarnessRun | None = None
    engine_down: str | None = None
    """Why the engine could not be reached after a run that went wrong."""
    collected: Collected | None = None
    grading: Grading | None = None

    @property
    def turns(self) -> int:
        if self.grading is not None:
            return self.grading.turns
        return 0 if self.capture is None else self.capture.turns

    def facts(self, fault: Fault | None, *, cancelled: str | None = None, shut_down: bool = False) -> Facts:
        """For `polar.rollout.node.outcome.judge`."""
        ran, capture = self.ran, self.capture
        return Facts(
            completions=0 if self.grading is None else self.grading.turns,
            fault=fault,
            cancelled=cancelled,
            shut_down=shut_down,
            ran=ran is not None,
            exit_code=None if ran is None else ran.exit_code,
            problem=None if ran is None else ran.problem,
            timed_out=ran is not None and ran.timed_out,
            out_of_memory=ran is not None and ran.out_of_memory,
            refusal=None if capture is None else capture.refusal,
            engine_down=self.engine_down,
        )

    async def result(self, judgement: Judgement, config: NodeConfig, delivery_id: str) -> SessionResult:
        """Once: what is big is let go."""
        request, ran, grading = self.request, self.ran, self.grading
        status = judgement.status(timed_out=ran is not None and ran.timed_out)
        result = SessionResult(
            session_id=request.session_id,
            task_id=request.task_id,
            status=status,
            timing=self.timing,
            node_id=config.id,
            error=well_formed(judgement.why),
            metadata=well_formed(self._metadata(config)),
            outcome=judgement.outcome,
            attempt=request.attempt,
            sample=request.sample,
            turns=self.turns,
            error_code=judgement.code,
            answer=None if self.collected is None or ran is None else well_formed(ran.answer),
            exit_code=None if ran is None else ran.exit_code,
            warnings=well_formed(self.warnings),
            delivery_id=delivery_id,
        )
        if grading is not None:
            result.sampled_tokens = grading.sampled
            result.warnings = well_formed([*self.warnings, *grading.warnings])
            rewarded = judgement.outcome in ("graded", "policy")
            result.reward = grading.reward if rewarded else None
            result.metrics = well_formed(dict(grading.metrics)) if rewarded else {}
            result.trajectory = await grading.trajectory_json(status, judgement.why, rewarded=rewarded)
        self.grading = None
        return result

    def _metadata(self, config: NodeConfig) -> JsonObject:
        """The caller's own, untouched, and under `run` what the node knows of the attempt."""
        spec = config.runtime_of(self.request.runtime)
        run: JsonObject = {
            "builder": self.request.builder.strategy,
            "runtime": {"backend": spec.backend, "image": spec.image, "network": spec.effective_network},
        }
        if self.agent is not None:
            run["harness"] = {"name": self.agent.harness.name, "version": self.agent.version or self.agent.harness.version}
        if self.grading is not None:
            run |= self.grading.facts()
        if self.capture is not None:
            run["engine"] = self.capture.served.provenance
            if self.capture.refused:
                run["refused_calls"] = self.capture.refused
        return {**self.request.metadata, "run": run}
