import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.base import Engine, EngineInfo
from polar.engines.pool import FIRST_BACKOFF_S, FRESH_S, EnginePool
from polar.errors import ConfigError, EngineUnavailable
from polar.testing import ScriptedEngine

DOWN = EngineUnavailable("down")


class Probed(ScriptedEngine):
    """An engine that answers `info` once it is `up`."""

    def __init__(self, url: str) -> None:
        super().__init__([])
        self.url = url
        self.up = False
        self.asked = 0

    async def info(self) -> EngineInfo:
        self.asked += 1
        if not self.up:
            raise DOWN
        return EngineInfo(("m",))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(count: int) -> tuple[EnginePool, list[Probed], Clock]:
    engines = [Probed(f"http://e{number}") for number in range(count)]
    clock = Clock()
    return EnginePool(engines, clock=clock), engines, clock


def test_a_pool_without_engines_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError):
        EnginePool([])


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=40, unique=True), st.integers(1, 5))
def test_sessions_stay_and_load_is_even(sessions: list[str], count: int) -> None:
    pool, engines, _ = pool_of(count)
    first = {session: pool.pick(session) for session in sessions}
    assert all(pool.pick(session) is first[session] for session in reversed(sessions))
    loads = [sum(engine is chosen for chosen in first.values()) for engine in engines]
    assert max(loads) - min(loads) <= 1


async def test_a_dead_engine_is_left_for_good_by_its_sessions() -> None:
    pool, engines, _ = pool_of(2)
    home = pool.pick("s")
    pool.failed(home, DOWN)
    other = pool.pick("s", avoid=[home])
    assert other is not home
    assert pool.pick("s") is other
    pool.succeeded(home)
    assert pool.pick("s") is other
    assert [entry["alive"] for entry in pool.health()] == [True, True]
    assert len(engines) == 2


async def test_a_dead_engine_gets_no_new_sessions_and_comes_back_after_a_probe() -> None:
    pool, engines, clock = pool_of(2)
    pool.failed(engines[0], DOWN)
    assert {pool.pick(f"s{number}") for number in range(6)} == {engines[1]}
    assert engines[0].asked == 0
    clock.now = FIRST_BACKOFF_S + 0.1
    pool.pick("t")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engines[0].asked == 1
    assert pool.health()[0]["failures"] == 2
    clock.now = 60.0
    engines[0].up = True
    pool.pick("t")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pool.health()[0]["alive"]
    assert pool.pick("new") is engines[0]
    await pool.aclose()


async def test_if_all_are_dead_the_sessions_own_one_is_tried() -> None:
    pool, engines, _ = pool_of(2)
    home = pool.pick("s")
    for engine in engines:
        pool.failed(engine, DOWN)
    assert pool.pick("s") is home
    await pool.aclose()


def test_when_every_engine_was_tried_the_call_fails_with_their_reasons() -> None:
    pool, engines, _ = pool_of(1)
    pool.failed(engines[0], DOWN)
    with pytest.raises(EngineUnavailable, match="down"):
        pool.pick("s", avoid=engines)


def test_a_released_session_frees_its_place() -> None:
    pool, _, _ = pool_of(2)
    first = pool.pick("a")
    pool.pick("b")
    pool.release("a")
    assert pool.pick("c") is first


async def test_each_engine_has_its_own_policy_version() -> None:
    pool, engines, _ = pool_of(2)
    engines[1].policy_version = "7"
    await pool.note_versions()
    assert [entry["policy_version"] for entry in pool.health()] == [None, "7"]


async def test_an_engine_that_was_started_anew_stays_out_until_it_has_the_weights() -> None:
    """Elsewhere it got requests with the weights that it began with, under the present version (radixark/miles#1724)."""
    pool, (engine, other), clock = pool_of(2)
    engine.up = other.up = True
    engine.policy_version = other.policy_version = "7"
    await pool.note_versions()
    await pool.confirm(engine)
    pool.failed(engine, DOWN)
    engine.policy_version = None  # what it says after a start
    with pytest.raises(EngineUnavailable, match="started anew"):
        await pool.confirm(engine)
    clock.now = FIRST_BACKOFF_S
    pool.probe()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [entry["alive"] for entry in pool.health()] == [False, True]
    engine.policy_version = "8"
    await pool.note_versions()
    await pool.confirm(engine)


@pytest.mark.parametrize("silent", [False, True])
async def test_an_engine_that_could_not_be_asked_had_the_version_that_it_told_before(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one it would get calls again after a start, with the weights that it began with."""

    async def unasked() -> str | None:
        if silent:
            await asyncio.Event().wait()
        raise DOWN

    pool, (engine, other), _ = pool_of(2)
    engine.up = other.up = True
    engine.policy_version = other.policy_version = "7"
    await pool.note_versions()
    with monkeypatch.context() as patch:
        patch.setattr("polar.engines.pool.VERSION_S", 0.01)
        patch.setattr(engine, "weight_version", unasked)
        other.policy_version = "8"
        await pool.note_versions()
    assert [entry["policy_version"] for entry in pool.health()] == ["7", "8"]
    pool.failed(engine, DOWN)
    engine.policy_version = None
    with pytest.raises(EngineUnavailable, match="started anew"):
        await pool.confirm(engine)
    with pytest.raises(EngineUnavailable, match="started anew"):
        await pool.check(engine)
    await pool.check(other)


def test_a_pool_has_a_length_and_lists_its_engines() -> None:
    pool, engines, _ = pool_of(3)
    assert len(pool) == 3
    listed: list[Engine] = pool.engines
    assert listed == engines


async def test_an_engine_that_dies_and_one_that_is_back_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pool, (engine,), _ = pool_of(1)
    for _ in range(3):
        pool.failed(engine, DOWN)
    pool.succeeded(engine)
    pool.succeeded(engine)
    logged = [(record.getMessage(), record.__dict__["url"]) for record in caplog.records if record.name == "polar.engines"]
    assert logged == [("an engine does not answer as it should", "http://e0"), ("an engine is back", "http://e0")]


async def test_a_look_at_health_probes_the_only_engine(caplog: pytest.LogCaptureFixture) -> None:
    pool, (engine,), clock = pool_of(1)
    pool.failed(engine, DOWN)
    pool.probe()
    assert engine.asked == 0, "its time has not come"
    clock.now = FIRST_BACKOFF_S
    engine.up = True
    pool.probe()
    pool.probe()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (engine.asked, pool.alive) == (1, True)
    await pool.aclose()


async def test_a_look_at_health_finds_out_that_an_engine_without_calls_has_died() -> None:
    pool, (engine,), clock = pool_of(1)
    pool.probe()
    assert engine.asked == 0, "it was heard of just now"
    clock.now = FRESH_S
    pool.probe()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (engine.asked, pool.alive) == (1, False)
    await pool.aclose()
