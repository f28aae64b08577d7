"""The manifest of a finished export: what it holds, what it left out and why. Counts come from the state, so they are exact.

`tokens` states conservation through the export: `exported + dropped + ledger = sampled`, over the sessions that were taken. The acceptance
table counts sessions with a reward; a session that failed by infrastructure, or has no reward, says nothing about a task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from polar import __version__
from polar.chat import JsonObject
from polar.export.spec import Spec
from polar.export.state import State

VERSION = 1
SOURCES = 1000
"""Lines of the acceptance table at most; smaller sources are summed up as `(others)`."""
_LENGTHS = ("messages", "turns", "tokens", "trained")


def manifest(state: State, spec: Spec) -> JsonObject:
    """Raises `AssertionError` if tokens were lost on the way."""
    tokens = _tokens(state)
    if tokens["exported"] + tokens["dropped"] + tokens["ledger"] != tokens["sampled"]:
        raise AssertionError(f"tokens were lost or doubled by the export: {tokens}")
    return {
        "version": VERSION,
        "polar": __version__,
        "form": spec.form,
        "format": spec.file_format,
        "spec": _spec(spec),
        "sessions": _sessions(state),
        "rows": _rows(state),
        "tokens": tokens,
        "models": models(state),
        "acceptance": acceptance(state),
        "splits": _splits(state, spec),
        "files": [
            {"split": part.split, "file": part.file, "rows": part.rows, "bytes": part.bytes, "sha256": part.sha256}
            for part in state.parts()
        ],
    }


def _spec(spec: Spec) -> JsonObject:
    """The options; of files only their names, since a manifest is published with the data."""
    files = {name: Path(path).name for name, path in (("labels", spec.labels), ("known_splits", spec.known_splits)) if path is not None}
    return spec.as_json() | files


def acceptance(state: State) -> list[JsonObject]:
    """By source: graded sessions, how many of them the export took, and their mean reward; the largest first."""
    query = """
        SELECT origin, count(*), sum(refused IS NULL), avg(reward) FROM sessions
        WHERE reward IS NOT NULL AND coalesce(refused, '') NOT IN ('still open', 'a session of another kind')
        GROUP BY origin ORDER BY count(*) DESC, origin
    """
    lines: list[JsonObject] = []
    others = [0, 0, 0.0]
    for source, graded, taken, mean in state.db.execute(query):
        if len(lines) < SOURCES:
            lines.append(_line(source, graded, taken, mean))
        else:
            others = [others[0] + graded, others[1] + taken, others[2] + mean * graded]
    if others[0]:
        lines.append(_line("(others)", int(others[0]), int(others[1]), others[2] / others[0]))
    return lines


def models(state: State) -> list[JsonObject]:
    """What sampled the rows: model, hashes of its tokenizer and template, renderer, and in how many sessions; the most first."""
    query = "SELECT facts, sessions FROM models ORDER BY sessions DESC, facts"
    return [{**orjson.loads(facts), "sessions": sessions} for facts, sessions in state.db.execute(query)]


def _line(source: str, graded: int, taken: int, mean: float) -> JsonObject:
    return {"source": source, "graded": graded, "accepted": taken, "share": taken / graded, "mean_reward": mean}


def _sessions(state: State) -> JsonObject:
    query = "SELECT refused, count(*) FROM sessions WHERE refused IS NOT NULL GROUP BY refused ORDER BY count(*) DESC, refused"
    return {
        "seen": state.one("SELECT count(*) FROM sessions"),
        "taken": state.one("SELECT count(*) FROM sessions WHERE refused IS NULL"),
        "refused": dict(state.db.execute(query)),
    }


def _rows(state: State) -> JsonObject:
    query = "SELECT reason, rows FROM dropped ORDER BY rows DESC, reason"
    return {
        "written": state.one("SELECT count(*) FROM rows"),
        "dropped": dict(state.db.execute(query)),
        "lengths": {name: _distribution(state, name) for name in _LENGTHS},
    }


def _tokens(state: State) -> JsonObject:
    dropped = dict(state.db.execute("SELECT reason, tokens FROM dropped ORDER BY tokens DESC, reason"))
    ledger = dict(state.db.execute("SELECT reason, tokens FROM ledger ORDER BY tokens DESC, reason"))
    return {
        "sampled": int(state.meta().get("sampled", "0")),
        "exported": state.one("SELECT coalesce(sum(trained), 0) FROM rows"),
        "dropped": sum(dropped.values()),
        "ledger": sum(ledger.values()),
        "dropped_by": dropped,
        "ledger_by": ledger,
    }


def _distribution(state: State, name: str) -> JsonObject | None:
    """Of a length over the written rows: sum, mean, quantiles. `None` where there are no rows."""
    count, total = state.db.execute(f"SELECT count(*), sum({name}) FROM rows").fetchone()
    if not count:
        return None

    def at(share: float) -> int:
        place = min(count - 1, int(share * count))
        return int(state.one(f"SELECT {name} FROM rows ORDER BY {name} LIMIT 1 OFFSET ?", place))

    return {"sum": total, "mean": total / count, "min": at(0), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1)}


def _splits(state: State, spec: Spec) -> dict[str, Any]:
    query = "SELECT split, count(*), sum(tokens), sum(trained) FROM rows GROUP BY split ORDER BY split <> 'train', split"
    found: dict[str, Any] = {}
    for split, rows, tokens, trained in state.db.execute(query):
        found[split] = {"rows": rows, "tokens": tokens, "trained_tokens": trained}
        found[split]["sessions"] = state.one("SELECT count(*) FROM sessions WHERE refused IS NULL AND split = ?", split)
        if spec.is_split:
            found[split]["by"] = spec.split_by
            found[split]["values"] = state.one("SELECT count(*) FROM keys WHERE split = ?", split)
    return found
