"""The apptainer backend against a stand-in for its program, which checks the command lines; for real only where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apptainer_fake
import pytest

from polar.errors import ConfigError, SandboxError
from polar.runtime import Left, MountSpec, Owner, Place, RuntimeSpec, processes
from polar.runtime.apptainer import ApptainerRuntime


@dataclass
class Fake:
    """The stand-in's folder, and sandboxes that use it."""

    state: Path
    owner: Owner

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "calls.jsonl").read_text().splitlines()]

    def argv(self, *begin: str) -> list[str]:
        """The arguments of the last call that begins so."""
        return next(one["argv"] for one in reversed(self.calls) if one["argv"][: len(begin)] == list(begin))

    def runtime(self, **spec: Any) -> ApptainerRuntime:
        work = self.state / "work"
        work.mkdir(exist_ok=True)
        wanted = RuntimeSpec(**{"backend": "apptainer", "image": "/images/task.sif", "network": "none", "workdir": str(work), **spec})
        sandbox_id = f"box-{len(list(self.owner.folder.iterdir()))}"
        return ApptainerRuntime(wanted, Place(sandbox_id, self.owner.id, self.owner.sandbox(sandbox_id), ("127.0.0.1", 9)))


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fake]:
    program = tmp_path / "apptainer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {apptainer_fake.__file__} "$@"\n')
    program.chmod(0o755)
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("POLAR_APPTAINER_BIN", str(program))
    monkeypatch.setenv("APPTAINER_FAKE_STATE", str(state))
    owner = Owner.open(tmp_path / "root")
    yield Fake(state, owner)
    for left in await ApptainerRuntime.find():
        await ApptainerRuntime.remove(left)
    owner.close()


async def test_an_instance_is_contained_and_writes_into_its_own_folder(fake: Fake) -> None:
    runtime = fake.runtime()
    async with runtime:
        argv = fake.argv("instance", "start")
        folder = runtime.place.folder
        assert argv[:6] == ["instance", "start", "--containall", "--cleanenv", "--no-eval", "--hostname"]
        assert argv[-2:] == ["/images/task.sif", f"polar-{fake.owner.id}-{runtime.place.id}"]
        for flag, value in (
            ("--overlay", folder / "overlay"),
            ("--home", f"{folder / 'home'}:/polar/home"),
            ("--workdir", folder / "scratch"),
        ):
            assert argv[argv.index(flag) + 1] == str(value)
        assert argv[argv.index("--network") + 1] == "none"
        assert (folder / "overlay").is_dir()


async def test_limits_mounts_and_gpus_are_passed_on(fake: Fake) -> None:
    spec = {
        "cpus": 1.5,
        "memory_mb": 256,
        "pids": 50,
        "gpus": 2,
        "storage_mb": 100,
        "network": "host",
        "mounts": [MountSpec(source="/data", target="/d"), MountSpec(source="/out", target="/o", read_only=False)],
        "kwargs": {"volumes": ["/a:/b:ro"], "extra_args": ["--nvccli"]},
    }
    runtime = fake.runtime(**spec)
    async with runtime:
        argv = fake.argv("instance", "start")
        line = " ".join(argv)
        for wanted in ("--cpus 1.5", "--memory 256M", "--memory-swap 256M", "--pids-limit 50", "--nv ", "--nvccli", "--bind /a:/b:ro"):
            assert wanted in line
        assert "--bind /data:/d:ro" in line
        assert "--bind /out:/o:rw" in line
        assert "--net" not in argv
        image = str(runtime.place.folder / "overlay.img")
        assert fake.argv("overlay", "create") == ["overlay", "create", "--size", "100", image]
        assert argv[argv.index("--overlay") + 1] == image
        assert runtime.gateway_url == "http://127.0.0.1:9"
        assert (await runtime.exec("echo $CUDA_VISIBLE_DEVICES")).text.strip() == "0,1"


@pytest.mark.parametrize(
    ("image", "passed"),
    [("debian:bookworm", "docker://debian:bookworm"), ("docker://x/y", "docker://x/y"), ("./box", "./box"), ("a.sif", "a.sif")],
)
async def test_a_bare_image_name_is_one_of_docker_s(fake: Fake, image: str, passed: str) -> None:
    assert fake.runtime(image=image).start_arguments()[-2] == passed


async def test_commands_have_exact_codes_streams_and_a_clean_environment(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    async with fake.runtime(env={"A": "é\n$HOME"}) as runtime:
        result = await runtime.exec('printf %s "$A|$B"; echo err >&2; exit 7', env={"B": "b c"}, cwd="/")
        assert (result.exit_code, result.text, result.stderr) == (7, "é\n$HOME|b c", b"err\n")
        call = fake.calls[-1]
        assert call["argv"][:4] == ["exec", "--cleanenv", "--no-eval", "--pwd"]
        assert call["inside"]["POLAR_SANDBOX"] == runtime.place.id
        assert "s3cret" not in json.dumps(call)
        assert (await runtime.exec("kill -9 $$")).exit_code == 137
        assert (await runtime.exec(["cat"], stdin=b"x" * 1_000_000)).stdout == b"x" * 1_000_000
        assert (await runtime.exec("echo $HOME", env={"HOME": "/other"})).text.strip() == "/other"


async def test_a_time_that_runs_out_is_said(fake: Fake) -> None:
    async with fake.runtime() as runtime:
        result = await runtime.exec("echo begun; sleep 30 & sleep 30", timeout_s=1)
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"begun\n")
        assert processes.find(sandbox=runtime.place.id) == []


async def test_files_go_in_and_come_out(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    async with fake.runtime() as runtime:
        exchange = runtime.place.folder / "exchange"
        monkeypatch.setattr("polar.runtime.apptainer.EXCHANGE", str(exchange))  # the stand-in shows it in no other place
        await runtime.upload(source, "into/here")
        assert (fake.state / "work" / "into" / "here" / "file").read_text() == "content"
        await runtime.download("into/here", tmp_path / "back")
        assert (tmp_path / "back" / "file").read_text() == "content"
        assert await runtime.read("into/here/file") == b"content"
        with pytest.raises(FileNotFoundError):
            await runtime.read("nothing")
        assert list(exchange.iterdir()) == []


async def test_stop_ends_the_instance_and_may_come_twice(fake: Fake) -> None:
    runtime = fake.runtime()
    await runtime.start()
    assert await ApptainerRuntime.find() == [Left("instance", runtime.name, runtime.place.id, fake.owner.id)]
    await runtime.stop()
    await runtime.stop()
    assert fake.argv("instance", "stop")[-1] == runtime.name
    assert await ApptainerRuntime.find() == []
    with pytest.raises(SandboxError, match="not running"):
        await runtime.exec("true")


async def test_what_apptainer_says_is_passed_on(fake: Fake) -> None:
    (fake.state / "fail-instance-start").write_text("FATAL: could not open image /images/task.sif")
    with pytest.raises(SandboxError, match="could not open image"):
        async with fake.runtime():
            pass


async def test_an_instance_that_is_gone_is_infrastructure(fake: Fake) -> None:
    async with fake.runtime() as runtime:
        (fake.state / "instances.json").write_text("{}")
        with pytest.raises(SandboxError, match="no instance found"):
            await runtime.exec("true")


@pytest.mark.parametrize(
    ("spec", "field"),
    [({"image": None}, "image"), ({"build_context": "."}, "build_context"), ({"user": "bob"}, "user"), ({"kwargs": {"x": 1}}, "kwargs")],
)
def test_what_it_cannot_heed_is_refused_by_name(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ApptainerRuntime.check(RuntimeSpec(**{"backend": "apptainer", "image": "x.sif", **spec}))


@pytest.mark.real
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")
async def test_a_real_instance(tmp_path: Path) -> None:
    owner = Owner.open(tmp_path / "root")
    image = os.environ.get("POLAR_TEST_APPTAINER_IMAGE", "docker://debian:bookworm-slim")
    place = Place("real", owner.id, owner.sandbox("real"))
    async with ApptainerRuntime(RuntimeSpec(backend="apptainer", image=image, network="none"), place) as runtime:
        assert (await runtime.exec("echo hello; exit 3")).exit_code == 3
    owner.close()
