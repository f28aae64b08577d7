"""Where tasks come from: the bundled sets by name, and any Harbor folder or file of tasks by path. Knows no sandbox and no agent.

A source is a set (`demo`, `coding`, `swe`, `all`), a task of one (`coding/lru-cache`, or `lru-cache` alone), a Harbor task folder, a folder
of them at any depth, or a file: `.jsonl` or `.json` with lines of tasks or SWE-bench instances, `.parquet` with instances. Several are
separated by commas.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.errors import ConfigError
from polar.tasks import harbor
from polar.tasks.harbor import BUNDLED, Split
from polar.tasks.instances import Instance
from polar.tasks.lines import Line
from polar.tasks.request import AnyTask
from polar.trajectory.text import well_formed

DEPTH = 6
"""How far below a folder its tasks may lie."""
FILES = (".jsonl", ".json", ".parquet")
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks with a name. Reading them raises `ConfigError`."""

    name: str
    description: str
    folders: tuple[Path, ...]

    def tasks(self) -> list[AnyTask]:
        return [task for folder in self.folders for task in harbor.load_all(folder)]


_CODING, _SWE = _HERE / "bundled_coding", _HERE / "bundled_swe"
SETS: Mapping[str, TaskSet] = {
    one.name: one
    for one in (
        TaskSet("demo", "one-line file tasks, within reach of the bundled tiny model", (BUNDLED,)),
        TaskSet("coding", "small programs to write or to mend, some with partial credit", (_CODING,)),
        TaskSet("swe", "small repositories with a real bug, as in SWE-bench", (_SWE,)),
        TaskSet("all", "all of these", (BUNDLED, _CODING, _SWE)),
    )
}
"""The bundled sets."""


def find(source: str, *, only: Sequence[str] = (), split: Split | None = None, limit: int | None = None) -> list[AnyTask]:
    """The tasks of one or several sources, in their order. `only` names some of them, `limit` takes so many of what is left. Raises
    `ConfigError` where there are none, and where two have the same name."""
    parts = [source] if Path(source).exists() else [part.strip() for part in source.split(",") if part.strip()]
    if not parts:
        raise ConfigError("name a task set, a task or a path")
    found = [task for part in parts for task in _read(part)]
    names = [task.name for task in found]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(f"{source}: several tasks are called {', '.join(twice[:5])}")
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ConfigError(f"{source} has no task {', '.join(unknown)}; it has: {_listed(names)}")
    chosen = [task for task in found if (not only or task.name in only) and (split is None or task.split == split)]
    if not chosen:
        raise ConfigError(f"{source} has no task" + (f" of the split {split}" if split else ""))
    return chosen[:limit]


def _read(part: str) -> list[AnyTask]:
    if part in SETS:
        return SETS[part].tasks()
    path = Path(part)
    if path.exists():
        return list(read_file(path)) if path.is_file() else list(read_folder(path))
    set_name, slash, name = part.partition("/")
    tasks = SETS[set_name].tasks() if slash and set_name in SETS else SETS["all"].tasks()
    wanted = name if slash and set_name in SETS else part
    chosen = [task for task in tasks if task.name == wanted]
    if not chosen:
        meant = difflib.get_close_matches(part, [*SETS, *(task.name for task in tasks)], 1)
        hint = f"; is {meant[0]} meant?" if meant else ""
        raise ConfigError(
            f"{part!r} is neither a path, nor a task set ({', '.join(SETS)}), nor a bundled task (`polar tasks list all`){hint}"
        )
    return chosen


def read_folder(folder: Path) -> Iterator[AnyTask]:
    """The Harbor task in a folder, or all below it, by path. Hidden folders and links are not entered; a file `instances.jsonl` or the
    like is not looked for."""
    found = [one.parent for one in _manifests(folder, DEPTH)]
    if not found:
        raise ConfigError(f"{folder}: no task.toml there or below")
    for one in found:
        yield harbor.load(one)


def _manifests(folder: Path, depth: int) -> Iterator[Path]:
    manifest = folder / "task.toml"
    if manifest.is_file():
        yield manifest
    elif depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _manifests(child, depth - 1)


def read_file(path: Path) -> Iterator[AnyTask]:
    """The tasks of a file. Raises `ConfigError` with the line that is wrong."""
    if path.suffix not in FILES:
        raise ConfigError(f"{path}: tasks are in a folder or in a file that ends in {', '.join(FILES)}")
    for number, row in enumerate(_rows(path), 1):
        line, value = row
        where = f"{path}:{line}"
        value = well_formed(value)
        if isinstance(value, dict) and "instance_id" in value and "problem_statement" in value:
            yield Instance(value, where)
        else:
            yield Line.read(value, where, f"{path.stem}-{number}")


def _rows(path: Path) -> Iterable[tuple[int, Any]]:
    """Line or position, and the value there."""
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        if isinstance(value, dict) and not {"instruction", "prompt", "instance_id"} & value.keys():
            value = list(value.values())
        return enumerate(value if isinstance(value, list) else [value], 1)
    return _json_lines(path, text)


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet takes pyarrow: pip install 'polar-rl[export]'") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    yield from enumerate(table.to_pylist(), 1)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
