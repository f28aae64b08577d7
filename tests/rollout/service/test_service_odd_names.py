"""Names that no database column takes are refused in the API's form, whatever the database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from service_parts import http, submit, task

from polar.testing.rollout import running_service

LAST = 10**18 - 1
PATHS = (
    "/tasks?status=%00",
    "/tasks?harness=%00",
    "/rollout/task/%00",
    "/rollout/sessions/%00",
    "/nodes/%00",
    "/tasks/%00/sessions",
)


async def refused(place: str, folder: Path) -> None:
    async with running_service(folder, store=place) as (service, url), http(url) as client:
        await submit(client, "t")
        for path in PATHS:
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request"), path
        for name, value in (("agent", {"import_path": "mine\0:Harness"}), ("runtime", {"backend": "lo\0cal"})):
            answer = await client.post("/rollout/task/submit", json={**task("u"), name: value})
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request"), name
        assert (await client.get(f"/tasks/t/sessions?cursor={LAST}")).json()["sessions"] == []
        assert [one["task_id"] for one in (await client.get(f"/tasks?cursor={LAST}")).json()["tasks"]] == ["t"]
        assert service.trouble is None


async def test_on_sqlite(tmp_path: Path) -> None:
    await refused(str(tmp_path / "rollout.db"), tmp_path)


@pytest.mark.real
async def test_on_postgresql(new_schema: Callable[[], str], tmp_path: Path) -> None:
    await refused(new_schema(), tmp_path)
