"""Reports of where attempts are come in lists: whatever stands in one, it says what its reports would have said one by one."""

from __future__ import annotations

from pathlib import Path

from service_parts import until
from sqlalchemy import event, func, select
from test_service_nodes import never

from polar.rollout.client import AsyncClient
from polar.rollout.database import Transaction
from polar.rollout.events import page
from polar.rollout.models import SessionStatus
from polar.rollout.results import StateReport, moved
from polar.rollout.tables import attempts, sessions
from polar.testing.node import StubNode
from polar.testing.rollout import TOKEN, stub_rollouts

TASK = {"task_id": "t", "instruction": "x", "num_samples": 8, "agent": {"custom_shell": "true"}}
WAY: list[SessionStatus] = ["INITIALIZING", "READY", "RUNNING", "READY", "POST_RUN"]


async def test_a_list_tells_each_step_of_each_attempt_and_costs_few_statements(tmp_path: Path) -> None:
    one = StubNode(play=never, max_run_workers=8, interval_s=30.0)  # so that it is not taken for lost on a busy machine
    async with stub_rollouts(tmp_path, [one]) as (service, url), AsyncClient(url, TOKEN) as client:
        await client.submit(TASK)
        taken = select(func.count()).where(attempts.c.state == "accepted")

        async def accepted() -> bool:
            """By the service: that the node has seen them does not mean yet that its answers were."""
            return await service.database.read(lambda connection: connection.execute(taken).scalar()) == 8

        await until(accepted)
        names = [request.session_id for request in one.dispatched]
        reports = [StateReport(session_id=name, status=status, turns=turn) for turn, status in enumerate(WAY) for name in names]
        reports.append(StateReport(session_id="nobody", status="RUNNING"))
        said = 0

        def change(tx: Transaction) -> int:
            def count(*_: object) -> None:
                nonlocal said
                said += 1

            event.listen(tx.connection, "before_cursor_execute", count)
            moved(tx, reports)
            return said

        assert await service.database.write(change) <= 3, "a select and two updates, for 41 reports of 8 sessions"
        rows = await service.database.read(lambda connection: connection.execute(select(attempts.c.status, attempts.c.turns)).all())
        assert [tuple(row) for row in rows] == [("POST_RUN", 4)] * 8
        shown = await service.database.read(lambda connection: connection.execute(select(sessions.c.status)).scalars().all())
        assert list(shown) == ["POST_RUN"] * 8
        told, _ = await service.database.read(lambda connection: page(connection, 0))
        steps = [step["data"]["status"] for step in told if step["type"] == "session.state_changed" and step["session_id"] == names[0]]
        assert steps == ["INITIALIZING", "READY", "RUNNING", "POST_RUN"]
