"""After the run: rows from completions, the detector's findings, the evaluator's verdict, and credit. Knows no stage and no HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from polar.chat import JsonObject
from polar.errors import EvaluatorError
from polar.evaluator import Evaluator, Evidence
from polar.evaluator.detector import detect
from polar.harness.agent import Collected, HarnessRun
from polar.harness.base import Harness
from polar.records import Completion
from polar.rollout.models import SessionDispatchRequest, SessionStatus
from polar.rollout.node.capture import Capture
from polar.rollout.node.sandboxes import FreshSandboxes
from polar.runtime import Runtime
from polar.trajectory import Trajectory, build, builder, credit
from polar.trajectory.text import loads, well_formed

log = logging.getLogger("polar.node")

T = TypeVar("T")
GRACE_S = 30.0
"""What an evaluator gets beyond its budget to notice that it is over."""
TRANSCRIPT_BYTES = 16 << 20


class BuildThread:
    """One thread for work that is all CPU: several would fight the event loop for the interpreter."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "polar-build")

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Grading:
    """What became of one attempt's capture. `reward` of `None`: there is none, which is no zero."""

    request: SessionDispatchRequest
    capture: Capture
    build_thread: BuildThread
    folder: Path
    trajectory: Trajectory | None = None
    turns: int = 0
    """Complete model calls; aborted ones are none."""
    sampled: int = 0
    reward: float | None = None
    row_rewards: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    report: JsonObject | None = None
    attempts: list[JsonObject] = field(default_factory=list)
    """At cheating, as the detector tells them."""
    warnings: list[str] = field(default_factory=list)
    _completions: list[Completion] = field(default_factory=list)

    async def build(self) -> None:
        """Rows and ledger of all that was captured. Raises `StoreError`; `LawBroken` is a bug of the builder."""
        self._completions = await self.capture.completions()
        self.turns = sum(one.status == "complete" and one.choice == 0 for one in self._completions)
        self.sampled = sum(0 if one.sampled_ids is None else len(one.sampled_ids) for one in self._completions)
        if self._completions:
            made_by = builder(self.request.builder.strategy, self.request.builder.config)
            tokenizer = self.capture.served.tokenizer
            self.trajectory = await self.build_thread.do(build, self.capture.session, self._completions, made_by, tokenizer)
            self.warnings += self.trajectory.warnings

    async def detect(self, harness: Harness, transcript: Path | None) -> None:
        """Attempts at cheating. What it finds is reported and rewards nothing by itself: guards are what keeps cheating from paying."""
        text = "" if transcript is None else await asyncio.to_thread(_text_of, transcript)
        found = await self.build_thread.do(detect, self._completions, harness, text)
        self.attempts = [asdict(one) for one in found]
        self._completions = []

    async def judged_by(
        self,
        evaluator: Evaluator[Any],
        *,
        ran: HarnessRun,
        problem: str | None,
        collected: Collected,
        agent: Runtime,
        in_place: bool,
        fresh: FreshSandboxes,
        budget_s: float,
    ) -> None:
        """The evaluator's verdict. Making its sandboxes takes nothing of `budget_s`. Raises `EvaluatorError` or
        `SandboxError`: there is no reward then."""
        assert self.trajectory is not None
        evidence = Evidence(
            session=self.request.session_id,
            task=self.request.task_id,
            instruction=self.request.instruction,
            metadata=self.request.metadata,
            trajectory=self.trajectory,
            answer=ran.answer,
            patch=collected.patch,
            patch_refused=collected.patch_refused,
            exit_code=ran.exit_code,
            problem=problem,
            timed_out=ran.timed_out,
            agent=agent,
            fresh=_same(agent) if in_place else fresh.fresh,
            folder=self.folder / "evaluator",
            task_folder=None if self.request.task_folder is None else Path(self.request.task_folder),
            timeout_s=budget_s,
            transcript=collected.transcript,
            other=fresh.other,
        )
        try:
            async with asyncio.timeout(budget_s + GRACE_S) as budget:
                fresh.more_time = lambda seconds: None if budget.expired() else budget.reschedule((budget.when() or 0.0) + seconds)
                verdict = await evaluator.evaluate(evidence)
        except TimeoutError as error:
            if not budget.expired():
                raise
            raise EvaluatorError(f"the evaluator did not end within its budget of {budget_s:g} s, nor {GRACE_S:g} s later") from error
        finally:
            fresh.more_time = lambda seconds: None
        self.report, self.row_rewards = verdict.report, verdict.row_rewards
        self.metrics = {name: value for name, value in verdict.metrics.items() if math.isfinite(value)}
        for name in verdict.metrics.keys() - self.metrics.keys():  # JSON has no such number, and the service would take no result with it
            self.warnings.append(f"the evaluator's metric {name} is {verdict.metrics[name]} and is left out")
        await self.settle(verdict.reward)

    async def settle(self, reward: float | None) -> None:
        """Gives the rows their rewards. Raises `EvaluatorError` where those of the evaluator do not fit the rows."""
        self.reward = reward
        if self.trajectory is None:
            return
        policy = "per_row" if self.row_rewards else self.request.credit
        if policy == "per_row" and not self.row_rewards:
            if reward is not None and self.report is not None and self.trajectory.traces:
                raise EvaluatorError("credit is per_row, and the evaluator gave no rewards by row")
            policy = "broadcast"
        try:
            self.trajectory = credit(self.trajectory, reward, policy, self.row_rewards)
        except ValueError as error:
            raise EvaluatorError(str(error)) from error

    async def trajectory_json(self, status: SessionStatus, error: str | None, *, rewarded: bool) -> JsonObject | None:
        """The trajectory for the result, kept in the attempt's folder too; without rewards where there must be none."""
        if self.trajectory is None:
            return None
        final = status if status in ("TIMEOUT", "ERROR") else "COMPLETED"
        trajectory = replace(self.trajectory, status=final, error=error)
        if self.report is not None:
            trajectory = replace(trajectory, metadata={**trajectory.metadata, "evaluation": self.report})
        if not rewarded:
            trajectory = trajectory.with_traces(trace.with_reward(None) for trace in trajectory.traces)
        self.trajectory = None
        return await self.build_thread.do(_written, trajectory, self.folder / "trajectory.json.zst")

    def facts(self) -> JsonObject:
        """For `SessionResult.metadata`."""
        found: JsonObject = {"cheating": self.attempts}
        if self.report is not None:
            found["evaluation"] = self.report
        return found


def _same(runtime: Runtime) -> Callable[[], AbstractAsyncContextManager[Runtime]]:
    """For `refresh_runtime: false`: the agent's own sandbox in place of a fresh one, never stopped by the evaluator."""

    @asynccontextmanager
    async def lent() -> AsyncIterator[Runtime]:
        yield runtime

    return lent


def _written(trajectory: Trajectory, path: Path) -> JsonObject:
    text = trajectory.dumps()
    try:
        path.write_bytes(zstandard.ZstdCompressor(level=3).compress(text))
    except OSError as error:  # this copy is for people; the one that counts goes through the spool, which waits for a full disk
        log.warning("a trajectory could not be kept among the artefacts", extra={"path": str(path), "why": str(error)})
    parsed: JsonObject = well_formed(loads(text))
    return parsed


def _text_of(transcript: Path) -> str:
    """The text of a transcript's files, up to a size; links are not followed."""
    parts: list[str] = []
    room = TRANSCRIPT_BYTES
    for path in sorted(transcript.rglob("*")) if transcript.is_dir() else [transcript]:
        if path.is_file() and not path.is_symlink() and room > 0:
            with path.open("rb") as file:
                parts.append(file.read(room).decode(errors="replace"))
            room -= len(parts[-1])
    return "\n".join(parts)
