"""What an export takes: every session of the store gets a split or a reason why it is left out, before the first row is made.

Reads sessions, never completions. Memory does not grow with their number: selection and split are queries on the state.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson

from polar.errors import ConfigError
from polar.export.facts import Facts, facts_of, read_labels
from polar.export.spec import Spec
from polar.export.state import State, facts_to
from polar.records import Session
from polar.store.base import Store

PAGE = 500

KIND = "a session of another kind"
OPEN = "still open"
NO_REWARD = "no reward"
INFRASTRUCTURE = "failed by infrastructure"
BELOW = "reward below the threshold"
NOT_BEST = "not among the best of its group"


async def every_session(store: Store) -> AsyncIterator[Session]:
    """All sessions of a store, newest first, page by page."""
    before: float | None = None
    while page := await store.sessions(limit=PAGE, before=before):
        for session in page:
            yield session
        before = page[-1].created


async def make(state: State, store: Store, spec: Spec, note: Callable[[str], None]) -> None:
    """Fills a fresh state, in one transaction. `note` gets a line for people about what looks odd.

    Raises `ConfigError` for facts that are wrong, or that the options need and a session lacks.
    """
    state.begin()
    if spec.labels is not None:
        _read_labels(state, Path(spec.labels))
    async for session in every_session(store):
        label = state.db.execute("SELECT facts FROM labels WHERE session = ?", (session.id,)).fetchone()
        if label is not None:
            state.db.execute("UPDATE labels SET used = 1 WHERE session = ?", (session.id,))
        facts = facts_of(session, None if label is None else orjson.loads(label[0]))
        if spec.wants(facts):
            _add(state, facts, refused(facts, spec))
    if unused := state.one("SELECT count(*) FROM labels WHERE NOT used"):
        note(f"{unused} of the labels are of sessions that this store does not have")
    _keep_best(state, spec)
    split(state, spec)
    state.set_meta(planned="1")
    state.commit()


def refused(facts: Facts, spec: Spec) -> str | None:
    """Why a session is left out, as far as it alone tells."""
    if spec.kind not in ("any", facts.kind):
        return KIND
    if facts.outcome == "failed_by_infrastructure":
        return INFRASTRUCTURE
    if not facts.closed and not spec.include_open:
        return OPEN
    if facts.reward is None:
        by_row = spec.credit == "per_row" and facts.row_rewards is not None
        return None if by_row or spec.keep_unrewarded else NO_REWARD
    if spec.min_reward is not None and facts.reward < spec.min_reward:
        return BELOW
    return None


def _add(state: State, facts: Facts, reason: str | None) -> None:
    values = (facts.session, facts.created, facts_to(facts), facts.group, facts.origin, facts.reward, reason)
    state.db.execute("INSERT INTO sessions (session, created, facts, grp, origin, reward, refused) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def _read_labels(state: State, path: Path) -> None:
    for session, facts in read_labels(path):
        raw = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)
        known = state.db.execute("SELECT facts FROM labels WHERE session = ?", (session,)).fetchone()
        if known is not None and known[0] != raw:
            raise ConfigError(f"{path} says two different things of session {session}")
        state.db.execute("INSERT OR IGNORE INTO labels (session, facts) VALUES (?, ?)", (session, raw))


def _keep_best(state: State, spec: Spec) -> None:
    """Best of n: the highest rewards of each group; among equals the earlier session."""
    if spec.best_of is None:
        return
    lonely = state.db.execute("SELECT session FROM sessions WHERE refused IS NULL AND grp IS NULL LIMIT 1").fetchone()
    if lonely is not None:
        raise ConfigError(f"--best-of compares the sessions of a group, and session {lonely[0]} has neither a group_id nor a task")
    state.db.execute(
        """
        UPDATE sessions SET refused = ? WHERE session IN (
            SELECT session FROM (
                SELECT session, row_number() OVER (PARTITION BY grp ORDER BY reward DESC, created, session) AS place
                FROM sessions WHERE refused IS NULL
            ) WHERE place > ?
        )
        """,
        (NOT_BEST, spec.best_of),
    )


# --- splits ------------------------------------------------------------------------------------------------------------


def split(state: State, spec: Spec) -> None:
    """Gives every session that is taken a split: all of a repository (or task) the same one."""
    if not spec.is_split:
        return
    _find_keys(state, spec)
    if spec.split_by == "split":
        state.db.execute("UPDATE keys SET split = key")
    else:
        _read_known(state, spec)
        _fill(state, spec)
    state.db.execute(
        "UPDATE sessions SET split = (SELECT keys.split FROM keys WHERE keys.key = sessions.key) WHERE refused IS NULL AND key IS NOT NULL"
    )
    torn = state.db.execute(
        "SELECT grp FROM sessions WHERE refused IS NULL AND grp IS NOT NULL GROUP BY grp HAVING min(split) <> max(split) LIMIT 1"
    ).fetchone()
    if torn is not None:
        raise ConfigError(f"the sessions of group {torn[0]} would stand in several splits: they name several of what --split-by compares")


def _find_keys(state: State, spec: Spec) -> None:
    state.db.execute("UPDATE sessions SET key = json_extract(CAST(facts AS TEXT), ?) WHERE refused IS NULL", (f"$.{spec.split_by}",))
    lacking = state.db.execute("SELECT session FROM sessions WHERE refused IS NULL AND key IS NULL LIMIT 1").fetchone()
    if lacking is not None:
        raise ConfigError(f"session {lacking[0]} has no {spec.split_by}, so it cannot be split by it; see --split-by and --labels")
    keys = state.db.execute("SELECT key, count(*) FROM sessions WHERE refused IS NULL GROUP BY key")
    state.db.executemany("INSERT INTO keys VALUES (?, ?, ?, NULL)", ((key, _hash(spec.seed, key), count) for key, count in keys))


def _read_known(state: State, spec: Spec) -> None:
    """The sides that an earlier export gave."""
    if spec.known_splits is None:
        return
    with open(spec.known_splits, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                data = orjson.loads(line)
                key, name = data["key"], data["split"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{spec.known_splits}, line {number}: not a line of a splits.jsonl") from error
            state.db.execute("UPDATE keys SET split = ? WHERE key = ?", (name, key))


def _fill(state: State, spec: Spec) -> None:
    """Keys are taken in order of their hash; one goes into a split if that brings the split nearer to its share of the sessions."""
    total = state.one("SELECT coalesce(sum(sessions), 0) FROM keys")
    for name, share in spec.splits.items():
        wanted = share * total
        held = state.one("SELECT coalesce(sum(sessions), 0) FROM keys WHERE split = ?", name)
        taken = []
        for key, count in state.db.execute("SELECT key, sessions FROM keys WHERE split IS NULL ORDER BY hash"):
            if abs(held + count - wanted) < abs(held - wanted):
                taken.append((name, key))
                held += count
        if not held:
            smallest = state.db.execute("SELECT key FROM keys WHERE split IS NULL ORDER BY sessions, hash LIMIT 1").fetchone()
            left = state.one("SELECT count(*) FROM keys WHERE split IS NULL")
            if smallest is None or left < 2:
                raise ConfigError(f"there is nothing to put into the split {name}: all sessions are of one {spec.split_by}")
            taken.append((name, smallest[0]))
        state.db.executemany("UPDATE keys SET split = ? WHERE key = ?", taken)
    state.db.execute("UPDATE keys SET split = 'train' WHERE split IS NULL")
    if spec.splits and not state.one("SELECT count(*) FROM keys WHERE split = 'train'"):
        raise ConfigError(f"the splits leave nothing for `train`: there are too few values of {spec.split_by}")


def _hash(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()
