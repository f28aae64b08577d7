import itertools

from hypothesis import given
from hypothesis import strategies as st

from polar.engines.sse import SseParser

TEXT = st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
EVENTS = st.lists(st.lists(TEXT, min_size=1, max_size=3), min_size=1, max_size=5)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(EVENTS, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 10_000), max_size=12))
def test_b12_events_are_the_same_however_the_bytes_are_split(events: list[list[str]], end: str, cuts: list[int]) -> None:
    wire = "".join("".join(f"data: {line}{end}" for line in lines) + end for lines in events).encode()
    parser = SseParser()
    # A lone carriage return at the very end may still become half of a line feed pair; one more byte settles it.
    got = [event for piece in [*split(wire, cuts), b":"] for event in parser.feed(piece)]
    assert got == ["\n".join(lines).encode() for lines in events]


def test_b12_a_line_and_a_character_split_over_reads() -> None:
    parser = SseParser()
    wire = 'data: {"choices":[{"delta":{"content":"é日"}}]}\n\n'.encode()
    got = [event for at in range(len(wire)) for event in parser.feed(wire[at : at + 1])]
    assert got == [wire[6:-2]]


def test_comments_names_and_ids_are_skipped() -> None:
    parser = SseParser()
    assert parser.feed(b": ping\n\nevent: x\nid: 7\ndata:1\n\n") == [b"1"]


def test_an_event_without_its_blank_line_is_not_given_out() -> None:
    assert SseParser().feed(b"data: half\n") == []


@given(EVENTS, st.lists(st.sampled_from([b": ping\n\n", b"\n", b"event: x\n"]), max_size=5))
def test_an_event_in_a_piece_of_its_own_reads_like_any_other(events: list[list[str]], between: list[bytes]) -> None:
    pieces = ["".join(f"data: {line}\n" for line in lines).encode() + b"\n" for lines in events]
    mixed = [piece for pair in itertools.zip_longest(pieces, between, fillvalue=b"") for piece in pair]
    parser, whole = SseParser(), SseParser()
    assert [event for piece in mixed for event in parser.feed(piece)] == whole.feed(b"".join(mixed))
