"""The reference system's evaluators by their names and settings, so that its tasks grade here unchanged."""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from polar.evaluator.base import Evaluator, Evidence, Verdict, register
from polar.evaluator.swebench import Swebench, SwebenchConfig
from polar.evaluator.test_map import MappedTests, MappedTestsConfig


class CompletedConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")


@register
class SessionCompleted(Evaluator[CompletedConfig]):
    """`session_completed`: 1 where the harness ended by itself and without a problem, else 0. For smoke tests: any answer earns it."""

    name = "session_completed"
    Config = CompletedConfig
    needs_fresh = False

    async def evaluate(self, evidence: Evidence) -> Verdict:
        done = not evidence.timed_out and evidence.problem is None and evidence.exit_code in (0, None)
        return Verdict(float(done), report={} if done else {"reason": evidence.problem or "the harness did not end by itself"})


class OutputConfig(MappedTestsConfig):
    """The reference's defaults: the repository in /testbed, `git diff` there as the patch, lines `PASSED name`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    repo_dir: str | None = "/testbed"
    patch_command: str | None = None
    expected: dict[str, str] = Field(
        default_factory=dict, validation_alias=AliasChoices("expected", "expected_output", "expected_results", "expected_status_map")
    )
    timeout_seconds: float | None = Field(
        default=1200.0, gt=0, allow_inf_nan=False, validation_alias=AliasChoices("timeout_seconds", "test_timeout", "test_timeout_seconds")
    )
    apply_timeout_seconds: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, validation_alias=AliasChoices("apply_timeout_seconds", "apply_timeout")
    )


@register
class OutputTests(MappedTests):
    """`test_on_output`: every test of `expected` has exactly the status given there."""

    name = "test_on_output"
    Config = OutputConfig


class HarnessConfig(SwebenchConfig):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    timeout_seconds: float | None = Field(
        default=1200.0, gt=0, allow_inf_nan=False, validation_alias=AliasChoices("timeout_seconds", "test_timeout", "test_timeout_seconds")
    )


@register
class SwebenchHarness(Swebench):
    """`swebench_harness`: `swebench` with `config.instance`."""

    name = "swebench_harness"
    Config = HarnessConfig
