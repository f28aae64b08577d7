"""The curve as SVG and as text."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from polar.demo.plot import Curve, Point, bar, svg, text

SHARES = st.floats(0, 1)


def test_the_svg_is_xml_and_names_every_curve() -> None:
    document = svg("a < b & c", [Curve("held <out>", [Point(0, 0.2, 0.1, 0.3), Point(8, 0.9)]), Curve("t", [Point(1, 0.5)], True)], 8)
    root = ElementTree.fromstring(document)
    written = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {"a < b & c", "held <out>", "t", "0%", "100%", "8"} <= set(written)
    assert len([node for node in root.iter() if node.tag.endswith("circle")]) == 3


@given(st.lists(st.tuples(st.integers(0, 8), SHARES), min_size=1, max_size=9), st.integers(1, 8))
def test_every_point_lies_inside_of_the_drawing(points: list[tuple[int, float]], steps: int) -> None:
    lines = text([Curve("c", [Point(min(step, steps), share) for step, share in points])], steps, width=40, height=8)
    assert len(lines) == 8 + 3
    assert all(len(line) <= 46 for line in lines[:8])
    assert any("●" in line for line in lines[:8])


def test_higher_is_further_up() -> None:
    lines = text([Curve("c", [Point(0, 0.0), Point(4, 1.0)])], 4, width=20, height=5)
    assert lines[0].rstrip().endswith("●")
    assert lines[4].startswith("  0% ┤●")


@given(SHARES)
def test_a_bar_is_as_long_as_its_share(share: float) -> None:
    assert abs(len(bar(share, 20)) - 20 * share) <= 1


def test_an_empty_and_a_full_bar() -> None:
    assert bar(0.0) == ""
    assert bar(1.0, 4) == "████"
