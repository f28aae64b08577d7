"""The export itself: plan, rows, parts, manifest. The only place where store, trajectories and files meet.

Memory holds a few sessions, a row group for each split, and nothing that grows with the data. A checkpoint closes all parts at once, so
that the state can say "everything up to this session is in these files". What an interruption leaves beyond the last checkpoint is
removed when the export goes on, and made again, byte for byte.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.export import plan
from polar.export.card import card
from polar.export.manifest import manifest
from polar.export.parts import WRITERS, Writer, check_format, remove_strays, write_atomically
from polar.export.rows import Unfit, make
from polar.export.spec import Spec
from polar.export.state import Planned, State
from polar.export.trajectories import Maker
from polar.store.base import Store
from polar.trajectory.row import Trace, Trajectory

STATE = ".export.db"
MANIFEST = "manifest.json"
AHEAD = 4
"""Sessions in memory at most."""

DUPLICATE = "duplicate"
UNFAITHFUL = "not context-faithful"
NO_REWARD = "no reward was credited to it"
BELOW = "reward below the threshold"
LONG = "longer than --max-tokens"
ROLE = "another role"
LEAK = "its prompt stands in another split"
EMPTY = "nothing in it is trained"


@dataclass(frozen=True, slots=True)
class About:
    """What the data card is called."""

    title: str
    license_name: str | None = None


async def export(
    store: Store,
    store_name: str,
    folder: Path,
    spec: Spec,
    *,
    about: About,
    progress: Callable[[str], None] = lambda _: None,
) -> JsonObject:
    """Writes the export into `folder` and returns its manifest. Goes on where an earlier call with the same `spec` was interrupted.

    `store_name` says which store this is (an interrupted export must not go on with another one's sessions). Raises `ConfigError` for a
    folder that holds something else, and for options or facts that are wrong.
    """
    spec.check()
    check_format(spec.file_format)
    maker = Maker(spec.builder, spec.options, spec.credit)
    finished = _claim(folder, spec, store_name)
    if finished is not None:
        progress(f"{folder} holds this export already, complete; sessions recorded since then need another folder")
        return finished
    try:
        facts = await _resume(store, store_name, folder, spec, maker, about, progress)
    except (OSError, sqlite3.OperationalError) as error:
        raise ConfigError(f"{folder} cannot be written: {error}; the same command goes on from the last checkpoint") from error
    State.remove(folder / STATE)
    return facts


async def _resume(
    store: Store, store_name: str, folder: Path, spec: Spec, maker: Maker, about: About, progress: Callable[[str], None]
) -> JsonObject:
    state = State.open(folder / STATE, spec.fingerprint(store_name))
    try:
        if "planned" not in state.meta():
            progress("looking at all sessions")
            await plan.make(state, store, spec, progress)
        else:
            progress("going on where the export was interrupted")
        remove_strays(folder, state.parts())
        await _Run(store, folder, spec, state, maker, progress).all()
        facts = manifest(state, spec)
        _write_splits(folder, spec, state)
        write_atomically(folder / "README.md", [card(facts, title=about.title, license_name=about.license_name).encode()])
        facts["fingerprint"] = spec.fingerprint(store_name)
        text = orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_atomically(folder / MANIFEST, [text])
    finally:
        state.close()
    written: JsonObject = orjson.loads(text)
    return written


def _claim(folder: Path, spec: Spec, store_name: str) -> JsonObject | None:
    """Makes the folder; the manifest if it holds this very export, complete."""
    if (folder / MANIFEST).is_file():
        facts: JsonObject = orjson.loads((folder / MANIFEST).read_bytes())
        if facts.get("fingerprint") == spec.fingerprint(store_name):
            State.remove(folder / STATE)
            return facts
        raise ConfigError(f"{folder} holds another finished export: name another folder")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / STATE).exists())):
        raise ConfigError(f"{folder} exists and is neither empty nor an unfinished export: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return None


def _write_splits(folder: Path, spec: Spec, state: State) -> None:
    """Which repository or task stands where, for a later export's `known_splits`."""
    if spec.is_split:
        lines = (
            orjson.dumps({"key": key, "split": split}, option=orjson.OPT_APPEND_NEWLINE)
            for key, split in state.db.execute("SELECT key, split FROM keys ORDER BY key")
        )
        write_atomically(folder / "splits.jsonl", lines)


class _Run:
    def __init__(self, store: Store, folder: Path, spec: Spec, state: State, maker: Maker, progress: Callable[[str], None]) -> None:
        self.store = store
        self.folder = folder
        self.spec = spec
        self.state = state
        self.maker = maker
        self.progress = progress
        self.numbers: dict[str, int] = {}
        for part in state.parts():
            self.numbers[part.split] = part.number + 1
        self.writers: dict[str, Writer] = {}
        self.sampled = int(state.meta().get("sampled", "0"))

    async def all(self) -> None:
        last: Planned | None = None
        self.state.begin()
        count = 0
        async with aclosing(self._trajectories()) as trajectories:
            async for planned, trajectory in trajectories:
                self._session(planned, trajectory)
                last = planned
                count += 1
                if sum(writer.size for writer in self.writers.values()) >= self.spec.part_mb * (1 << 20):
                    self._checkpoint(last)
                    self.progress(f"{count:,} sessions, {sum(part.rows for part in self.state.parts()):,} rows in files")
                    self.state.begin()
        if last is not None:
            self._checkpoint(last)
        else:
            self.state.commit()

    async def _trajectories(self) -> AsyncGenerator[tuple[Planned, Trajectory], None]:
        """In the plan's order; the next few are read while one is written."""
        waiting: deque[tuple[Planned, asyncio.Task[Trajectory]]] = deque()
        todo = self.state.todo()
        try:
            while True:
                for planned in islice(todo, AHEAD - len(waiting)):
                    waiting.append((planned, asyncio.create_task(self.maker.trajectory(self.store, planned.facts))))
                if not waiting:
                    return
                planned, task = waiting.popleft()
                yield planned, await task
        finally:
            for _, task in waiting:
                task.cancel()

    def _checkpoint(self, last: Planned) -> None:
        """Ends all parts, then tells the state."""
        for writer in self.writers.values():
            self.state.add_part(writer.finish())
            self.numbers[writer.split] = writer.number + 1
        self.writers.clear()
        self.state.done(last.facts)
        self.state.set_meta(sampled=str(self.sampled))
        self.state.commit()

    def _session(self, planned: Planned, trajectory: Trajectory) -> None:
        self.sampled += trajectory.sampled
        for line in trajectory.ledger:
            self.state.count_ledger(line.reason, line.tokens)
        written = 0
        for trace in trajectory.traces:
            reason = self._refused(trace) or self._write(trace, planned)
            if reason is not None:
                self.state.drop_row(reason, trace.trained)
            else:
                written += 1
        for model in trajectory.builder["models"] if written else ():
            self.state.count_model(orjson.dumps(model, option=orjson.OPT_SORT_KEYS))

    def _refused(self, trace: Trace) -> str | None:
        spec = self.spec
        if not trace.trained:
            return EMPTY
        if not trace.faithful and not spec.unfaithful:
            return UNFAITHFUL
        if spec.roles and trace.role not in spec.roles:
            return ROLE
        if trace.reward is None and not spec.keep_unrewarded:
            return NO_REWARD
        if trace.reward is not None and spec.min_reward is not None and trace.reward < spec.min_reward:
            return BELOW
        if spec.max_tokens is not None and len(trace) > spec.max_tokens:
            return LONG
        return None

    def _write(self, trace: Trace, planned: Planned) -> str | None:
        """Writes the trace as a row of its split; a reason if it may not stand there."""
        try:
            row = make(self.spec.form, self.spec.file_format, trace, planned.facts)
        except Unfit as unfit:
            return str(unfit)
        if self.spec.is_split and not self.spec.allow_shared_prompts and not self.state.may_stand_in(row.prompt, planned.split):
            return LEAK
        if self.spec.deduplicate and not self.state.is_new(row.content):
            return DUPLICATE
        writer = self.writers.get(planned.split)
        if writer is None:
            number = self.numbers.get(planned.split, 0)
            writer = WRITERS[self.spec.file_format](self.folder, self.spec.form, planned.split, number)
            self.writers[planned.split] = writer
        writer.add(row)
        self.state.count_row(planned.split, len(trace.messages), len(trace.spans), len(trace), trace.trained)
        return None
