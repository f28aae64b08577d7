"""What settings name has to be there, and recorded groups have to fit the run: said before anything is trained. Knows no torch.

<folder>/recorded.txt   a line a group that a run on recorded groups began with: a digest of its sessions and their rewards
<folder>/tasks.txt      a line a task that a live run began with: a digest of its content, its split and its name
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from polar.errors import ConfigError
from polar.runtime.folder_hash import folder_hash
from polar.runtime.spec import RuntimeSpec
from polar.tasks import AnyTask
from polar.tokens.tokenizer import load_tokenizer
from polar.train.config import TrainConfig
from polar.train.disk import saving
from polar.train.groups import Group
from polar.train.metrics import check_writers
from polar.train.place import check_place, is_hub_name, not_of_the_model, place_of, vocabulary_of
from polar.train.settings import setting

DIGESTS, TASKS = "recorded.txt", "tasks.txt"
BEGUN = ("checkpoints", "evaluations", "rollout")
"""What there is of a run that may have asked for sessions, here or at a service elsewhere (`polar.train.world`)."""


def check(config: TrainConfig) -> None:
    """Raises `ConfigError` for a model or a file that is not there, metrics without their library, an engine or a runtime that nobody
    knows."""
    from polar.engines import registered as engines
    from polar.runtime import named

    _check_model(config)
    check_writers(config.metrics)
    if config.recorded is not None and not Path(config.recorded).is_file():
        raise ConfigError(f"recorded: there is no file {config.recorded}")
    if not config.live:
        return
    if config.engine.kind not in engines():
        raise ConfigError(f"engine.kind: {config.engine.kind!r} is not known; there are {', '.join(engines())}")
    runtime = config.rollout.runtime
    if runtime.import_path is None:
        with setting("rollout.runtime"):
            named(runtime.backend)


def _check_model(config: TrainConfig) -> None:
    from polar.engine.models import known_models

    name, known = config.model.name, known_models()
    if name in known:
        return
    meant = difflib.get_close_matches(name, list(known), 1)
    hint = f"is {meant[0]} meant?" if meant else ""
    if is_hub_name(name) and config.live and config.engine.embedded and config.rollout.url is None:
        raise ConfigError(
            f"model: {name} is no folder here, and the embedded engine loads nothing from elsewhere: {hint or 'download it first'}"
        )
    with setting("model"):
        try:
            check_place(name)
        except ConfigError as error:
            raise ConfigError(f"{error}; {hint}" if hint else str(error)) from error


def check_recorded(config: TrainConfig, groups: Sequence[Group]) -> None:
    """Raises `ConfigError` where recorded groups hold ids of another tokenizer than the model's, as far as that can be told."""
    base = Path(place_of(config.model.name))
    if config.gate.rows and config.gate.action == "stop" and (base / "tokenizer.json").is_file():
        check_tokenizer(groups, load_tokenizer(base).hash)
    vocabulary = vocabulary_of(base)
    if vocabulary is not None:
        check_ids(groups, vocabulary)


def check_ids(groups: Sequence[Group], vocabulary: int) -> None:
    """Raises `ConfigError` for an id that the model does not have. What is no trajectory is left to who reads it."""
    for group in groups:
        for result in group.results:
            for number, row in enumerate((result.trajectory or {}).get("traces") or ()):
                ids = chain(row.get("prompt_ids") or (), row.get("response_ids") or ())
                beyond = next((one for one in ids if isinstance(one, int) and not 0 <= one < vocabulary), None)
                if beyond is not None:
                    raise ConfigError(f"recorded: session {result.session_id}, row {number}: {not_of_the_model(beyond, vocabulary)}")


def check_tokenizer(groups: Sequence[Group], tokenizer_hash: str) -> None:
    """Raises `ConfigError` where a session says that its ids are of another tokenizer."""
    for group in groups:
        for result in group.results:
            theirs = ((result.metadata.get("run") or {}).get("engine") or {}).get("tokenizer_hash")
            if theirs is not None and theirs != tokenizer_hash:
                raise ConfigError(
                    f"recorded: session {result.session_id} holds ids of another tokenizer than the model's ({theirs[:12]}, "
                    f"{tokenizer_hash[:12]}). If it is the same and was only saved anew: gate.rows 0"
                )


def check_groups(folder: Path, groups: Sequence[Group], taken: int) -> None:
    """That the first `taken` groups are still those that the run in `folder` has trained on; what comes behind may have changed, and is
    noted. Raises `ConfigError`."""
    path, now = folder / DIGESTS, [_digest(group) for group in groups]
    if path.is_file() and path.read_text().split()[:taken] != now[:taken]:
        raise ConfigError(f"recorded: the first {taken} groups, which the run has trained on, are not in the file any more as they were")
    making = path.with_name(f".{DIGESTS}.{os.getpid()}")
    with saving("the groups' digests", folder):
        making.write_text("".join(f"{line}\n" for line in now))
        making.replace(path)


def check_tasks(folder: Path, tasks: Sequence[AnyTask], runtime: RuntimeSpec) -> list[str]:
    """The names of those that were edited since the run in `folder` began, which is then noted. Raises `ConfigError` where they are not
    the same ones in the same order: the number of a group, or of a part of an evaluation, would mean another task."""
    path, now = folder / TASKS, [f"{_digest_of(task, runtime)} {task.split} {task.name}" for task in tasks]
    before = path.read_text().splitlines() if path.is_file() else []
    if not any((folder / name).exists() for name in BEGUN):
        before = []
    names, earlier = ([line.partition(" ")[2] for line in lines] for lines in (now, before))
    if before and names != earlier:
        new, gone = ([one.partition(" ")[2] for one in some if one not in others] for some, others in ((names, earlier), (earlier, names)))
        what = "; ".join(f"{word}: {', '.join(some[:5])}" for word, some in (("new", new), ("gone", gone)) if some)
        raise ConfigError(f"tasks: they are not those that the run in {folder} began with ({what or 'their order'}); name another output")
    with saving("the tasks' digests", folder):
        making = path.with_name(f".{TASKS}.{os.getpid()}")
        making.write_text("".join(f"{line}\n" for line in now))
        making.replace(path)
    return [task.name for task, line in zip(tasks, now, strict=True) if before and line not in before]


def _digest_of(task: AnyTask, runtime: RuntimeSpec) -> str:
    """Of what it says and of its files; of its sandbox only the image, for where it runs may change."""
    fields = task.fields(runtime)
    spec, place = fields.pop("runtime", None), fields.get("task_folder")
    if place is not None:
        return folder_hash(Path(place))
    image = spec.image if isinstance(spec, RuntimeSpec) else None
    said = orjson.dumps({**fields, "image": image}, default=_plain, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.sha256(said).hexdigest()[:24]


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _digest(group: Group) -> str:
    digest = hashlib.sha256()
    for result in group.results:
        digest.update(f"{result.session_id}\0{result.outcome}\0{result.reward}\n".encode())
    return digest.hexdigest()[:16]
