"""task.toml: every schema's spelling, what is unknown is named, what is wrong is refused by its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.tasks.manifest import Manifest, megabytes, read


def manifest(tmp_path: Path, text: str) -> Manifest:
    path = tmp_path / "task.toml"
    path.write_text(text)
    return read(path)


def test_an_empty_file_has_harbors_defaults(tmp_path: Path) -> None:
    found = manifest(tmp_path, "")
    assert (found.agent.timeout_sec, found.verifier.timeout_sec, found.environment.build_timeout_sec) == (600, 600, 600)
    assert found.warnings == ()


def test_schema_1_0_sizes(tmp_path: Path) -> None:
    found = manifest(tmp_path, 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\ncpus = 2\n')
    assert (found.environment.memory_mb, found.environment.storage_mb, found.environment.cpus) == (2048, 512, 2)
    assert found.warnings == ()


def test_the_present_schema(tmp_path: Path) -> None:
    found = manifest(
        tmp_path,
        """
schema_version = "1.4"
artifacts = ["/app/out"]
[task]
name = "org/task"
[environment]
docker_image = "image:tag"
workdir = "/app"
network_mode = "no-network"
[verifier]
environment_mode = "separate"
[verifier.environment]
memory_mb = 100
[[verifier.collect]]
command = "dump"
""",
    )
    assert found.environment.docker_image == "image:tag"
    assert found.verifier.environment is not None
    assert found.verifier.environment.memory_mb == 100
    assert [hook.command for hook in found.verifier.collect] == ["dump"]
    assert found.warnings == ()


def test_unknown_keys_are_named_with_their_tables_and_tolerated(tmp_path: Path) -> None:
    found = manifest(tmp_path, "novel = 1\n[environment]\nskills_dir = '/x'\n[agent]\ntemperature = 0\n")
    assert found.warnings == tuple(f"task.toml: {key} is not heeded" for key in ("novel", "agent.temperature", "environment.skills_dir"))


@pytest.mark.parametrize("line", ["allow_internet = true", 'network_mode = "public"', 'network_mode = "allowlist"'])
def test_a_task_does_not_give_itself_the_internet(line: str, tmp_path: Path) -> None:
    assert any("allow_internet" in warning for warning in manifest(tmp_path, f"[environment]\n{line}\n").warnings)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[agent]\ntimeout_sec = 'soon'\n", "agent.timeout_sec"),
        ("[environment]\nmemory = 'lots'\n", "environment.memory_mb"),
        ("[verifier]\nenvironment_mode = 'other'\n", "verifier.environment_mode"),
        ("[metadata.polar]\nnoop = 1\n", "polar.noop"),
        ("= nothing", r"task\.toml"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(text: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        manifest(tmp_path, text)


def test_polars_own_table(tmp_path: Path) -> None:
    found = manifest(tmp_path, '[metadata.polar]\nnoop_reward = 0.25\n[metadata.polar.evaluator]\nstrategy = "command"\n')
    assert found.polar.noop_reward == 0.25
    assert found.polar.evaluator is not None
    assert found.polar.evaluator.strategy == "command"


@given(
    number=st.integers(0, 10**6),
    unit=st.sampled_from([("", 1), ("M", 1), ("MB", 1), ("Mi", 1), ("g", 1024), ("GiB", 1024), ("T", 1024**2)]),
)
def test_sizes_are_in_mebibytes(number: int, unit: tuple[str, int]) -> None:
    assert megabytes(f"{number}{unit[0]}") == number * unit[1]


@given(st.one_of(st.integers(), st.booleans(), st.none(), st.text(alphabet="xyz:-", min_size=1)))
def test_what_is_no_size_is_left_for_the_field_to_refuse(value: object) -> None:
    assert megabytes(value) == value
