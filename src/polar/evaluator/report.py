"""Every evaluation's frame: `report.json` in the evidence's folder, one time limit over all (in which making sandboxes does not
count), and errors told apart (law 5)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from polar.chat import JsonObject
from polar.errors import EvaluatorError, PolarError
from polar.evaluator.base import Evaluator, Evidence, NoConfig, Verdict
from polar.evaluator.place import agents_own, pausing

GRACE_S = 30.0
"""Beyond the budget, before an evaluator that keeps to no limit of its own is ended."""


class Framed(Evaluator[Any]):
    """An evaluator with its frame; what `polar.evaluator.from_spec` gives. `in_place`: its fresh sandbox is the agent's own."""

    def __init__(self, inner: Evaluator[Any], *, in_place: bool = False) -> None:
        super().__init__(NoConfig(), inner.env)
        self.inner = inner
        self.in_place = in_place
        self.needs_fresh = inner.needs_fresh and not in_place

    @property
    def label(self) -> str:
        return getattr(self.inner, "name", type(self.inner).__name__)

    async def evaluate(self, evidence: Evidence) -> Verdict:
        """Raises `EvaluatorError` or `SandboxError`; an evaluator's own bug is an `EvaluatorError` that names it."""
        begun = time.monotonic()
        evidence.folder.mkdir(parents=True, exist_ok=True)
        said: JsonObject = {"evaluator": self.label, "session": evidence.session, "task": evidence.task}
        try:
            async with asyncio.timeout(evidence.timeout_s + GRACE_S) as limit:
                own = agents_own(evidence) if self.in_place else evidence
                verdict = await self.inner.evaluate(pausing(own, lambda: _paused(limit)))
            rows = len(evidence.trajectory.traces)
            if verdict.row_rewards and len(verdict.row_rewards) != rows:
                raise EvaluatorError(f"the evaluator gave {len(verdict.row_rewards)} row rewards for {rows} rows")
        except TimeoutError as error:
            raise self._told(said, begun, evidence.folder, EvaluatorError(f"the evaluator {self.label} did not end in time")) from error
        except PolarError as error:
            raise self._told(said, begun, evidence.folder, error) from error.__cause__
        except (Exception, SystemExit) as error:  # an exit, of a library's `main` say, would end the whole node
            raise self._told(
                said, begun, evidence.folder, EvaluatorError(f"the evaluator {self.label} failed: {type(error).__name__}: {error}")
            ) from error
        said.update(reward=verdict.reward, metrics=dict(verdict.metrics), report=verdict.report)
        if verdict.row_rewards:
            said["row_rewards"] = list(verdict.row_rewards)
        self._write(said, begun, evidence.folder)
        return verdict

    def _told(self, said: JsonObject, begun: float, folder: Path, error: PolarError) -> PolarError:
        self._write({**said, "error": str(error), "error_type": type(error).__name__}, begun, folder)
        return error

    def _write(self, said: Mapping[str, Any], begun: float, folder: Path) -> None:
        text = json.dumps({**said, "seconds": round(time.monotonic() - begun, 3)}, indent=2, ensure_ascii=False, default=str)
        (folder / "report.json").write_text(text + "\n", errors="backslashreplace")


@contextmanager
def _paused(limit: asyncio.Timeout) -> Iterator[None]:
    """Moves the limit by what is done inside."""
    end, begun = limit.when(), time.monotonic()
    limit.reschedule(None)
    try:
        yield
    finally:
        if end is not None and not limit.expired():
            limit.reschedule(end + time.monotonic() - begun)


def part(evidence: Evidence, name: str, timeout_s: float) -> Evidence:
    """The evidence for one part of a whole: with a folder and a time of its own."""
    return replace(evidence, folder=evidence.folder / name, timeout_s=timeout_s)
