import base64

from hypothesis import given
from hypothesis import strategies as st

from polar.tokens import pointers

secrets = st.binary(min_size=16, max_size=32)
numbers = st.integers(0, 2**32 - 1)


prefixes = st.sampled_from(["call_", "toolu_01", "fc_", "rs_", "msg_", "chatcmpl-", "deadbeef", ""])


@given(secrets, numbers, prefixes, st.sampled_from(["", "00", "_1"]))
def test_a_reference_is_found_inside_any_id(secret: bytes, number: int, prefix: str, suffix: str) -> None:
    ref = pointers.mint(secret, number)
    assert len(ref) == pointers.LENGTH
    assert pointers.find(secret, prefix + ref + suffix) == number


@given(secrets, numbers, st.binary(max_size=40), st.binary(max_size=40), st.booleans(), st.sampled_from(["", "sig_", "x"]))
def test_a_reference_is_found_inside_base64(secret: bytes, number: int, before: bytes, after: bytes, urlsafe: bool, prefix: str) -> None:
    raw = before + b"|" + pointers.mint(secret, number).encode() + b"|" + after
    text = (base64.urlsafe_b64encode(raw) if urlsafe else base64.b64encode(raw)).decode()
    assert pointers.find(secret, prefix + text) == number
    assert pointers.find(secret, prefix + text.rstrip("=")) == number


@given(secrets, secrets, numbers)
def test_another_sessions_reference_is_nothing(secret: bytes, other: bytes, number: int) -> None:
    if secret != other:
        assert pointers.find(other, pointers.mint(secret, number)) is None


@given(secrets, numbers, st.integers(0, pointers.LENGTH - 1), st.integers(1, 15))
def test_a_broken_reference_is_nothing(secret: bytes, number: int, place: int, change: int) -> None:
    ref = pointers.mint(secret, number)
    digit = f"{int(ref[place], 16) ^ change:x}"
    assert pointers.find(secret, ref[:place] + digit + ref[place + 1 :]) is None


@given(st.text(max_size=200))
def test_foreign_text_is_nothing_and_never_raises(text: str) -> None:
    assert pointers.find(b"secret", text) is None


def test_a_long_foreign_blob_is_cheap() -> None:
    assert pointers.find(b"secret", "0" * 1_000_000) is None
    assert pointers.find(b"secret", base64.b64encode(bytes(range(256)) * 400).decode()) is None


def test_only_the_beginning_of_a_huge_text_is_read() -> None:
    secret = b"a secret of thirty-two bytes...."
    reference = pointers.mint(secret, 7)
    assert pointers.find(secret, f"polar_{reference}" + "." * 1_000_000) == 7
    assert pointers.find(secret, "." * 1_000_000 + f"polar_{reference}") is None
