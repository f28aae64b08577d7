"""Laws 1, 2 and 7 as properties of the whole gateway: whatever is sampled, in whatever dialect, however it is sent."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from pathlib import Path

import orjson
import pytest
from gateway_players import NAMES, PLAYERS, Player
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_capture import extends

from polar.testing.engine import Call, Reply, fake_logprob
from polar.testing.gateway import scripted_gateway

MARKS = re.compile("(</?think>|</?tool_call>)")
END = 151645
"""`<|im_end|>`."""
pieces = st.sampled_from([*"abc XYZ01\n\t\"'\\{}[]:,.é漢🙂", "  ", "\n\n", " the", "</", "ing", "\\u00e9"])
texts = st.lists(pieces, max_size=10).map("".join)
arguments = st.dictionaries(st.sampled_from(["command", "é", "n"]), st.one_of(texts, st.integers(-99, 99), st.booleans()), max_size=2)


@st.composite
def sampled_answers(draw: st.DrawFn) -> str:
    """Text with or without thinking and calls, in JSON that no serialiser writes, or with a call that cannot be read."""
    text = draw(st.sampled_from(["", "<think>\n", "<think>"]))
    if text:
        text += draw(texts) + draw(st.sampled_from(["</think>", "\n</think>\n\n"]))
    text += draw(texts)
    for value in draw(st.lists(arguments, max_size=2)):
        separators = draw(st.sampled_from([(",", ":"), (" , ", " :  ")]))
        body = json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators)
        text += f'<tool_call>\n{{"name": "bash", "arguments": {body}}}\n</tool_call>' + draw(st.sampled_from(["", "\n"]))
    if draw(st.integers(0, 5)) == 0:
        text += draw(st.sampled_from(["<tool_call>\n{oops}\n</tool_call>", "<tool_call>\nno end"]))
    return text


def split(call: Call, text: str, seed: int) -> list[int]:
    """Ids that decode to `text`, cut where the tokenizer would not cut it (marks stay whole)."""
    dice = random.Random(seed)
    ids: list[int] = []
    for piece in MARKS.split(text):
        if MARKS.fullmatch(piece):
            ids += call.tokenizer.encode(piece)
            continue
        while piece:
            size = dice.choice([1, 2, 5, 40])
            ids += call.tokenizer.encode(piece[:size])
            piece = piece[size:]
    return [*ids, END]


@pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    answers=st.lists(sampled_answers(), min_size=2, max_size=4),
    ways=st.lists(st.sampled_from(["whole", "stream", "live"]), min_size=4, max_size=4),
    seed=st.integers(0, 999),
    reordered=st.booleans(),
)
def test_every_turn_extends_the_one_before_and_every_token_is_kept(
    qwen3_tokenizer_dir: Path, kind: type[Player], answers: list[str], ways: list[str], seed: int, reordered: bool
) -> None:
    async def run() -> None:
        def script(call: Call) -> Reply:
            return Reply(ids=split(call, answers[call.number], seed))

        with tempfile.TemporaryDirectory() as folder:
            async with scripted_gateway(script, Path(folder), tokenizer_dir=qwen3_tokenizer_dir, check=False) as gw:
                session, client = await gw.session()
                player = kind().user("Go.")
                for number, way in enumerate(ways[: len(answers)]):
                    state = await gw.gateway.sessions.get(client.key)
                    state.record.settings["stream"] = "live" if way == "live" else "replay"
                    turn = await player.turn(client, way != "whole")
                    if reordered:
                        player.history = orjson.loads(orjson.dumps(player.history, option=orjson.OPT_SORT_KEYS))
                    if turn.calls:
                        player.results(turn, *(f"result {number}" for _ in turn.calls))
                    else:
                        player.user(f"More {number}.")
                made = await gw.completions(session)
        assert len(made) == len(answers)
        for number, one in enumerate(made):
            assert one.sampled_ids is not None
            assert one.logprobs is not None
            ids = one.sampled_ids.tolist()
            assert gw.engine.tokenizer.decode(ids, skip_special=False) == answers[number] + "<|im_end|>"
            assert one.logprobs.tolist() == [fake_logprob(token, at) for at, token in enumerate(ids)]
            assert one.broken is None
            assert one.parent == (number - 1 if number else None)
            assert number == 0 or extends(one, made[number - 1])

    asyncio.run(run())
