"""What settings name has to be there, and recorded groups have to fit the run: said before anything is trained. Knows no torch.

<folder>/recorded.txt   a line a group that a run on recorded groups began with: a digest of its sessions and their rewards
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from polar.errors import ConfigError
from polar.train.config import TrainConfig
from polar.train.groups import Group

DIGESTS = "recorded.txt"


def check(config: TrainConfig) -> None:
    """Raises `ConfigError` for a path without a model, a file that is not there, an engine or a runtime that nobody knows."""
    from polar.engines import registered as engines
    from polar.runtime import named

    _check_model(config)
    if config.recorded is not None and not Path(config.recorded).is_file():
        raise ConfigError(f"recorded: there is no file {config.recorded}")
    if not config.live:
        return
    if config.engine.kind not in engines():
        raise ConfigError(f"engine.kind: {config.engine.kind!r} is not known; there are {', '.join(engines())}")
    runtime = config.rollout.runtime
    if runtime.import_path is None:
        named(runtime.backend)


def _check_model(config: TrainConfig) -> None:
    from polar.engine.models import known_models

    name = config.model.name
    if name in known_models() or (Path(name).expanduser() / "config.json").is_file():
        return
    if name.startswith(("/", "./", "../", "~")) or Path(name).exists():
        raise ConfigError(f"model: {name} is no folder with a config.json")
    if config.live and config.engine.embedded and config.rollout.url is None:
        meant = difflib.get_close_matches(name, list(known_models()), 1)
        hint = f"is {meant[0]} meant?" if meant else "download it first"
        raise ConfigError(f"model: {name} is no folder here, and the embedded engine loads nothing from elsewhere: {hint}")


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
    making.write_text("".join(f"{line}\n" for line in now))
    making.replace(path)


def _digest(group: Group) -> str:
    digest = hashlib.sha256()
    for result in group.results:
        digest.update(f"{result.session_id}\0{result.outcome}\0{result.reward}\n".encode())
    return digest.hexdigest()[:16]
