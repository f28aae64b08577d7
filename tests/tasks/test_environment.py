"""Which sandbox a task gets from each backend, and which it cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.runtime.spec import RuntimeSpec, Step
from polar.tasks.environment import plain_steps, runtime_for
from polar.tasks.manifest import Environment

COPIES = r"""FROM docker.io/library/python:3.12-slim AS base
# note
WORKDIR /app
ENV MODE=fast \
    NAME="two words"
COPY data /app/input
COPY one.txt ./
COPY ["one.txt", "b.txt"]
CMD ["sh"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "environment").mkdir()
    return tmp_path


def put(folder: Path, name: str, text: str = "x") -> None:
    path = folder / "environment" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def made(folder: Path, base: RuntimeSpec, *, plain: bool = False, **environment: Any) -> RuntimeSpec:
    return runtime_for("name", folder, Environment(**environment), base, plain=plain)


def steps(spec: RuntimeSpec) -> list[tuple[str | None, ...]]:
    return [(step.type, step.source or step.command, step.target) for step in spec.prepare]


@pytest.mark.parametrize("backend", ["local", "bubblewrap", "docker", "apptainer"])
def test_a_plain_tasks_files_go_to_the_work_folder_of_any_sandbox(backend: str, folder: Path) -> None:
    put(folder, "files/a.txt")
    put(folder, "Dockerfile", "FROM x\nRUN build\n")
    spec = made(folder, RuntimeSpec(backend=backend), plain=True)
    assert steps(spec) == [("upload_dir", "environment/files", ".")]
    assert (spec.image, spec.build_context) == (None, None)


def test_a_setup_script_runs_and_leaves_nothing(folder: Path) -> None:
    put(folder, "setup.sh")
    assert steps(made(folder, RuntimeSpec(), plain=True)) == [
        ("upload_dir", "environment", ".polar-environment"),
        ("exec", "sh .polar-environment/setup.sh && rm -rf .polar-environment", None),
    ]


def test_a_task_that_does_not_say_it_is_plain_is_not_taken_for_it(folder: Path) -> None:
    put(folder, "files/a.txt")
    put(folder, "Dockerfile", "FROM debian\nRUN build\n")
    with pytest.raises(ConfigError, match="needs its image"):
        made(folder, RuntimeSpec())
    assert made(folder, RuntimeSpec(backend="docker")).build_context is not None


def test_docker_builds_the_image(folder: Path) -> None:
    put(folder, "Dockerfile", "FROM x\nRUN build\n")
    spec = made(folder, RuntimeSpec(backend="docker"), cpus=2, memory_mb=512, workdir="/app")
    assert spec.build_context == str((folder / "environment").resolve())
    assert (spec.cpus, spec.memory_mb, spec.workdir, spec.prepare) == (2, 512, "/app", [])


def test_an_image_that_the_task_names_is_used(folder: Path) -> None:
    spec = made(folder, RuntimeSpec(backend="docker"), docker_image="org/image:1")
    assert (spec.image, spec.build_context) == ("org/image:1", None)


def test_a_given_image_wins_and_gets_the_files(folder: Path) -> None:
    put(folder, "files/a.txt")
    put(folder, "Dockerfile", "FROM debian:12\nWORKDIR /app\nCOPY files/ .\n")
    spec = made(folder, RuntimeSpec(backend="docker", image="base"), docker_image="org/image:1")
    assert spec.image == "base"
    assert steps(spec) == [("upload_dir", "environment/files", ".")]


def test_an_image_for_each_task_is_ready_as_it_is(folder: Path) -> None:
    put(folder, "Dockerfile", "FROM x\nRUN build\n")
    spec = made(folder, RuntimeSpec(backend="docker", image="registry/{task}:1"))
    assert (spec.image, spec.prepare) == ("registry/name:1", [])


def test_what_the_caller_says_wins(folder: Path) -> None:
    base = RuntimeSpec(backend="docker", cpus=4, workdir="/mine", env={"A": "caller"})
    spec = made(folder, base, cpus=1, workdir="/theirs", env={"A": "task", "B": "task"}, docker_image="i")
    assert (spec.cpus, spec.workdir, spec.env) == (4, "/mine", {"A": "caller", "B": "task"})


def test_sizes_mean_nothing_without_containers(folder: Path) -> None:
    spec = made(folder, RuntimeSpec(backend="bubblewrap"), cpus=1, memory_mb=512, storage_mb=99, gpus=1, workdir="/app")
    assert (spec.cpus, spec.memory_mb, spec.storage_mb, spec.gpus, spec.workdir) == (None,) * 5


def test_the_callers_steps_come_last_in_both_sandboxes(folder: Path) -> None:
    put(folder, "files/a.txt")
    own = Step(type="exec", command="mine")
    spec = made(folder, RuntimeSpec(prepare=[own], eval_prepare=[own]))
    assert spec.eval_prepare is not None
    assert [step.type for step in spec.prepare] == [step.type for step in spec.eval_prepare] == ["upload_dir", "exec"]


def test_a_dockerfile_that_only_copies_is_translated(folder: Path) -> None:
    put(folder, "data/x.csv")
    put(folder, "one.txt")
    put(folder, "Dockerfile", COPIES)
    spec = made(folder, RuntimeSpec())
    assert steps(spec) == [
        ("upload_dir", "environment/data", "input"),
        ("upload_file", "environment/one.txt", "one.txt"),
        ("upload_file", "environment/one.txt", "b.txt"),
    ]
    assert spec.env == {"MODE": "fast", "NAME": "two words"}


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get install -y x",
        "COPY one.txt /etc/x",
        "COPY *.txt ./",
        "COPY --from=y a b",
        "ADD http://x/y .",
        "COPY ../x .",
        "USER me",
        "FROM postgres:16",
    ],
)
def test_any_other_dockerfile_needs_its_image(line: str, folder: Path) -> None:
    put(folder, "one.txt")
    put(folder, "Dockerfile", f"FROM debian\nWORKDIR /app\n{line}\n")
    for base in (RuntimeSpec(), RuntimeSpec(backend="apptainer"), RuntimeSpec(backend="docker", image="base")):
        with pytest.raises(ConfigError, match="needs its image"):
            made(folder, base)


def test_several_containers_are_refused(folder: Path) -> None:
    put(folder, "docker-compose.yaml")
    with pytest.raises(ConfigError, match="docker-compose"):
        made(folder, RuntimeSpec(backend="docker"))


def test_loose_files_without_a_dockerfile_go_to_the_work_folder(folder: Path) -> None:
    put(folder, "a.txt")
    assert [(step.source, step.target) for step in plain_steps("name", folder / "environment").steps] == [("environment", ".")]
