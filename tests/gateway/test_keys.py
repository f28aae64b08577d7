"""Law 6: a request belongs to the session whose key it carries, and to no other. And what exists on the listener that sandboxes see."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, TEXT, Anthropic, Chat, Google, Player, Responses, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.gateway.api import parse_scope
from polar.store.export import completion_to_json
from polar.testing.asgi import AsgiClient
from polar.testing.engine import Reply
from polar.testing.gateway import scripted_gateway

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
UNAUTHENTICATED = {
    "anthropic": "authentication_error",
    "openai_chat": "invalid_request_error",
    "openai_responses": "authentication_error",
    "google": "UNAUTHENTICATED",
}
OWN_PLACE: dict[type[Player], tuple[str, str]] = {
    Anthropic: ("x-api-key", "{}"),
    Chat: ("authorization", "Bearer {}"),
    Responses: ("authorization", "Bearer {}"),
    Google: ("x-goog-api-key", "{}"),
}
PLACES = [("x-api-key", "{}"), ("authorization", "Bearer {}"), ("x-goog-api-key", "{}"), ("api-key", "{}")]


@every_player
@pytest.mark.parametrize("key", [None, "sk-polar-wrong", ""], ids=["none", "wrong", "empty"])
async def test_without_a_valid_key_there_is_a_401_in_shape(gateway: Open, kind: type[Player], key: str | None) -> None:
    async with gateway([]) as gw:
        header, form = OWN_PLACE[kind]
        headers = {} if key is None else {header: form.format(key)}
        answer = await kind().user("Go.").send(AsgiClient(gw.gateway.api), headers=headers)
        assert answer.status == 401
        assert kind().error(answer)[0].lower() == UNAUTHENTICATED[kind.name].lower()
        assert gw.engine.calls == []


@every_player
async def test_a_wrong_prefix_is_a_401_even_with_a_good_key_beside_it(gateway: Open, kind: type[Player]) -> None:
    async with gateway([]) as gw:
        _, client = await gw.session()
        header, form = OWN_PLACE[kind]
        player = kind().user("Go.")
        answer = await AsgiClient(gw.gateway.api).post(
            "/s/wrong" + player.path(False), player.body(False), {header: form.format(client.key)}
        )
        assert answer.status == 401


@every_player
async def test_a_key_of_another_store_is_unknown(gateway: Open, tmp_path: Path, kind: type[Player]) -> None:
    (tmp_path / "other").mkdir()
    async with gateway([], folder=tmp_path / "other") as other:
        _, stranger = await other.session()
        async with gateway([]) as gw:
            answer = await kind().user("Go.").send(AsgiClient(gw.gateway.api), headers={"authorization": f"Bearer {stranger.key}"})
            assert answer.status == 401


@every_player
@pytest.mark.parametrize("place", PLACES, ids=[name for name, _ in PLACES])
async def test_the_key_is_found_in_every_providers_place(gateway: Open, kind: type[Player], place: tuple[str, str]) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        answer = await kind().user("Go.").send(AsgiClient(gw.gateway.api), headers={place[0]: place[1].format(client.key)})
        assert answer.status == 200, answer.body
        assert len(await gw.completions(session)) == 1


async def test_google_takes_its_key_from_the_query(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        player = Google().user("Go.")
        answer = await AsgiClient(gw.gateway.api).post(f"{player.path(False)}?key={client.key}", player.body(False))
        assert answer.status == 200
        (made,) = await gw.completions(session)
        assert client.key not in str(made)


@every_player
async def test_the_prefix_wins_over_a_key_in_a_header(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        other, second = await gw.session()
        header, form = OWN_PLACE[kind]
        await kind().user("Go.").send(client, headers={header: form.format(second.key)})
        assert len(await gw.completions(session)) == 1
        assert await gw.completions(other) == []


@every_player
async def test_a_base_url_that_ends_in_a_slash_works(gateway: Open, kind: type[Player]) -> None:
    """getcmd-dev/cmd#157: `/v1beta//models` was not found. A base URL may end before, in or after the version, and after the key."""
    async with gateway(lambda call: "Hi.") as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        version, rest = re.fullmatch("(/v1(?:beta)?)(.*)", player.path(False)).groups()  # type: ignore[union-attr]
        for path in ("/" + version + rest, version + "/" + rest):
            assert (await client.post(path, player.body(False))).status == 200
        assert {completion.model_requested for completion in await gw.completions(session)} == {"m"}


def test_a_key_is_found_behind_two_slashes() -> None:
    request = parse_scope({"method": "POST", "path": "//s/the-key//v1/chat/completions", "headers": []})
    assert (request.key, request.path) == ("the-key", "/v1/chat/completions")


@every_player
async def test_a_closed_session_refuses_and_records_nothing(gateway: Open, kind: type[Player]) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        assert await gw.gateway.close_session(session)
        answer = await kind().user("Go.").send(client)
        assert answer.status == 410
        assert "closed" in kind().error(answer)[1]
        assert await gw.completions(session) == []
        assert gw.engine.calls == []


@every_player
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_session_closed_under_a_running_call_ends_it_in_shape(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway([Reply("late", delay_s=30)]) as gw:
        session, client = await gw.session()
        waiting = asyncio.create_task(kind().user("Go.").send(client, stream))
        await until(lambda: gw.engine.calls)
        await gw.gateway.close_session(session)
        answer = await waiting
        assert answer.status == 410
        assert "closed" in kind().error(answer)[1]
        (made,) = await gw.completions(session)
        assert (made.status, made.sampled_ids) == ("aborted", None)
        assert gw.engine.backend.cancelled == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(range(len(PLAYERS)))), min_size=2, max_size=8),
    headers=st.dictionaries(
        st.sampled_from(["x-claude-code-session-id", "session-id", "user-agent", "x-session-id"]), st.sampled_from(["a", "b"]), max_size=2
    ),
)
def test_b118_sessions_with_equal_prompts_never_cross(qwen3_tokenizer_dir: Path, moves: list[tuple[int, int]], headers: Any) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with scripted_gateway(
                lambda call: Reply(f"Answer {call.number}.", delay_s=0.001 * (call.number % 3)),
                Path(folder),
                tokenizer_dir=qwen3_tokenizer_dir,
                check=False,
            ) as gw:
                sessions = [await gw.session() for _ in range(3)]
                histories = {(one, which): PLAYERS[which]() for one in range(3) for which in range(len(PLAYERS))}
                heard: dict[int, list[str]] = {0: [], 1: [], 2: []}

                async def play(one: int) -> None:
                    for owner, which in moves:
                        if owner == one:
                            player = histories[one, which].user("Go.")
                            answer = await player.send(sessions[one][1], headers=headers)
                            heard[one].append(player.read(answer, False).text)

                await asyncio.gather(*(play(one) for one in range(3)))
                for one, (session, _) in enumerate(sessions):
                    made = await gw.completions(session)
                    assert sorted(completion.answer.text for completion in made) == sorted(heard[one])
                    own = set(heard[one])
                    for completion in made:
                        echoed = {message.text for message in completion.messages if message.role == "assistant"}
                        assert echoed <= own

    asyncio.run(run())


UNKNOWN = [
    ("POST", "/v1/embeddings", Chat),
    ("POST", "/v1/completions", Chat),
    ("POST", "/v1/chat/completions/x", Chat),
    ("GET", "/v1/chat/completions", Chat),
    ("POST", "/v1/responses/resp_x", Responses),
    ("POST", "/v1/responses/resp_x/frobnicate", Responses),
    ("PUT", "/v1/responses", Responses),
    ("POST", "/v1/messages/batches", Anthropic),
    ("GET", "/v1/messages", Anthropic),
    ("POST", "/v1/messages/count_tokens/x", Anthropic),
    ("POST", "/v1beta/models/m:embedContent", Google),
    ("POST", "/v1beta/models/m:batchGenerateContent", Google),
    ("POST", "/v1beta/models/m", Google),
    ("POST", "/v1beta/cachedContents", Google),
    ("POST", "/", Chat),
]


@pytest.mark.parametrize(("method", "path", "kind"), UNKNOWN, ids=[f"{method} {path}" for method, path, _ in UNKNOWN])
async def test_an_unknown_path_is_a_404_in_shape_and_never_a_generation(gateway: Open, method: str, path: str, kind: type[Player]) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        answer = await client.request(method, path, kind().user("Go.").body(False))
        assert answer.status == 404
        kind().error(answer)
        assert gw.engine.calls == []
        assert await gw.completions(session) == []


CONTROL = ["/sessions", "/metrics", "/admin/inference/status", "/admin/inference/pause", "/admin/policy", "/admin/recheck"]


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_control_routes_do_not_exist_where_sandboxes_look(gateway: Open, method: str, path: str) -> None:
    async with gateway([]) as gw:
        _, client = await gw.session()
        plain = AsgiClient(gw.gateway.api, {"authorization": f"Bearer {gw.gateway.admin_token}"})
        assert (await plain.request(method, path)).status == 401
        assert (await client.request(method, path)).status == 404
        assert not gw.gateway.gate.paused


@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_probes_are_answered_without_a_key(gateway: Open, path: str) -> None:
    async with gateway([]) as gw:
        answer = await AsgiClient(gw.gateway.api).request("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


async def test_a_head_is_a_get_without_its_body(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        made = (await client.post("/v1/responses", {"model": "m", "input": "Go."})).json()["id"]
        for path in ("/v1/models", "/v1/models/m", "/v1beta/models", f"/v1/responses/{made}", f"/v1/responses/{made}?stream=true"):
            whole, head = await client.get(path), await client.request("HEAD", path)
            assert (head.status, head.headers, head.body) == (200, whole.headers, b"")
        for path in ("/v1/responses", "/v1/responses/resp_x", "/v1/chat/completions"):
            refused = await client.request("HEAD", path)
            assert (refused.status, refused.body) == (404, b"")


async def test_a_websocket_upgrade_is_refused_with_426(gateway: Open) -> None:
    async with gateway([]) as gw:
        _, client = await gw.session()
        headers = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-key": "x", "sec-websocket-version": "13"}
        answer = await client.get("/v1/responses", headers)
        assert answer.status == 426
        Responses().error(answer)


async def test_the_models_listener_tells_no_more_than_green_or_red(gateway: Open) -> None:
    async with gateway([]) as gw:
        assert (await AsgiClient(gw.gateway.api).get("/health")).json() == {"status": "ok"}


def admin_routes(gw: Any) -> list[tuple[str, str]]:
    found = []
    for route in gw.gateway.admin.routes:
        for method in sorted(route.methods):
            found.append((method, route.path.replace("{session_id}", "ses_x")))
    return found


async def test_every_control_route_but_health_needs_the_token(gateway: Open) -> None:
    async with gateway([]) as gw:
        routes = admin_routes(gw)
        assert len(routes) > 10
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": gw.gateway.admin_token}, {"authorization": "Bearer "}):
                answer = await AsgiClient(gw.gateway.admin).request(method, path, {}, headers)
                assert answer.status == (200 if path == "/health" else 401), (method, path, answer.status)
        assert not gw.gateway.gate.paused


async def test_the_control_api_makes_shows_lists_and_ends_sessions(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        admin = AsgiClient(gw.gateway.admin, {"authorization": f"Bearer {gw.gateway.admin_token}"})
        made = await admin.post("/sessions", {"kind": "eval", "metadata": {"task": "t"}, "settings": {"budgets": {"max_turns": 3}}})
        assert made.status == 201
        session = made.json()
        assert session["base_url"].endswith(f"/s/{session['key']}")
        model = AsgiClient(gw.gateway.api, {"authorization": f"Bearer {session['key']}"})
        await Chat().user("Go.").turn(model)
        shown = (await admin.get(f"/sessions/{session['session_id']}")).json()
        assert (shown["completion_count"], shown["kind"], shown["status"]) == (1, "eval", "open")
        assert session["key"] not in str(shown)
        listed = (await admin.get("/sessions")).json()["sessions"]
        assert [row["session_id"] for row in listed] == [session["session_id"]]
        ended = await admin.request("DELETE", f"/sessions/{session['session_id']}")
        assert ended.json()["closed"] is True
        assert (await admin.request("DELETE", f"/sessions/{session['session_id']}")).json()["closed"] is False
        assert (await Chat().user("Go.").send(model)).status == 410
        assert (await admin.get("/sessions/none")).status == 404


WRONG_SESSIONS: list[dict[str, Any]] = [
    {"kind": "x"},
    {"settings": []},
    {"metadata": "x"},
    {"session_id": ""},
    {"settings": {"budgets": {"max_turns": "many"}}},
    {"settings": {"budgets": {"max_turn": 3}}},
    {"settings": {"sampling": {"temperature": "hot"}}},
    {"settings": {"sampling": {"temprature": 1}}},
    {"settings": {"sampling": 3}},
    {"settings": {"stream": "sometimes"}},
]


@pytest.mark.parametrize("body", WRONG_SESSIONS, ids=str)
async def test_wrong_session_settings_are_refused_by_name(gateway: Open, body: dict[str, Any]) -> None:
    async with gateway([]) as gw:
        admin = AsgiClient(gw.gateway.admin, {"authorization": f"Bearer {gw.gateway.admin_token}"})
        answer = await admin.post("/sessions", body)
        assert answer.status == 400
        named = next(iter(body)) if not isinstance(body.get("settings"), dict) else f"settings.{next(iter(body['settings']))}"
        assert answer.json()["error"]["param"] == named


async def test_a_session_id_can_be_given_once(gateway: Open) -> None:
    async with gateway([]) as gw:
        admin = AsgiClient(gw.gateway.admin, {"authorization": f"Bearer {gw.gateway.admin_token}"})
        assert (await admin.post("/sessions", {"session_id": "mine"})).status == 201
        assert (await admin.post("/sessions", {"session_id": "mine"})).status == 409


async def test_keys_stand_in_no_log_metric_file_or_export(gateway: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway([TEXT, Reply(error=RuntimeError("boom"))]) as gw:
        session, client = await gw.session()
        await Google().user("Go.").send(AsgiClient(gw.gateway.api), headers={"x-goog-api-key": client.key})
        await Chat().user("Go.").send(client)
        await Chat().user("Go.").send(AsgiClient(gw.gateway.api), headers={"authorization": f"Bearer {client.key}x"})
        metrics = gw.gateway.metrics.exposition().decode()
        exported = b"".join(completion_to_json(made) for made in await gw.completions(session)).decode()
    assert client.key not in caplog.text
    assert client.key not in metrics
    assert session.id not in metrics
    assert exported
    assert client.key not in exported
    secret = client.key.removeprefix("sk-polar-").encode()
    for file in files(tmp_path):
        assert secret not in file.read_bytes(), file.name
        assert file.stat().st_mode & 0o077 == 0, file.name


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
