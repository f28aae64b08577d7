"""What sandbox a Harbor task runs in: its image, or the files and commands that make a plain sandbox ready for it.

A task with a Dockerfile is built where the backend builds images. Everywhere else, and where an image is given, a task is *plain* if its
environment is files: `environment/files/`, copied into the work folder; `environment/setup.sh`, run there; or a Dockerfile that
does nothing but copy files to where the agent works. Any other task needs its image, and says so. Knows no evaluator and no agent.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from polar.errors import ConfigError
from polar.runtime.spec import RuntimeSpec, Step
from polar.tasks.manifest import Environment

STAGED = ".polar-environment"
"""Where `environment/` lies in the work folder while `setup.sh` runs; it is gone afterwards."""
HOST_BACKENDS = frozenset({"local", "bubblewrap", "bwrap", "fake"})
"""Backends without images: sizes of a task's container mean nothing to them."""
BUILDERS = frozenset({"docker", "podman"})

_INERT = frozenset({"FROM", "LABEL", "CMD", "ENTRYPOINT", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "SHELL"})
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True)
class Plain:
    """How a plain sandbox becomes the task's. `env` is what its Dockerfile sets."""

    steps: tuple[Step, ...]
    env: dict[str, str]


def runtime_for(name: str, folder: Path, environment: Environment, base: RuntimeSpec) -> RuntimeSpec:
    """The task's sandbox: what `base` says wins, the task fills in the rest. Raises `ConfigError` where the backend cannot have it.

    `{task}` in the image's name becomes the task's, for sets with an image a task.
    """
    context = folder / "environment"
    if any((context / one).is_file() for one in _COMPOSE):
        raise ConfigError(f"task {name}: its environment is several containers (docker-compose), which no runtime here makes")
    host = base.import_path is None and base.backend in HOST_BACKENDS
    changes: dict[str, Any] = {}
    if not host:
        sizes = {"cpus": environment.cpus, "memory_mb": environment.memory_mb, "gpus": environment.gpus or None}
        changes |= {key: value for key, value in sizes.items() if value is not None and getattr(base, key) is None}
        if environment.workdir and base.workdir is None:
            changes["workdir"] = environment.workdir
    env = dict(environment.env)
    steps: tuple[Step, ...] = ()
    dockerfile = context / "Dockerfile"
    if base.image is not None or base.build_context is not None or host:
        if base.image is not None:
            changes["image"] = base.image.replace("{task}", name)
        if base.image is None or "{task}" not in base.image:
            plain = plain_steps(name, context)
            steps, env = plain.steps, {**plain.env, **env}
    elif environment.docker_image is not None:
        changes["image"] = environment.docker_image
        if not dockerfile.is_file():
            steps = plain_steps(name, context).steps
    elif base.backend in BUILDERS and dockerfile.is_file():
        changes["build_context"] = str(context.resolve())
    else:
        steps = plain_steps(name, context).steps
    changes["env"] = {**env, **base.env}
    changes["prepare"] = [*steps, *base.prepare]
    if base.eval_prepare is not None:
        changes["eval_prepare"] = [*steps, *base.eval_prepare]
    return base.model_copy(update=changes)


def plain_steps(name: str, context: Path) -> Plain:
    """Raises `ConfigError` where only an image will do."""
    files, setup, dockerfile = context / "files", context / "setup.sh", context / "Dockerfile"
    steps: list[Step] = []
    if files.is_dir() or setup.is_file():
        if files.is_dir():
            steps.append(Step(type="upload_dir", source=_source(files), target="."))
        if setup.is_file():
            steps.append(Step(type="upload_dir", source=_source(context), target=STAGED))
            steps.append(Step(type="exec", command=f"sh {STAGED}/setup.sh && rm -rf {STAGED}"))
        return Plain(tuple(steps), {})
    if not dockerfile.is_file():
        if context.is_dir() and any(context.iterdir()):
            steps.append(Step(type="upload_dir", source=_source(context), target="."))
        return Plain(tuple(steps), {})
    return _translated(name, context, dockerfile.read_text(encoding="utf-8"))


def _source(path: Path) -> str:
    """As `task_folder` is written: `prepare` resolves it there, on whichever node runs the task."""
    return path.name if path.parent.name != "environment" else f"environment/{path.name}"


def _translated(name: str, context: Path, dockerfile: str) -> Plain:
    """A Dockerfile that only copies files, as steps."""

    def needs_image(why: str) -> ConfigError:
        return ConfigError(f"task {name} needs its image: {why}. Use a docker runtime, or give an image that has it")

    lines = list(_instructions(dockerfile))
    workdirs = [arguments for word, arguments in lines if word == "WORKDIR"]
    final = _joined(PurePosixPath("/"), workdirs)
    current = PurePosixPath("/")
    env: dict[str, str] = {}
    steps: list[Step] = []
    for word, arguments in lines:
        if word in _INERT:
            continue
        if word == "WORKDIR":
            current = current / arguments
        elif word == "ENV" and "$" not in arguments:
            env |= _variables(arguments)
        elif word in ("COPY", "ADD"):
            parts = _copied(arguments)
            if parts is None:
                raise needs_image(f"its Dockerfile says {word} {arguments}")
            source, target = parts
            to = current / target
            path = context / source
            if not workdirs or not to.is_relative_to(final) or ".." in to.parts or ".." in PurePosixPath(source).parts or not path.exists():
                raise needs_image(f"its Dockerfile puts {source} to {to}, outside of the work folder {final}")
            inside = to.relative_to(final)
            if path.is_dir():
                steps.append(Step(type="upload_dir", source=f"environment/{source}", target=str(inside)))
            else:
                inside = inside / path.name if target.endswith("/") or target in (".", "./") or inside == PurePosixPath(".") else inside
                steps.append(Step(type="upload_file", source=f"environment/{source}", target=str(inside)))
        else:
            raise needs_image(f"its Dockerfile says {word} {arguments}"[:120])
    return Plain(tuple(steps), env)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """A Dockerfile's instructions, continued lines joined, comments left out."""
    line = ""
    for raw in text.splitlines():
        stripped = raw.strip()
        if not stripped or stripped.startswith("#"):
            continue
        line += stripped.removesuffix("\\")
        if stripped.endswith("\\"):
            continue
        word, _, arguments = line.strip().partition(" ")
        yield word.upper(), arguments.strip()
        line = ""


def _joined(start: PurePosixPath, parts: list[str]) -> PurePosixPath:
    for part in parts:
        start = start / part
    return start


def _copied(arguments: str) -> tuple[str, str] | None:
    """Source and target of a COPY of one path; `None` for anything cleverer."""
    try:
        words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
    except ValueError:
        return None
    if len(words) != 2 or any(
        not isinstance(word, str) or word.startswith("--") or set(word) & set("*?[$") or "://" in word for word in words
    ):
        return None
    return words[0], words[1]


def _variables(arguments: str) -> dict[str, str]:
    """`ENV a=1 b="two words"`, and the old form `ENV a two words`."""
    first, _, rest = arguments.partition(" ")
    if "=" not in first:
        return {first: rest.strip()}
    return dict(word.split("=", 1) for word in shlex.split(arguments) if "=" in word)
