"""JSON, arrays and the cache: exact, and small."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import Words, floats, ids, json_values, messages, texts, tools

from polar.chat import Message, Tool
from polar.store import messages_from_json, messages_to_json
from polar.store.arrays import (
    common_prefix,
    exact,
    needs_reference,
    pack,
    pack_floats,
    pack_ids,
    unpack,
    unpack_floats,
    unpack_ids,
)  # fmt: skip
from polar.store.cache import Cache
from polar.store.codec import dumps, loads, tools_from_json, tools_to_json
from polar.store.weight import weight

LAW = settings(max_examples=200, deadline=None)


def identical(a: object, b: object) -> bool:
    """Equal in value and type at every depth, keys in order, NaN equal to NaN, -0.0 not to 0.0."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b


@LAW
@given(json_values)
def test_json_comes_back_identical(value: object) -> None:
    assert identical(loads(dumps(value)), value)


@pytest.mark.parametrize(
    "value", ["\ud83d", "\ud83d\ude00", "\U0001f600", {"\udc00": 1}, 10**40, -(2**63) - 1, [float("inf")], None, "\x1a", "null"]
)
def test_what_json_has_no_form_for(value: object) -> None:
    assert identical(loads(dumps(value)), value)


@pytest.mark.parametrize("value", [{1: 2}, {"a": {None: 1}}, object(), {"a": {1, 2}}, b"bytes"])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        dumps(value)


def test_a_schema_deeper_than_orjson_writes_is_kept() -> None:
    value: object = "end"
    for _ in range(400):
        value = [value]
    with pytest.raises(TypeError):
        orjson.dumps(value)
    assert loads(dumps(value)) == value


def test_bottomless_nesting_is_refused() -> None:
    value: object = "end"
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TypeError, match="deep"):
        dumps(value)


@LAW
@given(st.lists(messages, max_size=4).map(tuple))
def test_messages_come_back_equal(given_messages: tuple[Message, ...]) -> None:
    assert messages_from_json(loads(dumps(messages_to_json(given_messages)))) == given_messages


@LAW
@given(st.lists(tools, max_size=3).map(tuple))
def test_tools_come_back_with_their_keys_in_order(given_tools: tuple[Tool, ...]) -> None:
    back = tools_from_json(loads(dumps(tools_to_json(given_tools))))
    assert [tool.name for tool in back] == [tool.name for tool in given_tools]
    for a, b in zip(back, given_tools, strict=True):
        assert identical(a.parameters, b.parameters)
        assert (a.description, a.kind, a.namespace, a.wire_name) == (b.description, b.kind, b.namespace, b.wire_name)


def test_defaults_cost_nothing() -> None:
    assert messages_to_json([Message("user", "hello")]) == [{"role": "user", "content": "hello"}]


# --- arrays -----------------------------------------------------------------------------------------------------------


@LAW
@given(st.binary(max_size=200))
def test_bytes_come_back(data: bytes) -> None:
    assert unpack(pack(data)) == data
    assert len(pack(data)) <= len(data) + 1


@LAW
@given(ids, st.none() | ids)
def test_ids_come_back(array: np.ndarray, reference: np.ndarray | None) -> None:
    back = unpack_ids(pack_ids(array, reference), reference)
    assert back.dtype == np.int32
    assert back.tobytes() == array.tobytes()


@LAW
@given(floats)
def test_floats_come_back_bit_by_bit(array: np.ndarray) -> None:
    back = unpack_floats(pack_floats(array))
    assert back.dtype == np.float32
    assert back.tobytes() == array.tobytes()


def test_ids_that_a_reference_has_elsewhere_cost_nothing() -> None:
    reference = Words(1).ids(20_000)
    edited = np.concatenate([reference[500:12_000], Words(2).ids(3), reference[12_001:]]).astype(np.int32)
    packed = pack_ids(edited, reference)
    assert needs_reference(packed)
    assert len(packed) < 200
    assert unpack_ids(packed, reference).tobytes() == edited.tobytes()
    with pytest.raises(ValueError, match="reference"):
        unpack_ids(packed)


def test_a_prompt_costs_less_than_two_bytes_an_id() -> None:
    assert len(pack_ids(Words(1).ids(1_000))) < 2_000


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        unpack(b"\x7fdata")


@LAW
@given(ids, ids, ids)
def test_the_common_prefix(head: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    left, right = np.concatenate([head, a]), np.concatenate([head, b])
    length = common_prefix(left, right)
    assert left[:length].tolist() == right[:length].tolist()
    assert length == min(len(left), len(right)) or left[length] != right[length]


def test_arrays_are_taken_exactly_or_not_at_all() -> None:
    assert exact([1, 2], np.int32, "ids").dtype == np.int32
    assert exact(np.array([0.5, np.nan]), np.float32, "logprobs").dtype == np.float32
    for values, dtype in (([2**31], np.int32), ([0.5], np.int32), ([0.1], np.float32), ([[1]], np.int32)):
        with pytest.raises(ValueError, match="x "):
            exact(values, dtype, "x")


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    cache: Cache[str, int] = Cache(30)
    for name in "abc":
        cache.put(name, 1, 10)
    cache.get("a")
    cache.put("d", 1, 10)
    assert [name for name in "abcd" if cache.get(name)] == ["a", "c", "d"]


def test_of_retired_entries_the_one_that_was_used_last_stays_longest() -> None:
    cache: Cache[str, int] = Cache(40)
    for name in "abcd":
        cache.put(name, 1, 10)
    for name in "abc":
        cache.retire(name)
    cache.swap("b", 2)
    assert cache.get("a") == 1
    cache.put("e", 1, 20)
    assert {name: cache.get(name) for name in "abcde"} == {"a": 1, "b": None, "c": None, "d": 1, "e": 1}
    assert cache.size == 40


def test_a_retired_entry_goes_before_all_others() -> None:
    cache: Cache[str, int] = Cache(30)
    for name in "abc":
        cache.put(name, 1, 10)
    cache.retire("c")
    cache.retire("unknown")
    cache.put("d", 1, 10)
    assert [name for name in "abcd" if cache.get(name)] == ["a", "b", "d"]


def test_what_is_larger_than_the_cache_is_not_held() -> None:
    cache: Cache[str, int] = Cache(30)
    cache.put("a", 1, 10)
    cache.put("a", 2, 31)
    assert cache.get("a") is None
    assert cache.size == 0


@LAW
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=40))
def test_the_cap_is_kept(puts: list[tuple[int, int]]) -> None:
    cache: Cache[int, int] = Cache(100)
    sizes: dict[int, int] = {}
    for key, size in puts:
        cache.put(key, size, size)
        sizes[key] = size
        held = [k for k in sizes if cache.get(k) is not None]
        assert cache.size == sum(sizes[k] for k in held) <= 100


@given(texts, messages)
def test_weights_cover_the_text(text: str, message: Message) -> None:
    assert weight(Message("user", text)) >= len(text)
    assert weight((message, message)) >= 2 * len(message.text)
