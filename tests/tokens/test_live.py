"""What a live reader emits, joined, is what `read` makes of the whole; and it never emits half of anything."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from polar.chat import Answer, ChatDelta, FinishDelta, Message, Sampling, TextDelta, ThinkingDelta, ToolCallDelta, deltas
from polar.tokens.live import LiveReader
from polar.tokens.path import TokenPath
from polar.tokens.rendering import Markers
from polar.tokens.tokenizer import Tokenizer
from tokens.samples import answers, split_ids
from tokens.session import TOOLS, Session, user
from tokens.test_laws import BAD_BLOCKS

lawful = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def byte_ids(path: TokenPath, text: str) -> list[int]:
    """One token a byte, so that characters come in pieces."""
    backend = path.tokenizer.backend
    alphabet = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    spare = iter(range(256, 512))
    alphabet |= {byte: chr(next(spare)) for byte in range(256) if byte not in alphabet}
    return [backend.token_to_id(alphabet[byte]) for byte in text.encode()]


def live_answer(
    path: TokenPath, ids: list[int], sizes: list[int], *, stop: str | None = None
) -> tuple[list[ChatDelta], Answer, list[ChatDelta]]:
    session = Session(path)
    plan = session.ask(user("u"), tools=TOOLS, sampling=Sampling(stop=() if stop is None else (stop,)))
    reader = path.live(plan)
    early: list[ChatDelta] = []
    at = 0
    for size in sizes:
        early += reader.feed(ids[at : at + size])
        at += size
    early += reader.feed(ids[at:])
    reading = session.answer(plan, ids, stop=stop if stop is not None and stop in path.tokenizer.decode(ids) else None)
    return early, reading.answer, [*early, *reader.finish(reading)]


def joined(made: list[ChatDelta]) -> tuple[str, str, list[ToolCallDelta], FinishDelta]:
    thinking = "".join(delta.text for delta in made if isinstance(delta, ThinkingDelta))
    text = "".join(delta.text for delta in made if isinstance(delta, TextDelta))
    last = made[-1]
    assert isinstance(last, FinishDelta)
    return thinking, text, [delta for delta in made if isinstance(delta, ToolCallDelta)], last


sizes = st.lists(st.integers(0, 7), max_size=30)


@lawful
@given(answers(), st.sampled_from(["", "", *BAD_BLOCKS]), st.booleans(), sizes, st.integers(0, 2**32))
def test_live_equals_read(qwen3_path: TokenPath, text: str, bad: str, cut: bool, sizes: list[int], seed: int) -> None:
    ids = split_ids(qwen3_path.tokenizer, text.removesuffix("<|im_end|>") + bad + "<|im_end|>", seed)
    if cut:
        ids = ids[: max(1, len(ids) // 2)]
    early, answer, made = live_answer(qwen3_path, ids, sizes)
    assert joined(made) == joined(list(deltas(answer)))
    assert not any("<tool_call>" in delta.text for delta in early if isinstance(delta, TextDelta))


@lawful
@given(st.sampled_from(["END", "\n\nUser:", "\u6f22", "aa"]), answers(calls=False), sizes, st.integers(0, 2**32))
def test_live_never_shows_a_stop_string(qwen3_path: TokenPath, stop: str, text: str, sizes: list[int], seed: int) -> None:
    body = text.removesuffix("<|im_end|>")
    body = body.split(stop, 1)[0] + stop
    _, answer, made = live_answer(qwen3_path, split_ids(qwen3_path.tokenizer, body, seed), sizes, stop=stop)
    assert joined(made) == joined(list(deltas(answer)))
    assert answer.finish == "stop_sequence"
    assert answer.stop_sequence == stop
    assert stop not in answer.message.text


@lawful
@given(st.permutations(["STOP", "OP", "TOP."]), st.booleans(), st.sampled_from(["", "a", "ST", "<think>\nT\n</think>\n\n"]), sizes)
def test_of_stop_strings_that_end_together_the_engine_names_the_one(
    qwen3_path: TokenPath, stops: list[str], first: bool, before: str, sizes: list[int]
) -> None:
    """vLLM takes the first of its list, others the one that begins first: nothing between the two may have been shown."""
    text = before + "STOP"
    found = [stop for stop in stops if stop in text]
    matched = found[0] if first else min(found, key=text.index)
    session = Session(qwen3_path)
    plan = session.ask(user("u"), sampling=Sampling(stop=tuple(stops)))
    reader = qwen3_path.live(plan)
    ids = qwen3_path.tokenizer.encode(text)
    made: list[ChatDelta] = []
    at = 0
    for size in [*sizes, len(ids)]:
        made += reader.feed(ids[at : at + size])
        at += size
    reading = session.answer(plan, ids, stop=matched)
    assert joined([*made, *reader.finish(reading)]) == joined(list(deltas(reading.answer)))


@lawful
@given(st.text(st.sampled_from("aé漢🙂 \n"), max_size=20), sizes)
def test_live_never_shows_half_a_character(qwen3_path: TokenPath, text: str, sizes: list[int]) -> None:
    ids = byte_ids(qwen3_path, text)
    early, answer, made = live_answer(qwen3_path, ids, sizes)
    assert joined(made)[1] == answer.message.text == text
    assert not any("\ufffd" in delta.text for delta in early if isinstance(delta, TextDelta))


def test_live_shows_text_as_it_comes(qwen3_path: TokenPath) -> None:
    session = Session(qwen3_path)
    reader = qwen3_path.live(session.ask(user("u")))
    encode = qwen3_path.tokenizer.encode
    assert reader.feed(encode("<think>\nfirst")) == [ThinkingDelta("first")]
    assert reader.feed(encode(" I think\n</think>\n\n")) == [ThinkingDelta(" I think")]
    assert reader.feed(encode("Hello")) == [TextDelta("Hello")]
    assert reader.feed(encode(" world \n")) == [TextDelta(" world")]
    assert reader.feed(encode("<tool_call>")) == []


def test_broken_bytes_without_end_stay_linear(qwen3_path: TokenPath) -> None:
    ids = [byte_ids(qwen3_path, "漢")[0]] * 4000
    _, answer, made = live_answer(qwen3_path, ids, [1] * len(ids))
    assert joined(made)[1] == answer.message.text


def test_other_formats_emit_everything_at_the_end(qwen3_path: TokenPath) -> None:
    from polar.tokens.live import LiveReader

    session = Session(qwen3_path)
    plan = session.ask(user("u"))
    reader = LiveReader(qwen3_path.tokenizer, None, prefilled=False)
    ids = qwen3_path.tokenizer.encode("hello<|im_end|>")
    assert reader.feed(ids) == []
    reading = session.answer(plan, ids)
    assert reader.finish(reading) == list(deltas(reading.answer))
    assert reading.message == Message("assistant", "hello")


def test_a_decoder_that_treats_the_start_of_a_text_specially_is_given_context() -> None:
    backend = Backend(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, unk_token="\u2581a"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, name_or_path="words", config={}, chat_template=None, hash="")
    assert not tokenizer.decodes_in_pieces
    reader = LiveReader(tokenizer, Markers(10, 11, 12, 13, frozenset({14})), prefilled=False)
    made = [*reader.feed([0]), *reader.feed([1, 0]), *reader.feed([1])]
    assert [delta.text for delta in made if isinstance(delta, TextDelta)] == ["a", " b a", " b"]


@lawful
@given(st.text(st.sampled_from("aé漢🙂 \n"), max_size=20), st.text(st.sampled_from("aé漢🙂 \n"), max_size=20))
def test_byte_level_texts_are_the_sum_of_their_pieces(qwen3_path: TokenPath, first: str, second: str) -> None:
    tokenizer = qwen3_path.tokenizer
    assert tokenizer.decodes_in_pieces
    ids = byte_ids(qwen3_path, first)
    assert tokenizer.decode(ids) + tokenizer.decode(byte_ids(qwen3_path, second)) == tokenizer.decode(ids + byte_ids(qwen3_path, second))
