"""Work that is larger than the sandbox that it would be graded in."""

from __future__ import annotations

from evaluator_lab import Lab, work

from polar.evaluator import make


async def test_a_work_folder_larger_than_a_sandbox_may_be_is_the_agents_own_doing(lab: Lab) -> None:
    """Brought over, it would have the fresh sandbox's commands ended: a fault of the evaluator, tried again and again."""
    lab.defaults["storage_mb"] = 16
    async with lab.sandbox(storage_mb=None) as agent:
        await work(agent, "head -c 20000000 /dev/zero > big")
        verdict = await make("command", {"command": "true"}).evaluate(lab.evidence(agent))
        assert verdict.reward == 0
        assert verdict.report["reason"] == "the work folder takes more than the 16 MB that a sandbox of the task has"
        await work(agent, "rm big")
        assert (await make("command", {"command": "true"}).evaluate(lab.evidence(agent))).reward == 1
