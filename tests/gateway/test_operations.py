"""Running a gateway: budgets, pause and drain, metrics, shutdown, several engines, restart, mode messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_players import NAMES, PLAYERS, THINKING, Anthropic, Chat, Player, Responses, call_text, until

from polar.errors import CallError, ConfigError, EngineOverloaded, EngineUnavailable
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.testing.asgi import AsgiClient
from polar.testing.engine import Call, Reply, ScriptedEngine
from polar.testing.gateway import CachedServed

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def admin(gw: Any) -> AsgiClient:
    return AsgiClient(gw.gateway.admin, {"authorization": f"Bearer {gw.gateway.admin_token}"})


# --- budgets ---------------------------------------------------------------------------------------------------


@every_player
@both_ways
async def test_the_turn_budget_stops_a_session_by_name(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway(lambda call: "Hi.", budgets={"max_turns": 2}) as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        await player.turn(client, stream)
        await player.user("More.").turn(client, stream)
        answer = await player.user("Yet more.").send(client, stream)
        assert answer.status == 400
        assert "max_turns" in kind().error(answer)[1]
        assert answer.headers.get("x-should-retry", "false") == "false"
        assert len(await gw.completions(session)) == 2


async def test_calls_in_flight_count_as_turns(gateway: Open) -> None:
    async with gateway(lambda call: Reply("Hi.", delay_s=0.1), budgets={"max_turns": 2}) as gw:
        session, client = await gw.session()
        answers = await asyncio.gather(*(Chat().user(str(number)).send(client) for number in range(5)))
        assert sorted(answer.status for answer in answers) == [200, 200, 400, 400, 400]
        assert len(await gw.completions(session)) == 2


async def test_the_token_budget_stops_a_session_by_name(gateway: Open) -> None:
    async with gateway(lambda call: "One two three four.") as gw:
        session, client = await gw.session(settings={"budgets": {"max_tokens": 5}})
        await Chat().user("Go.").turn(client)
        error = (await Chat().user("Go.").send(client)).json()["error"]
        assert error["code"] == "max_tokens"
        assert len(await gw.completions(session)) == 1


async def test_the_time_budget_counts_from_the_first_call(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.", budgets={"max_seconds": 0.2}) as gw:
        _, client = await gw.session()
        await asyncio.sleep(0.25)
        await Chat().user("Go.").turn(client)
        await asyncio.sleep(0.25)
        assert (await Chat().user("Go.").send(client)).json()["error"]["code"] == "max_seconds"


async def test_counts_and_lists_are_free(gateway: Open) -> None:
    async with gateway([], budgets={"max_turns": 0}) as gw:
        _, client = await gw.session()
        body = Anthropic().user("Go.").body(False)
        assert (await client.post("/v1/messages/count_tokens", body)).status == 200
        assert (await client.get("/v1/models")).status == 200
        assert (await client.post("/v1/messages", body)).status == 400


# --- pause, drain, resume --------------------------------------------------------------------------------------


@every_player
async def test_a_paused_call_gets_pings_and_goes_on_after_resume(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."], first_ping_s=0.01, ping_s=0.01) as gw:
        session, client = await gw.session()
        assert (await admin(gw).post("/admin/inference/pause", {})).json()["paused"] is True
        exchange = kind().user("Go.").start(client, True)
        await until(lambda: kind().pings(exchange.answer) >= 2)
        assert gw.engine.calls == []
        assert (await admin(gw).get("/admin/inference/status")).json()["waiting"] == 1
        await admin(gw).post("/admin/policy", {"policy_version": 8})
        await admin(gw).post("/admin/inference/resume", {})
        turn = kind().read(await exchange.finished(), True)
        assert turn.text == "Hi."
        assert (await gw.completions(session))[0].policy_version == "8"


@pytest.mark.parametrize("stream", ["replay", "live"])
async def test_an_engine_that_was_started_anew_samples_nothing_before_it_has_the_weights(gateway: Open, stream: str) -> None:
    """An engine that died and is back has the weights that it began with; only a sync makes it the policy again (radixark/miles#1724)."""
    down = EngineUnavailable("connection refused")
    async with gateway([Reply("no", error=down), "Hi."], stream=stream) as gw:
        session, client = await gw.session()
        gw.engine.policy_version = "7"
        await admin(gw).post("/admin/policy", {"policy_version": 7})
        live = stream == "live"
        assert (await Chat().user("Go.").send(client, live)).status == 502
        gw.engine.policy_version = None
        refused = await Chat().user("Go.").send(client, live)
        assert (refused.status, len(gw.engine.calls)) == (502, 1)
        assert "started anew" in refused.json()["error"]["message"]
        gw.engine.policy_version = "8"
        await admin(gw).post("/admin/policy", {"policy_version": 8})
        assert (await Chat().user("Go.").turn(client, live)).text == "Hi."
        assert [one.policy_version for one in await gw.completions(session)] == ["8"]


async def test_pause_returns_when_the_last_call_is_out(gateway: Open) -> None:
    async with gateway([Reply("Hi.", delay_s=0.15)]) as gw:
        _, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        refused = await admin(gw).post("/admin/inference/pause?timeout_seconds=0.01", {})
        assert (refused.status, refused.json()["inflight"]) == (504, 1)
        drained = await admin(gw).post("/admin/inference/pause?timeout_seconds=5", {})
        assert (drained.status, drained.json()["inflight"]) == (200, 0)
        assert (await exchange.finished()).status == 200


async def test_a_call_that_wakes_to_a_new_pause_stays_out(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        gate = gw.gateway.gate
        assert await gate.pause(1.0)
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gate.waiting == 1)
        gate.resume()
        assert await gate.pause(1.0)
        await asyncio.sleep(0.02)
        assert gw.engine.calls == []
        gate.resume()
        assert (await exchange.finished()).status == 200


@pytest.mark.parametrize("body", [{"policy_version": True}, {"policy_version": None}, {}, {"policy_version": 1.5}])
async def test_a_policy_version_is_a_word_or_a_whole_number(gateway: Open, body: dict[str, Any]) -> None:
    async with gateway([]) as gw:
        assert (await admin(gw).post("/admin/policy", body)).status == 400


# --- metrics and shutdown ---------------------------------------------------------------------------------------


async def test_metrics_count_what_happened(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        _, client = await gw.session()
        player = Chat().user("Go.")
        await player.turn(client)
        await player.user("More.").turn(client)
        await client.post("/v1/chat/completions", b"{")
        text = (await admin(gw).get("/metrics")).body.decode()
        assert 'polar_requests_total{dialect="openai_chat",operation="generate",status="200"} 2.0' in text
        assert 'polar_requests_total{dialect="openai_chat",operation="generate",status="400"} 1.0' in text
        assert 'polar_completions_total{dialect="openai_chat",mode="tokens",status="complete"} 2.0' in text
        assert "polar_prefix_extended_total 1.0" in text
        assert "polar_roots_total 1.0" in text
        assert "polar_sessions_loaded 1.0" in text


async def test_shutdown_waits_for_calls_in_flight(gateway: Open) -> None:
    async with gateway([Reply("Done.", delay_s=0.1)], shutdown_s=5.0) as gw:
        _, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
    assert b"Done." in (await exchange.finished()).body


@every_player
async def test_shutdown_records_what_it_cuts_and_says_so(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply("late", delay_s=30)], shutdown_s=0.05) as gw:
        session, client = await gw.session()
        exchange = kind().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        store, recorded = gw.gateway.store, []
        append = store.append

        async def noted(completions: Any) -> None:
            recorded.extend(completions)
            await append(completions)

        store.append = noted
    answer = await exchange.finished()
    assert answer.status in (503, 529)
    assert "shut" in kind().error(answer)[1]
    assert [(made.session, made.status, made.untrainable) for made in recorded] == [
        (session.id, "aborted", "aborted: the gateway shut down; try again")
    ]


# --- several engines, several models ----------------------------------------------------------------------------


async def test_a_session_stays_with_its_engine_and_load_is_spread(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.", engines=2) as gw:
        sessions = [await gw.session() for _ in range(4)]
        for _ in range(3):
            for _, client in sessions:
                await Chat().user("Go.").turn(client)
        assert [len(engine.calls) for engine in gw.engines] == [6, 6]
        for session, _ in sessions:
            assert len({made.provenance["engine_url"] for made in await gw.completions(session)}) == 1


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), EngineOverloaded("loading", retry_after="7")])
@pytest.mark.parametrize("stream", ["replay", "live"])
async def test_a_dead_engine_is_left(gateway: Open, stream: str, error: CallError) -> None:
    dead: list[int] = []

    def script(call: Call) -> Reply:
        if not dead:
            dead.append(1)
            return Reply(error=error)
        return Reply("Hi.")

    async with gateway(script, engines=2, stream=stream) as gw:
        session, client = await gw.session()
        assert (await Chat().user("Go.").turn(client, True)).text == "Hi."
        assert sorted(len(engine.calls) for engine in gw.engines) == [1, 1]
        await Chat().user("Go.").turn(client, True)
        assert len({made.provenance["engine_url"] for made in await gw.completions(session)}) == 1
        health = await gw.gateway.health()
        assert sorted(engine["alive"] for engine in health["engines"]["default"]["engines"]) == [False, True]
        assert health["status"] == "ok"


@pytest.mark.parametrize("engines", [1, 2])
async def test_503_of_every_engine_reaches_the_caller_with_its_retry_after(gateway: Open, engines: int) -> None:
    async with gateway(lambda call: Reply(error=EngineOverloaded("queue full", retry_after="7")), engines=engines) as gw:
        _, client = await gw.session()
        answer = await Chat().user("Go.").send(client)
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        assert [len(engine.calls) for engine in gw.engines] == [1] * engines
        assert all(engine["alive"] for engine in (await gw.gateway.health())["engines"]["default"]["engines"]) == (engines == 1)


async def test_all_engines_dead_is_red_and_a_true_status(gateway: Open) -> None:
    async with gateway(lambda call: Reply(error=EngineUnavailable("gone")), engines=2) as gw:
        _, client = await gw.session()
        assert (await Chat().user("Go.").send(client)).status == 502
        assert (await AsgiClient(gw.gateway.admin).get("/health")).status == 503
        public = await AsgiClient(gw.gateway.api).get("/health")
        assert (public.status, public.json()) == (503, {"status": "unhealthy"})


async def test_health_alone_finds_out_that_the_only_engine_is_back(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.engines.pool.FIRST_BACKOFF_S", 0.0)
    async with gateway(lambda call: Reply(error=EngineUnavailable("gone"))) as gw:
        _, client = await gw.session()
        assert (await Chat().user("Go.").send(client)).status == 502
        public = AsgiClient(gw.gateway.api)
        assert (await public.get("/health")).status == 503
        await until(lambda: gw.gateway.default.pool.alive)
        assert (await public.get("/health")).status == 200


async def test_a_session_and_a_model_s_card_tell_the_context(gateway: Open) -> None:
    async with gateway([]) as gw:
        made = (await admin(gw).post("/sessions", {})).json()
        card = (await AsgiClient(gw.gateway.api, {"authorization": f"Bearer {made['key']}"}).get("/v1/models/any-name")).json()
        assert made["context"] == card["max_model_len"] == gw.gateway.default.context > 0


async def test_a_model_that_the_engine_does_not_serve_is_refused_at_the_start(tmp_path: Path) -> None:
    engine = EngineConfig(urls=[], model="nope")
    gateway = Gateway(
        GatewayConfig(engines={"default": engine}, store=str(tmp_path / "polar.db")),
        served={"default": CachedServed("default", engine, [ScriptedEngine([], model="real")])},
    )
    with pytest.raises(ConfigError, match=r"engines\.default\.model: .* serves real, not 'nope'"):
        await gateway.start()
    await gateway.aclose()


async def test_models_go_where_their_patterns_say(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    engines = {
        name: ScriptedEngine(lambda call, name=name: f"{name}.", tokenizer_dir=qwen3_tokenizer_dir, model=name)
        for name in ("main", "small")
    }
    config = GatewayConfig(
        engines={
            "main": EngineConfig(urls=[], tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3"),
            "small": EngineConfig(urls=[], tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3", trained=False),
        },
        models={"*haiku*": "small"},
        store=str(tmp_path / "polar.db"),
    )
    served = {name: CachedServed(name, config.engines[name], [engine]) for name, engine in engines.items()}
    async with Gateway(config, served=served) as running:
        record, key = await running.new_session()
        client = AsgiClient(running.api, {"x-api-key": key})
        for model, expected in (("claude-haiku-4-5", "small."), ("claude-opus-4-1", "main."), ("anything", "main.")):
            player = Anthropic().user("Go.")
            player.extra = {"model": model}
            assert (await player.turn(client)).text == expected
        made = [one async for one in running.store.completions(record.id)]
        assert [one.model for one in made] == ["small", "main", "main"]
        assert [one.untrainable for one in made] == ["engine is configured as untrained", None, None]


# --- restart ----------------------------------------------------------------------------------------------------


@every_player
async def test_pointers_history_and_budgets_survive_a_restart(gateway: Open, kind: type[Player]) -> None:
    async with gateway([THINKING + call_text('{"command" :"ls"}')]) as gw:
        session, client = await gw.session(settings={"budgets": {"max_turns": 2}})
        player = kind().user("Go.")
        turn = await player.turn(client)
    async with gateway(["Done."]) as again:
        client.app = again.gateway.api
        await player.results(turn, "ok").turn(client)
        first, second = await again.completions(session)
        assert (second.number, second.parent, second.broken) == (1, 0, None)
        assert first.ids is not None
        assert second.prompt_ids is not None
        assert np.array_equal(second.prompt_ids[: len(first.ids)], first.ids)
        assert (await player.user("More.").send(client)).status == 400


async def test_a_stored_response_survives_a_restart_and_a_closed_session_stays_closed(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        ended, closed_client = await gw.session()
        await gw.gateway.close_session(ended)
        player = Responses().user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client)
    async with gateway([]) as again:
        client.app = closed_client.app = again.gateway.api
        assert (await client.get(f"/v1/responses/{turn.id}")).json() == turn.answer.json()
        assert (await Chat().user("Go.").send(closed_client)).status == 410


# --- mode messages -----------------------------------------------------------------------------------------------


@every_player
async def test_in_mode_messages_every_break_has_a_cause(gateway: Open, kind: type[Player]) -> None:
    script = [
        THINKING + "I look." + call_text('{"command" : "ls \\u002e"}'),
        THINKING + call_text('{"command":"b"}'),
        THINKING + " Almost. ",
        "Done.",
    ]
    async with gateway(script, mode="messages") as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        for text in ("x.py", "ok"):
            turn = await player.turn(client)
            player.results(turn, text)
        await player.turn(client)
        await player.user("More.").turn(client)
        made = await gw.completions(session)
        assert [one.mode for one in made] == ["messages"] * 4
        assert [one.parent for one in made] == [None, 0, 1, 2]
        broken = 0
        for earlier, later in pairwise(made):
            assert earlier.ids is not None
            assert later.prompt_ids is not None
            whole = np.array_equal(later.prompt_ids[: len(earlier.ids)], earlier.ids)
            assert (later.broken is None) == whole
            if later.broken is not None:
                broken += 1
                at = later.broken.position
                assert np.array_equal(later.prompt_ids[:at], earlier.ids[:at])
                assert later.broken.lost > 0
        assert broken


async def test_an_engine_that_takes_no_tokens_runs_in_mode_messages_and_says_why(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda call: "Hi.")
    engine.takes_tokens = engine.returns_tokens = False  # type: ignore[misc]
    config = GatewayConfig(engines={"default": EngineConfig(urls=[], kind="openai")}, store=str(tmp_path / "polar.db"))
    async with Gateway(config, served={"default": CachedServed("default", config.engines["default"], [engine])}) as running:
        health = (await running.health())["engines"]["default"]
        assert (health["mode"], health["trainable"]) == ("messages", False)
        assert "takes no token ids" in health["mode_reason"]
        assert health["problems"]
        record, key = await running.new_session()
        await Chat().user("Go.").turn(AsgiClient(running.api, {"authorization": f"Bearer {key}"}))
        made = [one async for one in running.store.completions(record.id)]
        assert made[0].untrainable is not None


async def test_a_demanded_mode_that_is_not_possible_refuses_to_start(tmp_path: Path) -> None:
    config = GatewayConfig(engines={"default": EngineConfig(urls=[], mode="tokens")}, store=str(tmp_path / "polar.db"))
    gateway = Gateway(config, served={"default": CachedServed("default", config.engines["default"], [ScriptedEngine([])])})
    with pytest.raises(ConfigError, match="no tokenizer"):
        await gateway.start()
    await gateway.aclose()
