"""A sync through a real gateway and real engines: what was sampled before and after carries the version of the weights that it was sampled
with, and agrees with them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_rig import Rig, distance, make_model, until
from gateway_rig import rig as any_rig

from polar.errors import ConfigError, SyncFailed
from polar.testing.gateway import SessionClient
from polar.testing.rollout import TOKEN, listening, running_service
from polar.train.gateways import Control, EngineAt
from polar.train.sync import Syncer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"v{seed}", seed=seed) for seed in range(4)]


def rig(folder: Path, model: Path, **more: Any) -> AbstractAsyncContextManager[Rig]:
    return any_rig(folder, model, endless=True, engine={"mode": "messages"}, check=False, **more)


def body(max_tokens: int = 12, text: str = "Say something.") -> dict[str, Any]:
    return {"model": "any", "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]}


async def ask(client: SessionClient, max_tokens: int = 12) -> None:
    answer = await client.post("/v1/messages", body(max_tokens))
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_completions_before_and_after_carry_the_versions_of_their_weights(kind: str, models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0], kind=kind, engines=2) as one:
        syncer = Syncer([one.control])
        session, client = await one.session()
        for version, folder in enumerate(models):
            report = await syncer(folder, version)
            assert (report.version, sorted(report.engines)) == (version, sorted(one.urls))
            await ask(client)
        for version, completion in enumerate(await one.completions(session)):
            assert completion.policy_version == str(version)
            assert distance(models[version], completion) < 1e-4
        await syncer.aclose()


async def test_a_call_in_flight_is_let_out_with_the_old_weights_and_the_next_waits(models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0]) as one:
        syncer = Syncer([one.control])
        await syncer(models[0], 0)
        session, client = await one.session()
        first = asyncio.create_task(ask(client, 150))
        await until(lambda: one.gateway.gate.inflight)
        syncing = asyncio.create_task(syncer(models[1], 1))
        await until(lambda: one.gateway.gate.paused)
        second = asyncio.create_task(ask(client, 13))
        report = await syncing
        await asyncio.gather(first, second)
        old, new = await one.completions(session)
        assert [None if one.sampled_ids is None else len(one.sampled_ids) for one in (old, new)] == [150, 13]
        assert (old.policy_version, new.policy_version) == ("0", "1")
        assert distance(models[0], old) < 1e-4
        assert distance(models[1], new) < 1e-4
        assert report.interrupted == 0
        await syncer.aclose()


async def test_a_call_that_takes_too_long_begins_anew_and_its_client_notices_nothing(models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0]) as one:
        syncer = Syncer([one.control], drain_s=0.05)
        await syncer(models[0], 0)
        session, client = await one.session()
        call = asyncio.create_task(ask(client, 400))
        await until(lambda: one.gateway.gate.inflight)
        report = await syncer(models[1], 1)
        assert report.interrupted == 1
        await call
        (completion,) = await one.completions(session)
        assert (completion.status, completion.policy_version) == ("complete", "1")
        assert completion.sampled_ids is not None
        assert len(completion.sampled_ids) == 400
        assert distance(models[1], completion) < 1e-4
        await syncer.aclose()


async def test_a_client_that_leaves_while_its_call_waits_to_begin_anew_is_recorded_as_ever(models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0], grace_s=0.05) as one:
        session, client = await one.session()
        exchange = client.start("POST", "/v1/messages", body(400))
        await until(lambda: one.gateway.gate.inflight)
        paused = await one.control.pause(0.02, interrupt=True)
        assert (paused.drained, paused.interrupted) == (True, 1)
        await until(lambda: one.gateway.gate.waiting)
        exchange.leave()
        await until(lambda: not one.gateway.gate.waiting)
        await one.control.resume()
        assert await one.completions(session) == []
        await one.control.aclose()


async def test_what_may_not_be_interrupted_keeps_its_weights(models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0]) as one:
        syncer = Syncer([one.control], drain_s=0.05, on_slow="fail")
        await syncer(models[0], 0)
        session, client = await one.session()
        call = asyncio.create_task(ask(client, 300))
        await until(lambda: one.gateway.gate.inflight)
        with pytest.raises(SyncFailed, match=r"still in the engines after 0\.05 s; the weights were not changed") as said:
            await syncer(models[1], 1)
        assert not said.value.paused
        await call
        (completion,) = await one.completions(session)
        assert completion.policy_version == "0"
        assert distance(models[0], completion) < 1e-4
        assert not one.gateway.gate.paused
        await syncer.aclose()


async def test_an_engine_that_cannot_see_the_folder_stops_all_until_it_can(models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0], engines=2) as one:
        engines = [EngineAt(one.urls[0]), EngineAt(one.urls[1], mount=(str(models[0].parent), "/somewhere/else"))]
        syncer = Syncer([one.control], engines, patience_s=0)
        with pytest.raises(SyncFailed, match=r"not every engine has the weights of version 1.*/somewhere/else/v1.*stay paused") as said:
            await syncer(models[1], 1)
        assert said.value.paused
        assert one.gateway.gate.paused
        session, client = await one.session()
        call = asyncio.create_task(ask(client))
        await until(lambda: one.gateway.gate.waiting)
        await Syncer([one.control])(models[1], 1)
        await call
        (completion,) = await one.completions(session)
        assert completion.policy_version == "1"
        assert distance(models[1], completion) < 1e-4
        await syncer.aclose()


async def test_weights_that_every_engine_refuses_change_nothing(models: list[Path], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", hidden=32)
    async with rig(tmp_path, models[0], engines=2) as one:
        syncer = Syncer([one.control])
        await syncer(models[0], 0)
        with pytest.raises(SyncFailed, match=r"no engine has taken the weights of version 1.*shapes.*go on with the old ones") as said:
            await syncer(other, 1)
        assert not said.value.paused
        session, client = await one.session()
        await ask(client)
        (completion,) = await one.completions(session)
        assert completion.policy_version == "0"
        assert distance(models[0], completion) < 1e-4
        await syncer.aclose()


async def test_a_wrong_folder_or_gateway_is_said_before_anything_is_paused(models: list[Path], tmp_path: Path) -> None:
    async with rig(tmp_path, models[0]) as one:
        syncer = Syncer([one.control])
        with pytest.raises(ConfigError, match="there is no folder"):
            await syncer(tmp_path / "none", 1)
        with pytest.raises(ConfigError, match="holds no model"):
            await syncer(tmp_path, 1)
        assert not one.gateway.gate.paused
        wrong = Control("http://gateway", "not the token", transport=httpx.ASGITransport(app=one.gateway.admin))
        with pytest.raises(SyncFailed, match="admin token"):
            await Syncer([wrong], patience_s=0)(models[1], 1)
        nobody = Control("http://127.0.0.1:9")
        with pytest.raises(SyncFailed, match="cannot be reached"):
            await Syncer([one.control, nobody], [EngineAt(one.urls[0])], patience_s=0)(models[1], 1)
        assert not one.gateway.gate.paused
        await syncer.aclose()
    with pytest.raises(ConfigError, match="at least one gateway"):
        Syncer([])


async def test_an_adapter_that_no_gateway_asks_for_is_refused(models: list[Path], tmp_path: Path) -> None:
    """The engine would serve it beside the model that sessions go on to be sampled from (verl-project/verl#3821)."""
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).write_text("{}")
    async with rig(tmp_path, models[0]) as one:
        syncer = Syncer([one.control], [EngineAt(one.urls[0])], adapter="policy")
        with pytest.raises(ConfigError, match="gateways ask for tiny"):
            await syncer(tmp_path / "adapter", 1)
        assert not one.gateway.gate.paused
        await syncer.aclose()


async def test_one_call_of_a_rollout_service_reaches_all_its_nodes(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        rig(tmp_path / "a", models[0]) as one,
        rig(tmp_path / "b", models[0]) as two,
        running_service(tmp_path) as (_, url),
        listening(one.gateway.admin) as first,
        listening(two.gateway.admin) as second,
        Control(url, TOKEN) as service,
        httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http,
    ):

        async def register(name: str, at: str, node: Rig) -> None:
            facts = {"node_id": name, "gateway_url": at, "token": node.gateway.admin_token, "instance": f"i-{name}"}
            (await http.post(f"{url}/nodes/register", json=facts)).raise_for_status()

        await register("one", first, one)
        syncer = Syncer([service])
        await syncer(models[1], 1)
        assert one.gateway.gate.policy_version == "1"
        # A node that is started anew is told the version, since its engine has it; one with an engine of its own is
        # not, until the next sync.
        one.gateway.gate.policy_version = None
        await register("one", first, one)
        assert one.gateway.gate.policy_version == "1"
        await register("two", second, two)
        assert two.gateway.gate.policy_version is None
        report = await syncer(models[2], 2)
        assert set(report.engines) == {*one.urls, *two.urls}
        for node in (one, two):
            session, client = await node.session()
            await ask(client)
            (completion,) = await node.completions(session)
            assert completion.policy_version == "2"
            assert distance(models[2], completion) < 1e-4
        await service.pause(1.0, interrupt=False)
        await register("three", second, two)
        assert two.gateway.gate.paused
        await service.resume()
        assert not one.gateway.gate.paused
        assert not two.gateway.gate.paused
        await syncer.aclose()
