"""Bodies of every kind: too large, packed, broken, odd, deep."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import zstandard
from gateway_players import NAMES, PLAYERS, Anthropic, Chat, Google, Player, Responses

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@every_player
async def test_a_body_over_the_cap_is_a_413_in_shape(gateway: Open, kind: type[Player]) -> None:
    async with gateway([], max_body_mb=1) as gw:
        session, client = await gw.session()
        answer = await kind().user("x" * 1_100_000).send(client)
        assert answer.status == 413
        assert "max_body_mb" in kind().error(answer)[1]
        assert await gw.completions(session) == []


@every_player
async def test_a_small_body_that_inflates_over_the_cap_is_a_413(gateway: Open, kind: type[Player]) -> None:
    async with gateway([], max_body_mb=1) as gw:
        _, client = await gw.session()
        raw = gzip.compress(orjson.dumps(kind().user("x" * 3_000_000).body(False)))
        assert len(raw) < 100_000
        assert (await client.post(kind().path(False), raw, {"content-encoding": "gzip"})).status == 413


@every_player
async def test_b89_five_megabytes_are_served(gateway: Open, kind: type[Player]) -> None:
    """In images, so that no tokenizer has to read them."""
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        data = "A" * 5_000_000
        url = f"data:image/png;base64,{data}"
        player = kind(tools=False)
        body = {
            Anthropic: {"messages": [{"role": "user", "content": [image_block(data)]}]},
            Chat: {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]}]
            },
            Responses: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            Google: {"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": data}}]}]},
        }[kind]
        answer = await client.post(player.path(False), {**player.body(False), **body})
        assert answer.status == 200, answer.body[:300]


def image_block(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "zstd of several frames": lambda raw: b"".join(map(zstandard.compress, (raw[:9], raw[9:]))),
    "gzip of several members": lambda raw: b"".join(map(gzip.compress, (raw[:9], raw[9:]))),
    "identity": bytes,
}


@every_player
@pytest.mark.parametrize("encoding", PACKERS)
async def test_packed_bodies_are_unpacked(gateway: Open, kind: type[Player], encoding: str) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        player = kind().user("Go.")
        raw = PACKERS[encoding](orjson.dumps(player.body(False)))
        assert (await client.post(player.path(False), raw, {"content-encoding": encoding.partition(" ")[0]})).status == 200


@every_player
@pytest.mark.parametrize(
    ("raw", "encoding", "status"),
    [(b"no gzip", "gzip", 400), (b"no zstd", "zstd", 400), (gzip.compress(b"{}" * 999)[:20], "gzip", 400), (b"{}", "br", 415)],
    ids=["gzip", "zstd", "cut", "unknown"],
)
async def test_bodies_that_do_not_unpack_are_refused(gateway: Open, kind: type[Player], raw: bytes, encoding: str, status: int) -> None:
    async with gateway([]) as gw:
        _, client = await gw.session()
        answer = await client.post(kind().path(False), raw, {"content-encoding": encoding})
        assert answer.status in (status, 400)
        kind().error(answer)


BAD = {"cut": b'{"model":', "array": b"[]", "empty": b"", "byte": b"\xff", "text": b"hello", "number": b"3", "nan": b'{"model": NaN}'}


@every_player
@pytest.mark.parametrize("bad", BAD)
async def test_b90_bad_json_is_a_400_and_leaves_no_trace(gateway: Open, kind: type[Player], bad: str) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        answer = await client.post(kind().path(False), BAD[bad])
        assert answer.status == 400
        kind().error(answer)
        assert await gw.completions(session) == []


LISTS = {Anthropic: "messages", Chat: "messages", Responses: "input", Google: "contents"}


@every_player
@pytest.mark.parametrize("value", [3, [None], [3], [[]]], ids=str)
async def test_b90_messages_of_a_wrong_type_are_a_400(gateway: Open, kind: type[Player], value: Any) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        answer = await client.post(kind().path(False), {**kind().user("Go.").body(False), LISTS[kind]: value})
        assert answer.status == 400
        kind().error(answer)
        assert await gw.completions(session) == []


@every_player
async def test_b90_good_json_of_another_content_type_is_served(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        player = kind().user("Go.")
        assert (await client.post(player.path(False), player.body(False), {"content-type": "text/plain"})).status == 200


@every_player
async def test_a_byte_order_mark_is_passed_over(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        player = kind().user("Go.")
        assert (await client.post(player.path(False), codecs.BOM_UTF8 + orjson.dumps(player.body(False)))).status == 200


@every_player
async def test_a_lone_surrogate_becomes_a_replacement_character(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        raw = json.dumps(kind().user("a \ud800 b").body(False)).encode()
        assert (await client.post(kind().path(False), raw)).status == 200
        assert (await gw.completions(session))[0].messages[-1].text == "a � b"


def nested(depth: int, leaf: Any = 1) -> Any:
    value = leaf
    for _ in range(depth):
        value = {"a": value}
    return value


@every_player
@pytest.mark.parametrize("depth", [100, 300, 900, 5000])
@pytest.mark.parametrize("place", ["unknown", "schema", "arguments"])
async def test_deep_nesting_is_served_or_refused_never_a_crash(gateway: Open, kind: type[Player], depth: int, place: str) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        _, client = await gw.session()
        player = kind().user("Go.")
        deep = '{"a":' * depth + "1" + "}" * depth
        body = player.body(False)
        if place == "unknown":
            body["some_new_field"] = "DEEP"
        elif place == "schema":
            text = orjson.dumps(body).decode().replace('"properties":{"command":{"type":"string"}}', '"properties":{"command":"DEEP"}')
            body = orjson.loads(text)
        else:
            body = with_call(player)
        raw = orjson.dumps(body).decode().replace('"DEEP"', deep).encode()
        answer = await client.post(player.path(False), raw)
        assert answer.status in (200, 400), answer.body[:300]


def with_call(player: Player) -> dict[str, Any]:
    """The player's body with a call in its history whose arguments are `"DEEP"`."""
    history: dict[type[Player], list[Any]] = {
        Anthropic: [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "bash", "input": {"x": "DEEP"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
        ],
        Chat: [
            {"role": "assistant", "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "bash", "arguments": "DEEP"}}]},
            {"role": "tool", "tool_call_id": "t1", "content": "ok"},
        ],
        Responses: [
            {"type": "function_call", "call_id": "t1", "name": "bash", "arguments": "DEEP"},
            {"type": "function_call_output", "call_id": "t1", "output": "ok"},
        ],
        Google: [
            {"role": "model", "parts": [{"functionCall": {"name": "bash", "args": {"x": "DEEP"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "DEEP"}}}]},
        ],
    }
    player.history += history[type(player)]
    return player.body(False)
