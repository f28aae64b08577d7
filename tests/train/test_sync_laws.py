"""Whatever fails during an update, nothing is sampled from a mixture, and no completion gets a version that its weights do not have.

Engines and gateways are models of themselves here: what is proven is the order of the steps, and what is left after each failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines.base import Engine, EngineInfo, Generation, MessagesRequest
from polar.errors import ConfigError, EngineUnavailable, SyncFailed
from polar.train.sync import EngineAt, Paused, Syncer

STEPS = ("pause", "update", "version", "resume")


class ModelEngine(Engine):
    """`weights`: of the version that it has; `None`: nobody knows. `fails`: at which step, with what."""

    name = "model"

    def __init__(self, number: int, fails: tuple[str, str] | None = None) -> None:
        super().__init__(f"http://engine-{number}")
        self.weights: str | None = "1"
        self.told: str | None = "1"
        self.paused = False
        self.fails = fails
        self.loaded_while_open: list[str] = []
        self.world: World | None = None

    def _fail(self, step: str) -> None:
        if self.fails is not None and self.fails[0] == step:
            raise ConfigError("refused") if self.fails[1] == "refuses" else EngineUnavailable("went away")

    async def update_weights(self, folder: str, version: str, *, timeout_s: float = 600.0) -> None:
        await asyncio.sleep(0)
        assert self.paused
        assert self.world is not None
        assert all(gateway.paused for gateway in self.world.gateways), "an engine loads while a gateway may call it"
        if self.fails == ("update", "breaks"):
            self.weights = None
        self._fail("update")
        self.weights = self.told = version
        if self.fails == ("version", "other"):
            self.told = "another"

    async def weight_version(self) -> str | None:
        self._fail("version")
        return self.told

    async def pause(self, *, abort: bool = False, timeout_s: float = 600.0) -> bool:
        self._fail("pause")
        self.paused = True
        return True

    async def resume(self) -> None:
        self._fail("resume")
        self.paused = False

    async def info(self) -> EngineInfo:
        raise NotImplementedError

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        raise NotImplementedError


@dataclass
class ModelGateway:
    """`fails`: the name of a call that does not come through, or `slow`: never drained."""

    name: str
    fails: str | None = None
    paused: bool = False
    version: str = "1"
    closed: bool = False

    def _fail(self, step: str) -> None:
        if self.fails == step:
            raise SyncFailed(f"{self.name} cannot be reached")

    async def pause(self, timeout_s: float, *, interrupt: bool) -> Paused:
        await asyncio.sleep(0)
        self._fail("pause")
        self.paused = True
        return Paused(self.fails != "slow")

    async def resume(self) -> None:
        self._fail("resume")
        self.paused = False

    async def set_version(self, version: int) -> None:
        assert self.paused, "a version is set while completions begin"
        self._fail("set_version")
        self.version = str(version)

    async def engines(self) -> Sequence[EngineAt]:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class World:
    gateways: list[ModelGateway]
    engines: list[ModelEngine]
    folder: Path
    syncer: Syncer = field(init=False)

    def __post_init__(self) -> None:
        for engine in self.engines:
            engine.world = self
        self.syncer = Syncer(self.gateways, self.engines, drain_s=0.01, patience_s=0.0)

    @property
    def runs(self) -> bool:
        return not any(gateway.paused for gateway in self.gateways) and not any(engine.paused for engine in self.engines)

    def heal(self) -> None:
        """The causes are gone: the same call puts all of it right."""
        for gateway in self.gateways:
            gateway.fails = None
        for engine in self.engines:
            engine.fails = None

    def check(self) -> None:
        """A gateway that lets calls through finds engines that all have the weights of the version which it records."""
        for gateway in self.gateways:
            if not gateway.paused:
                assert {engine.weights for engine in self.engines} == {gateway.version}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


engine_faults = st.none() | st.tuples(st.sampled_from(STEPS), st.sampled_from(["refuses", "breaks"])) | st.just(("version", "other"))
gateway_faults = st.none() | st.sampled_from(["pause", "slow", "set_version", "resume"])


@settings(max_examples=300, deadline=None)
@given(
    gateways=st.lists(gateway_faults, min_size=1, max_size=3),
    engines=st.lists(engine_faults, min_size=1, max_size=3),
)
def test_nothing_is_ever_half_way(folder: Path, gateways: list[str | None], engines: list[tuple[str, str] | None]) -> None:
    async def run() -> None:
        world = World(
            [ModelGateway(f"gateway-{number}", fault) for number, fault in enumerate(gateways)],
            [ModelEngine(number, fault) for number, fault in enumerate(engines)],
            folder,
        )
        faulty = any(gateways) or any(engines)
        try:
            report = await world.syncer(folder, 2)
        except (SyncFailed, EngineUnavailable, ConfigError):
            assert faulty
            world.check()
        else:
            assert not faulty
            assert report.version == world.syncer.version == 2
            assert world.runs
            world.check()
        world.heal()
        await world.syncer(folder, 2)
        assert world.runs
        assert {gateway.version for gateway in world.gateways} == {"2"}
        world.check()

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(turns=st.integers(0, 12))
def test_a_sync_that_is_cancelled_leaves_nothing_half_way(folder: Path, turns: int) -> None:
    async def run() -> None:
        world = World([ModelGateway("a"), ModelGateway("b")], [ModelEngine(0), ModelEngine(1)], folder)
        task = asyncio.create_task(world.syncer(folder, 2))
        while not any(gateway.paused for gateway in world.gateways) and not task.done():  # noqa: ASYNC110 - the folder is looked at in a thread
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)
        world.check()
        await world.syncer(folder, 3)
        world.check()
        assert {gateway.version for gateway in world.gateways} == {"3"}

    asyncio.run(run())


async def test_what_stays_paused_after_a_sync_that_failed_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World([ModelGateway("a", "resume"), ModelGateway("b", "slow")], [ModelEngine(0, ("resume", "breaks"))], folder)
    with pytest.raises(SyncFailed, match="b: calls are still in the engines"):
        await world.syncer(folder, 2)
    told = [record for record in caplog.records if "paused still" in record.getMessage()]
    assert [vars(record)["url"] for record in told] == [world.engines[0].url, "a"]
