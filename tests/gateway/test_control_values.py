"""Values that a control call may carry: what could not work later is refused now, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polar.testing.asgi import AsgiClient

Open = Callable[..., Any]


def admin(gw: Any) -> AsgiClient:
    return AsgiClient(gw.gateway.admin, {"authorization": f"Bearer {gw.gateway.admin_token}"})


@pytest.mark.parametrize("limit", ["0", "-5", "99999999999999999999"])
async def test_a_listing_takes_any_limit(gateway: Open, limit: str) -> None:
    async with gateway([]) as gw:
        assert (await admin(gw).get(f"/sessions?limit={limit}")).json() == {"sessions": [], "next": None}
        await gw.session()
        assert len((await admin(gw).get(f"/sessions?limit={limit}")).json()["sessions"]) == 1


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\0b", "a\n", "x" * 201, 5])
async def test_a_session_id_that_no_path_can_hold_is_refused(gateway: Open, name: Any) -> None:
    async with gateway([]) as gw:
        refused = await admin(gw).post("/sessions", {"session_id": name})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "session_id")
        assert (await admin(gw).post("/sessions", {"session_id": "task-1:run.2@α"})).status == 201


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": {"temperature": -1}},
        {"sampling": {"temperature": 1e9}},
        {"sampling": {"top_p": 0}},
        {"sampling": {"top_k": 2**40}},
        {"sampling": {"repetition_penalty": 0}},
        {"budgets": {"max_turns": -1}},
        {"budgets": {"max_tokens": -1}},
        {"budgets": {"max_seconds": -0.5}},
    ],
)
async def test_settings_that_no_call_could_be_made_with_are_refused(gateway: Open, settings: dict[str, Any]) -> None:
    async with gateway([]) as gw:
        refused = await admin(gw).post("/sessions", {"settings": settings})
        assert (refused.status, refused.json()["error"]["param"]) == (400, f"settings.{next(iter(settings))}")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "x"])
async def test_a_pause_with_no_time_is_refused_and_pauses_nothing(gateway: Open, seconds: str) -> None:
    async with gateway([]) as gw:
        refused = await admin(gw).request("POST", f"/admin/inference/pause?timeout_seconds={seconds}")
        assert (refused.status, refused.json()["error"]["param"]) == (400, "timeout_seconds")
        assert not gw.gateway.gate.paused


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kin": "eval"}, "kin"),
        ({"budgets": {"max_turns": 3}}, "budgets"),
        ({"settings": {"budget": {"max_turns": 3}}}, "settings.budget"),
        ({"settings": {"budgets": {"max_turn": 3}}}, "settings.budgets"),
        ({"settings": {"sampling": {"temprature": 1}}}, "settings.sampling"),
    ],
)
async def test_a_field_that_would_do_nothing_is_refused_by_its_name(gateway: Open, body: dict[str, Any], field: str) -> None:
    async with gateway([]) as gw:
        refused = await admin(gw).post("/sessions", body)
        assert (refused.status, refused.json()["error"]["param"]) == (400, field)
        assert (await admin(gw).get("/sessions")).json()["sessions"] == []


async def test_a_setting_at_the_top_is_told_where_it_belongs(gateway: Open) -> None:
    async with gateway([]) as gw:
        refused = await admin(gw).post("/sessions", {"budgets": {"max_turns": 3}})
        assert "settings.budgets" in refused.json()["error"]["message"]


async def test_sessions_of_the_same_moment_do_not_end_the_list(gateway: Open) -> None:
    """They stand on one page, which is longer than asked for; what is older comes on the next."""
    async with gateway([]) as gw:
        times = iter([1.0, 2.0, 2.0, 2.0, 3.0])
        gw.gateway.sessions._clock = lambda: next(times)
        made = [(await gw.session())[0].id for _ in range(5)]
        found: list[str] = []
        query = "limit=2"
        while True:
            page = (await admin(gw).get(f"/sessions?{query}")).json()
            found += [one["session_id"] for one in page["sessions"]]
            if page["next"] is None:
                break
            query = f"limit=2&before={page['next']}"
        assert sorted(found) == sorted(made)
