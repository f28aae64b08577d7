"""The pool of prepared sandboxes, with a runtime in memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandboxes import soon

from polar.errors import SandboxError
from polar.rollout.node.sandboxes import Sandboxes
from polar.runtime import Owner, Place, Runtime, RuntimeSpec, Step, register
from polar.runtime.pool import Pool, kind
from polar.testing.runtime import FakeRuntime


@register
class SnapshotRuntime(FakeRuntime):
    """Counts what a pool asks of it; an image is what `snapshot` said."""

    backend = "fake-snapshots"
    log: ClassVar[list[tuple[str, str | None]]] = []
    snapshot_fails: ClassVar[bool] = False
    images: ClassVar[set[str]] = set()

    async def start(self) -> None:
        self.log.append(("start", self.spec.image))
        await super().start()

    async def stop(self) -> None:
        self.log.append(("stop", self.place.id))
        await super().stop()

    async def snapshot(self) -> str | None:
        self.log.append(("snapshot", self.place.id))
        if self.snapshot_fails:
            raise SandboxError("no room for images")
        self.images.add(f"image-{self.place.id}")
        return f"image-{self.place.id}"

    @classmethod
    async def discard(cls, image: str) -> None:
        cls.images.discard(image)


PREPARED = RuntimeSpec(backend="fake-snapshots", image="base", prepare=[Step(type="exec", command="install")])


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Owner]:
    SnapshotRuntime.log, SnapshotRuntime.images, SnapshotRuntime.snapshot_fails = [], set(), False
    owner = Owner.open(tmp_path / "root")
    yield owner
    owner.close()


def places(owner: Owner) -> Callable[[], Place]:
    def make() -> Place:
        sandbox_id = f"p-{secrets.token_hex(4)}"
        return Place(sandbox_id, owner.id, owner.sandbox(sandbox_id))

    return make


async def done(pool: Pool, *, ready: int) -> None:
    await soon(lambda: pool.ready == ready and not pool._tasks)


async def give_back(owner: Owner, *runtimes: Runtime) -> None:
    for one in runtimes:
        await one.stop()
        owner.remove(one.place.id)


async def test_the_second_starts_from_the_first_s_snapshot(owner: Owner) -> None:
    async with Pool(remove=owner.remove) as pool:
        first = await pool.take(PREPARED, places(owner))
        second = await pool.take(PREPARED, places(owner))
        assert [image for what, image in SnapshotRuntime.log if what == "start"] == ["base", f"image-{first.place.id}"]
        assert (second.spec.prepare, pool.snapshots) == ([], 1)
        await give_back(owner, first, second)
    assert SnapshotRuntime.images == set()


async def test_sixteen_at_once_prepare_once(owner: Owner) -> None:
    async with Pool(remove=owner.remove) as pool:
        made = await asyncio.gather(*(pool.take(PREPARED, places(owner)) for _ in range(16)))
        assert [image for what, image in SnapshotRuntime.log if what == "start"].count("base") == 1
        assert len({one.place.id for one in made}) == 16
        await give_back(owner, *made)


async def test_a_sandbox_without_steps_needs_no_snapshot(owner: Owner) -> None:
    async with Pool(remove=owner.remove) as pool:
        await give_back(owner, await pool.take(RuntimeSpec(backend="fake-snapshots"), places(owner)))
        assert pool.snapshots == 0


async def test_where_no_image_can_be_kept_each_is_prepared(owner: Owner) -> None:
    SnapshotRuntime.snapshot_fails = True
    async with Pool(remove=owner.remove) as pool:
        made = [await pool.take(PREPARED, places(owner)) for _ in range(3)]
        assert [image for what, image in SnapshotRuntime.log if what == "start"] == ["base"] * 3
        assert [what for what, _ in SnapshotRuntime.log].count("snapshot") == 1
        await give_back(owner, *made)


async def test_one_stands_ready_and_is_handed_out_once(owner: Owner) -> None:
    async with Pool(remove=owner.remove, warm=2) as pool:
        taken = [await pool.take(PREPARED, places(owner))]
        await done(pool, ready=2)
        for _ in range(5):
            taken.append(await pool.take(PREPARED, places(owner)))
            await done(pool, ready=2)
        assert len({one.place.id for one in taken}) == len(taken)
        await give_back(owner, *taken)
    assert [one.name for one in owner.folder.iterdir()] == ["alive.lock"]


async def test_one_that_died_on_the_shelf_is_not_handed_out(owner: Owner) -> None:
    async with Pool(remove=owner.remove, warm=1) as pool:
        first = await pool.take(PREPARED, places(owner))
        await done(pool, ready=1)
        (shelf,) = pool._shelves.values()
        dead = shelf.ready[0]
        await dead.stop()
        second = await pool.take(PREPARED, places(owner))
        assert second.place.id != dead.place.id
        await give_back(owner, first, second)


async def test_kinds_that_nobody_takes_any_more_are_stopped(owner: Owner) -> None:
    now = [0.0]
    async with Pool(remove=owner.remove, warm=1, idle_s=60, clock=lambda: now[0]) as pool:
        other = PREPARED.model_copy(update={"env": {"A": "1"}})
        first = await pool.take(PREPARED, places(owner))
        await done(pool, ready=1)
        now[0] = 100.0
        second = await pool.take(other, places(owner))
        await done(pool, ready=1)
        assert [one.spec.env for shelf in pool._shelves.values() for one in shelf.ready] == [{"A": "1"}]
        await give_back(owner, first, second)


async def test_what_stands_ready_is_stopped_where_nothing_is_taken_any_more(owner: Owner) -> None:
    now = [0.0]
    async with Pool(remove=owner.remove, warm=2, idle_s=60, clock=lambda: now[0]) as pool:
        taken = await pool.take(PREPARED, places(owner))
        await done(pool, ready=2)
        await pool.tidy()
        assert pool.ready == 2
        now[0] = 100.0
        await pool.tidy()
        assert pool.ready == 0
        await give_back(owner, taken)
    assert [one.name for one in owner.folder.iterdir()] == ["alive.lock"]


async def test_one_on_the_shelf_that_cannot_be_removed_fails_nobody(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Pool(remove=owner.remove, warm=1) as pool:
        first = await pool.take(PREPARED, places(owner))
        await done(pool, ready=1)
        (shelf,) = pool._shelves.values()
        dead = shelf.ready[0]
        await dead.stop()

        async def resists() -> None:
            raise SandboxError("the daemon does not answer")

        monkeypatch.setattr(dead, "stop", resists)
        second = await pool.take(PREPARED, places(owner))
        assert second.place.id != dead.place.id
        await give_back(owner, first, second)


async def test_one_whose_taker_is_cancelled_is_removed(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was off the shelf, and in nobody's hands yet."""
    async with Pool(remove=owner.remove, warm=1) as pool:
        first = await pool.take(PREPARED, places(owner))
        await done(pool, ready=1)
        (shelf,) = pool._shelves.values()
        warm = shelf.ready[0]
        asked = asyncio.Event()

        async def hangs(*given: object, **more: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(warm, "exec", hangs)
        taking = asyncio.create_task(pool.take(PREPARED, places(owner)))
        await asked.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert ("stop", warm.place.id) in SnapshotRuntime.log
        assert not warm.place.folder.exists()
        await give_back(owner, first)
    assert [one.name for one in owner.folder.iterdir()] == ["alive.lock"]


async def test_nothing_is_kept_of_kinds_that_are_long_gone(owner: Owner) -> None:
    now = [0.0]
    async with Pool(remove=owner.remove, max_snapshots=1, idle_s=60, clock=lambda: now[0]) as pool:
        for number in range(10):
            now[0] += 100.0
            await give_back(owner, await pool.take(PREPARED.model_copy(update={"env": {"N": str(number)}}), places(owner)))
        await done(pool, ready=0)
        assert len(pool._shelves) <= 2


async def test_images_beyond_the_limit_are_removed_the_longest_unused_first(owner: Owner) -> None:
    now = [0.0]
    async with Pool(remove=owner.remove, max_snapshots=2, clock=lambda: now[0]) as pool:
        for number in range(4):
            now[0] += 1
            runtime = await pool.take(PREPARED.model_copy(update={"env": {"N": str(number)}}), places(owner))
            await give_back(owner, runtime)
        await soon(lambda: len(SnapshotRuntime.images) == 2)
        assert pool.snapshots == 2


async def test_a_failed_preparation_leaves_nothing_and_is_tried_anew(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapshotRuntime, "script", staticmethod(lambda command: 7))
    async with Pool(remove=owner.remove, warm=1) as pool:
        for _ in range(2):
            with pytest.raises(SandboxError, match="exit code 7"):
                await pool.take(PREPARED, places(owner))
    assert [one.name for one in owner.folder.iterdir()] == ["alive.lock"]
    assert [what for what, _ in SnapshotRuntime.log].count("start") <= [what for what, _ in SnapshotRuntime.log].count("stop")


async def test_a_closed_pool_gives_nothing(owner: Owner) -> None:
    pool = Pool(remove=owner.remove, warm=1)
    await give_back(owner, await pool.take(PREPARED, places(owner)))
    await pool.aclose()
    with pytest.raises(SandboxError, match="closed"):
        await pool.take(PREPARED, places(owner))
    assert pool.ready == 0


async def test_a_folder_that_resists_keeps_no_image_at_the_end(owner: Owner) -> None:
    def full(sandbox_id: str) -> None:
        raise OSError(f"{sandbox_id}: input/output error")

    pool = Pool(remove=full, warm=1)
    await give_back(owner, await pool.take(PREPARED, places(owner)))
    await done(pool, ready=1)
    assert SnapshotRuntime.images
    with pytest.raises(SandboxError, match="input/output error"):
        await pool.aclose()
    assert not SnapshotRuntime.images


def test_what_is_uploaded_tells_kinds_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one")
    spec = RuntimeSpec(prepare=[Step(type="upload_file", source="file", target="/file")])
    one = kind(spec, tmp_path)
    assert one == kind(spec, tmp_path)
    (tmp_path / "file").write_text("two")
    assert kind(spec, tmp_path) != one
    assert kind(spec, None) is None
    (tmp_path / "file").unlink()
    with pytest.raises(SandboxError, match="cannot be read"):
        kind(spec, tmp_path)


async def test_no_session_gets_a_sandbox_that_shows_its_tasks_folder(tmp_path: Path) -> None:
    """One that was made ready for another task hides that one's folder: the tests of its own would lie open."""
    owner = Owner.open(tmp_path / "root")
    async with Pool(remove=owner.remove, warm=1) as pool:
        sandboxes = Sandboxes(owner, gateway=None, pool=pool, warm=1)
        folders = [tmp_path / "task-a", tmp_path / "task-b"]
        made: list[Runtime] = []
        for folder in folders:
            folder.mkdir()
            runtime = await sandboxes.make(RuntimeSpec(backend="local", network="none"), folder.name, task_folder=folder)
            await done(pool, ready=len(made) + 1)
            made.append(runtime)
        assert [folder in runtime.place.hidden for folder, runtime in zip(folders, made, strict=True)] == [True, True]
        again = await sandboxes.make(RuntimeSpec(backend="local", network="none"), "task-a", task_folder=folders[0])
        assert folders[0] in again.place.hidden
        await sandboxes.aclose()
    owner.close()


def test_the_order_of_variables_makes_no_kind() -> None:
    assert kind(RuntimeSpec(env={"A": "1", "B": "2"}), None) == kind(RuntimeSpec(env={"B": "2", "A": "1"}), None)


SPECS = st.builds(
    RuntimeSpec,
    image=st.sampled_from([None, "a", "b"]),
    env=st.dictionaries(st.sampled_from("AB"), st.sampled_from(["", "1"])),
    workdir=st.sampled_from([None, "/w"]),
    user=st.sampled_from([None, "u"]),
    network=st.sampled_from(["gateway", "none"]),
    memory_mb=st.sampled_from([None, 64, 128]),
    prepare=st.lists(st.sampled_from([Step(type="exec", command="a"), Step(type="exec", command="b", cwd="/x")]), max_size=2),
)


@given(SPECS, SPECS)
def test_sandboxes_stand_for_each_other_only_if_all_that_made_them_is_equal(one: RuntimeSpec, other: RuntimeSpec) -> None:
    assert (kind(one, None) == kind(other, None)) == (one == other)
