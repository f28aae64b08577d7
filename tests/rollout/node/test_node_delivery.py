"""Results reach whoever waits for them, at least once, whatever is down meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node_world import Receiver, World, dispatch, ended, until

from polar.errors import StoreError
from polar.records import Session
from polar.rollout.node.deliveries import REFUSALS
from polar.rollout.node.link import Orders

Build = Callable[..., World]


async def test_a_result_goes_to_the_service_and_is_forgotten(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: receiver.results)
        await until(lambda: not node.deliveries.waiting)
        assert node.spool.owed() == []
        assert node.spool.unsettled() == []
    _, body, headers = next(post for post in receiver.posts if post[0] == "/callbacks/session_result")
    assert body["delivery_id"] == "ses_1.0" == headers["x-polar-delivery"]
    assert headers["authorization"] == "Bearer service-token"
    assert len(receiver.results) == 1


async def test_a_callback_gets_the_result_and_never_the_services_token(world: Build, receiver: Receiver) -> None:
    async with world().node() as node:
        await node.dispatch(dispatch(callback_url=f"{receiver.url}/hook"))
        await until(lambda: receiver.of("/hook"))
        await until(lambda: not node.deliveries.waiting)
    assert "authorization" not in receiver.posts[0][2]


async def test_a_result_that_is_refused_is_sent_again(world: Build, receiver: Receiver) -> None:
    statuses = iter([500, 503, 401, 200])
    receiver.answer = lambda result: next(statuses)
    async with world().node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: len(receiver.results) == 4)
        await until(lambda: not node.deliveries.waiting)
    assert len({result["delivery_id"] for result in receiver.results}) == 1


async def test_a_result_that_nobody_wants_is_forgotten(world: Build, receiver: Receiver) -> None:
    receiver.answer = lambda result: 410
    async with world().node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: receiver.results)
        await until(lambda: not node.deliveries.waiting)
    assert len(receiver.results) == 1


async def test_a_service_that_is_down_gets_everything_later(world: Build, receiver: Receiver) -> None:
    receiver.up = False
    async with world().node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: node.deliveries.waiting)
        assert receiver.posts == []
        receiver.up = True
        await until(lambda: receiver.of("/nodes/register"))
        await until(lambda: receiver.results)


async def test_an_undelivered_result_survives_the_node(world: Build, receiver: Receiver) -> None:
    build = world()
    receiver.answer = lambda result: 500
    async with build.node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: receiver.results)
        node.deliveries._retry.first_seconds = node.deliveries._retry.longest_seconds = 100.0
    receiver.posts.clear()
    receiver.answer = lambda result: 200
    async with build.node(receiver) as node:
        await until(lambda: receiver.results)
        await until(lambda: not node.deliveries.waiting)
    assert [result["reward"] for result in receiver.results] == [1.0]


async def test_the_node_registers_and_tells_what_it_has(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await node.dispatch(dispatch("call\nsleep 60"))
        await until(
            lambda: any(beat["attempts"] == ["ses_1.0"] and beat["metrics"]["run_inflight"] for beat in receiver.of("/nodes/node-1/h"))
        )
        [registration] = receiver.of("/nodes/register")
        assert registration["node_id"] == "node-1"
        assert registration["token"] == node.gateway.admin_token
        assert registration["instance"] == node.instance == receiver.of("/nodes/node-1/heartbeat")[0]["instance"]
        assert "fake" in registration["metrics"]["backends"]


async def test_a_node_that_is_not_known_registers_again(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver):
        await until(lambda: receiver.of("/nodes/node-1/heartbeat"))
        receiver.known = False
        await until(lambda: len(receiver.of("/nodes/register")) == 2)


async def test_states_are_told_in_order(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await node.dispatch(dispatch("sleep 0.5\ncall", budget={"first_call_seconds": 0.1}))
        await until(lambda: receiver.results)
        await asyncio.sleep(0.3)
    told = [state for batch in receiver.of("/callbacks/session_state") for state in batch]
    statuses = list(dict.fromkeys(state["status"] for state in told))
    assert statuses == ["REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING"]
    assert any("no model call" in state.get("warning", "") for state in told)
    assert {state["attempt"] for state in told} == {0}


async def test_the_service_cancels_by_heartbeat(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await node.dispatch(dispatch("call\nsleep 60"))
        await until(lambda: receiver.of("/nodes/node-1/heartbeat"))
        receiver.orders = {"cancel": ["ses_1.0", "other.1"]}
        [result] = await until(lambda: receiver.results)
    assert result["outcome"] == "cancelled"


async def test_what_the_service_forgets_is_ended_and_not_delivered(world: Build, receiver: Receiver) -> None:
    build = world()
    async with build.node(receiver) as node:
        await node.dispatch(dispatch("call\nsleep 60"))
        await until(lambda: receiver.of("/nodes/node-1/heartbeat"))
        receiver.orders = {"cancel": ["ses_1.0"], "forget": ["ses_1.0"]}
        await until(lambda: node.books.find("ses_1") is None)
        assert node.spool.owed() == []
    assert receiver.results == []
    assert build.left() == []


async def test_a_dispatch_with_a_callback_is_none_of_the_services(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await node.dispatch(dispatch("call\nsleep 0.5", callback_url=f"{receiver.url}/hook"))
        receiver.orders = {"cancel": ["ses_1.0"], "forget": ["ses_1.0"]}
        [result] = await until(lambda: receiver.of("/hook"))
    assert result["outcome"] == "graded"
    assert all(beat["attempts"] == [] for beat in receiver.of("/nodes/node-1/heartbeat"))


async def test_a_node_that_ends_gives_back_what_ran(world: Build, receiver: Receiver) -> None:
    build = world()
    async with build.node(receiver) as node:
        await node.dispatch(dispatch("call\nsleep 60"))
        await until(lambda: (found := node.books.find("ses_1")) and found.turns)
    [result] = receiver.results
    assert (result["outcome"], result["error_code"]) == ("infrastructure", "node_shutdown")
    assert build.left() == []


async def test_a_full_disk_is_waited_for(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        put, tries = node.spool.put, 0

        def full_twice(*arguments: object) -> object:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise StoreError("No space left on device")
            return put(*arguments)  # type: ignore[arg-type]

        node.spool.put = full_twice  # type: ignore[method-assign,assignment]
        request = dispatch()
        await node.dispatch(request)
        await until(lambda: tries == 1)
        assert node.heartbeat().attempts == ["ses_1.0"]
        await until(lambda: receiver.results)
    assert tries == 3


async def test_what_nobody_wants_leaves_no_open_session_on_a_disk_that_is_full(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await node.dispatch(dispatch("call\nsleep 60"))
        await until(lambda: (found := node.books.find("ses_1")) and found.turns)
        close, tries = node.gateway.close_session, 0

        async def full_thrice(record: Session) -> bool:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise StoreError("No space left on device")
            return await close(record)

        node.gateway.close_session = full_thrice  # type: ignore[method-assign]
        receiver.orders = {"cancel": ["ses_1.0"], "forget": ["ses_1.0"]}
        await until(lambda: node.books.find("ses_1") is None)
        record = await node.gateway.store.session("ses_1.0")
        assert record is not None
        assert record.closed is not None
        assert node.spool.unsettled() == node.spool.owed() == []
    assert receiver.results == []


async def test_a_node_that_ends_on_a_full_disk_says_at_its_next_start_what_was_lost(world: Build, receiver: Receiver) -> None:
    build = world()
    async with build.node() as node:

        def full(*arguments: object) -> object:
            raise StoreError("No space left on device")

        node.spool.put = full  # type: ignore[method-assign,assignment]
        await node.dispatch(dispatch(callback_url=f"{receiver.url}/hook"))
        await until(lambda: (found := node.books.find("ses_1")) and found.status == "COMPLETED")
    assert receiver.posts == []
    async with build.node():
        [result] = await until(lambda: receiver.of("/hook"))
    assert (result["outcome"], result["error_code"]) == ("infrastructure", "node_lost")


async def test_without_a_service_a_result_waits_to_be_fetched(world: Build) -> None:
    build = world()
    async with build.node() as node:
        request = dispatch()
        await node.dispatch(request)
        await ended(node, request)
    async with build.node() as node:
        assert node.spool.result("ses_1.0").reward == 1.0
        assert node.books.owed("ses_1") == "ses_1.0"


async def test_a_result_of_the_service_is_never_given_up(world: Build, receiver: Receiver) -> None:
    """The node lists it in its heartbeats as long as it is here: a session whose result is given up would wait for ever."""
    receiver.answer = lambda result: 503
    async with world().node(receiver) as node:
        node.deliveries._retry.give_up_seconds = 0.01
        await node.dispatch(dispatch())
        await until(lambda: len(receiver.results) >= 3)
        receiver.answer = lambda result: 200
        await until(lambda: not node.deliveries.waiting)


async def test_a_result_that_the_service_calls_wrong_is_set_aside_and_its_session_hears_why(world: Build, receiver: Receiver) -> None:
    receiver.answer = lambda result: 422 if result["outcome"] == "graded" else 200
    build = world()
    async with build.node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: receiver.results and not node.attempts and not node.deliveries.waiting)
    *refused, last = receiver.results
    assert [one["outcome"] for one in refused] == ["graded"] * REFUSALS
    assert (last["outcome"], last["error_code"], last["reward"], last["delivery_id"]) == (
        "infrastructure",
        "result_refused",
        None,
        "ses_1.0",
    )
    assert [path.name for path in (build.folder / "work").rglob("refused/*")] == ["ses_1.0.zst"]
    async with build.node(receiver) as node:
        assert node.deliveries.waiting == []


async def test_a_service_that_takes_no_word_of_an_attempt_holds_up_nothing(world: Build, receiver: Receiver) -> None:
    receiver.answer = lambda result: 422
    build = world()
    async with build.node(receiver) as node:
        await node.dispatch(dispatch())
        await until(lambda: receiver.results and not node.attempts and not node.deliveries.waiting)
    assert len(receiver.results) == 2 * REFUSALS
    assert [path.name for path in (build.folder / "work").rglob("refused/*")] == ["ses_1.0.zst"]


async def test_a_heartbeat_that_fails_inside_the_node_is_not_its_last(world: Build, receiver: Receiver) -> None:
    async with world().node(receiver) as node:
        await until(lambda: receiver.of("/nodes/node-1/heartbeat"))
        assert node.link is not None
        sound = node.link.obey

        async def spoiled(orders: Orders) -> None:
            node.link.obey = sound
            raise OSError("the disk is read-only")

        node.link.obey = spoiled
        receiver.orders = {"cancel": ["x.0"]}
        await until(lambda: node.link.obey is sound)
        receiver.posts.clear()
        await until(lambda: receiver.of("/nodes/node-1/heartbeat"))
