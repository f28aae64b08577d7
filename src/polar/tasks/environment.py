"""What sandbox a Harbor task runs in: its image, or the files and commands that make a plain sandbox ready for it.

A task is *plain* if it says so (`plain = true` in `[metadata.polar]`): then `environment/files/` is copied into the work folder and
`environment/setup.sh` run there, in any sandbox that has a shell, Python and git; its Dockerfile is for others. Any other task with a
Dockerfile is built where the backend builds images. Elsewhere, and in an image that the caller gives, a Dockerfile that only copies files
onto a general-purpose base is translated; any other task needs its own image, and says so. Knows no evaluator and no agent.
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

_INERT = frozenset({"LABEL", "CMD", "ENTRYPOINT", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "SHELL"})
_BASES = frozenset({"alpine", "bash", "buildpack-deps", "busybox", "debian", "python", "scratch", "ubuntu"})
"""Images that a task builds on without meaning anything that a plain sandbox lacks."""
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True)
class Plain:
    """How a plain sandbox becomes the task's. `env` is what its Dockerfile sets."""

    steps: tuple[Step, ...]
    env: dict[str, str]


def runtime_for(name: str, folder: Path, environment: Environment, base: RuntimeSpec, *, plain: bool = False) -> RuntimeSpec:
    """The task's sandbox: what `base` says wins, the task fills in the rest. Raises `ConfigError` where the backend cannot have it. Of a
    `base` that names no backend, which only the node will know, the task says its image or its steps, and no sizes.

    `{task}` in the image's name becomes the task's, for sets with an image a task.
    """
    context = folder / "environment"
    if any((context / one).is_file() for one in _COMPOSE):
        raise ConfigError(f"task {name}: its environment is several containers (docker-compose), which no runtime here makes")
    host = base.names_backend and base.import_path is None and base.backend in HOST_BACKENDS
    changes: dict[str, Any] = {}
    if not host and base.names_backend:
        sizes = {"cpus": environment.cpus, "memory_mb": environment.memory_mb, "gpus": environment.gpus or None}
        changes |= {key: value for key, value in sizes.items() if value is not None and getattr(base, key) is None}
        if environment.workdir and base.workdir is None:
            changes["workdir"] = environment.workdir
    env = dict(environment.env)
    ready: Plain | None = None
    dockerfile = context / "Dockerfile"
    if base.image is not None and "{task}" in base.image:
        changes["image"] = base.image.replace("{task}", name)
    elif plain or host or base.image is not None or base.build_context is not None:
        ready = plain_steps(name, context, plain=plain)
    elif environment.docker_image is not None:
        changes["image"] = environment.docker_image
        ready = None if dockerfile.is_file() else plain_steps(name, context)
    elif base.backend in BUILDERS and dockerfile.is_file():
        changes["build_context"] = str(context.resolve())
    else:
        ready = plain_steps(name, context)
    steps: tuple[Step, ...] = ()
    if ready is not None:
        steps, env = ready.steps, {**ready.env, **env}
    for field, value in (("env", {**env, **base.env}), ("prepare", [*steps, *base.prepare])):
        if value:
            changes[field] = value
    if base.eval_prepare is not None:
        changes["eval_prepare"] = [*steps, *base.eval_prepare]
    return base.model_copy(update=changes)


def plain_steps(name: str, context: Path, *, plain: bool = False) -> Plain:
    """How a sandbox without the task's image becomes the task's. Raises `ConfigError` where only an image will do."""
    files, setup, dockerfile = context / "files", context / "setup.sh", context / "Dockerfile"
    if not plain and dockerfile.is_file():
        return _translated(name, context, dockerfile.read_text(encoding="utf-8"))
    steps: list[Step] = []
    if not plain and not setup.is_file() and not files.is_dir():
        if context.is_dir() and any(context.iterdir()):
            steps.append(Step(type="upload_dir", source="environment", target="."))
        return Plain(tuple(steps), {})
    if files.is_dir():
        steps.append(Step(type="upload_dir", source="environment/files", target="."))
    if setup.is_file():
        steps.append(Step(type="upload_dir", source="environment", target=STAGED))
        steps.append(Step(type="exec", command=f"sh {STAGED}/setup.sh && rm -rf {STAGED}"))
    return Plain(tuple(steps), {})


def _translated(name: str, context: Path, dockerfile: str) -> Plain:
    """A Dockerfile that only copies files, as steps."""

    def needs_image(why: str) -> ConfigError:
        hint = "Use docker, which builds it, or give an image with {task} in its name, ready for each task"
        return ConfigError(f"task {name} needs its image: {why}. {hint}")

    lines = list(_instructions(dockerfile))
    workdirs = [arguments for word, arguments in lines if word == "WORKDIR"]
    final = _joined(PurePosixPath("/"), workdirs)
    current = PurePosixPath("/")
    env: dict[str, str] = {}
    steps: list[Step] = []
    for word, arguments in lines:
        if word in _INERT:
            continue
        if word == "FROM":
            image = arguments.split()[0].partition("@")[0].rpartition("/")[2].partition(":")[0] if arguments else ""
            if image not in _BASES:
                raise needs_image(f"its Dockerfile builds on {arguments}")
            continue
        if word == "WORKDIR":
            current = current / arguments
        elif word == "ENV" and "$" not in arguments:
            env |= _variables(arguments)
        elif word in ("COPY", "ADD"):
            parts = _copied(arguments)
            if parts is None:
                raise needs_image(f"its Dockerfile says {word} {arguments}")
            source, target = parts[0].rstrip("/") or ".", parts[1]
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
