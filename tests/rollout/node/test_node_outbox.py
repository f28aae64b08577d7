"""The outbox on a disk that fails: nothing is lost, and nothing is sent without a pause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from node_world import Receiver, World, dispatch, until

from polar.errors import StoreError
from polar.rollout.models import SessionResult
from polar.rollout.node import spool as module
from polar.rollout.node.spool import Spool

Build = Callable[..., World]


async def test_a_result_that_was_taken_and_cannot_be_removed_is_not_sent_without_a_pause(
    world: Build, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world().node(receiver) as node:

        def read_only(attempt_id: str) -> None:
            raise OSError(30, "Read-only file system")

        node.deliveries._retry.first_seconds = node.deliveries._retry.longest_seconds = 3600.0
        monkeypatch.setattr(node.spool, "forget", read_only)
        await node.dispatch(dispatch())
        await until(lambda: (due := node.deliveries._due.get("ses_1.0")) is not None and due.tries == 1 and not due.busy)
        assert len(receiver.results) == 1


def test_a_result_that_is_refused_stays_where_no_other_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    fields = {"session_id": "ses_1", "task_id": "t", "delivery_id": "ses_1.0"}
    owed = spool.put(SessionResult.model_validate({**fields, "status": "COMPLETED", "reward": 1.0}), None, 1.0)
    instead = SessionResult.model_validate({**fields, "status": "ERROR"})

    def full(path: Path, content: bytes) -> None:
        raise StoreError("no space left on the disk")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", full)
        with pytest.raises(StoreError):
            spool.refuse("ses_1.0", instead)
    assert Spool(tmp_path).owed() == [owed]
    assert spool.result("ses_1.0").reward == 1.0
    assert spool.refuse("ses_1.0", instead).is_file()
    assert spool.result("ses_1.0").status == "ERROR"
