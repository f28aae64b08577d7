"""Finished results as files, laid out as the reference does: `<save_dir>/task_<id>/ses_<sid>.json`. A copy for people and tools: the
database is the truth, and a file that cannot be written is tried again."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from polar.rollout.database import Transaction, unpacked
from polar.rollout.tables import results, sessions, tasks

log = logging.getLogger("polar.rollout")

BATCH = 64


def unsaved(connection: Connection, task: int | None = None) -> Sequence[Any]:
    """Results without a file, of all tasks or one."""
    query = (
        select(sessions.c.id, tasks.c.name, results.c.body)
        .join(tasks, tasks.c.id == sessions.c.task)
        .join(results, results.c.session == sessions.c.id)
        .where(sessions.c.state == "done", sessions.c.saved.is_(None))
        .limit(BATCH)
    )
    return connection.execute(query if task is None else query.where(sessions.c.task == task)).all()


def write_files(folder: Path, rows: Sequence[Any]) -> dict[str, str]:
    """Writes them; each appears under its name when it is complete. Returns the paths by session. Raises `OSError`."""
    paths = {}
    for row in rows:
        path = folder / f"task_{row.name}" / f"ses_{row.id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(unpacked(row.body))
        os.replace(temporary, path)
        paths[row.id] = str(path)
    return paths


def note_saved(tx: Transaction, paths: dict[str, str]) -> None:
    query = update(sessions).where(sessions.c.id == bindparam("b_id")).values(saved=bindparam("b_path"))
    if paths:
        tx.connection.execute(query, [{"b_id": session, "b_path": path} for session, path in paths.items()])


def remove_files(paths: Sequence[str]) -> None:
    """Of a task that is forgotten: its files, and its folder if that leaves it empty. One that resists stays, and is said: the database
    would keep everything otherwise."""
    for path in map(Path, paths):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the file of a result that is forgotten stays", extra={"path": str(path), "why": str(error)})
    for folder in {Path(path).parent for path in paths}:
        with contextlib.suppress(OSError):  # others are in it
            folder.rmdir()
