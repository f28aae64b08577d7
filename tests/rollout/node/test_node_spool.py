"""What a node owes survives it, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.errors import StoreError
from polar.rollout.models import SessionResult
from polar.rollout.node.spool import Accepted, Spool


def result(attempt: int = 0, **fields: object) -> SessionResult:
    return SessionResult.model_validate(
        {"session_id": "ses_1", "task_id": "t", "status": "COMPLETED", "attempt": attempt, "delivery_id": f"ses_1.{attempt}", **fields}
    )


def test_a_result_is_read_back_as_it_was_put(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    put = result(reward=0.25, trajectory={"traces": [{"prompt_ids": list(range(1000))}], "text": "half a pair \ud800"})
    owed = spool.put(put, None, 12.5)
    again = Spool(tmp_path)
    assert again.owed() == [owed]
    assert again.result("ses_1.0") == put


def test_owed_results_come_oldest_first_and_go_when_forgotten(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(result(0), "http://x/cb", 20.0)
    spool.put(result(1), None, 10.0)
    assert [owed.attempt_id for owed in spool.owed()] == ["ses_1.1", "ses_1.0"]
    spool.forget("ses_1.1")
    spool.forget("ses_1.1")
    assert [(owed.attempt_id, owed.callback_url) for owed in spool.owed()] == [("ses_1.0", "http://x/cb")]


def test_what_a_killed_process_had_half_written_goes(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.accept(Accepted("ses_1", "t"))
    for folder in ("intake", "outbox"):
        (tmp_path / folder / ".x1y2.tmp").write_bytes(b"half")
    assert Spool(tmp_path).unsettled() == [Accepted("ses_1", "t")]
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []


def test_a_spoiled_file_is_set_aside_and_the_rest_is_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(result(0), None, 1.0)
    spool.put(result(1), None, 2.0)
    file = tmp_path / "outbox" / "ses_1.0.zst"
    file.write_bytes(file.read_bytes()[:20])
    assert [owed.attempt_id for owed in spool.owed()] == ["ses_1.1"]
    assert file.with_suffix(".broken").exists()


def test_a_half_written_file_is_never_seen(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    (tmp_path / "outbox" / ".x.tmp").write_bytes(b"half")
    (tmp_path / "intake" / ".y.tmp").write_bytes(b"half")
    assert spool.owed() == []
    assert spool.unsettled() == []


def test_the_intake_journal_names_what_was_accepted_until_it_is_settled(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    accepted = Accepted("ses_1", "t", 2, 3, "http://x/cb")
    spool.accept(accepted)
    assert Spool(tmp_path).unsettled() == [accepted]
    spool.settled(accepted.attempt_id)
    assert Spool(tmp_path).unsettled() == []


def test_a_disk_that_takes_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        spool.put(result(0), None, 1.0)
    assert spool.owed() == []
    assert list((tmp_path / "outbox").iterdir()) == []
