"""The curve of a run, as an SVG file and as lines of text. Knows no run: numbers in, a drawing out.

Both show the same: the share of training sessions that passed, step by step, and pass@1 on held-out tasks with its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 56, 150, 44, 44
COLOURS = ("#d1495b", "#00798c", "#edae49", "#66a182")
BARS = " ▏▎▍▌▋▊▉"
MARKS = "●◆▲■"


@dataclass(frozen=True, slots=True)
class Point:
    """`share`, `low`, `high`: between 0 and 1; `step` may lie between two steps."""

    step: float
    share: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """`dashed`: measured on what is trained on, rather than on held-out tasks."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


def svg(title: str, curves: Sequence[Curve], steps: int) -> str:
    """A complete SVG document. `steps`: where the axis ends."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#222">{escape(title)}</text>',
        *_axes(steps),
    ]
    for number, curve in enumerate(curves):
        parts += _drawn(curve, COLOURS[number % len(COLOURS)], steps, TOP + 8 + 20 * number)
    return "\n".join([*parts, "</svg>", ""])


def _x(step: float, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, share))


def _axes(steps: int) -> list[str]:
    end = _x(steps, steps)
    lines = []
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{10 * tenth}%</text>')
    for step in range(0, steps + 1, max(1, -(-steps // 12))):
        lines.append(f'<text x="{_x(step, steps):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555">{step}</text>')
    middle = (LEFT + end) / 2
    lines.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555">GRPO steps</text>')
    return lines


def _drawn(curve: Curve, colour: str, steps: int, label_y: int) -> list[str]:
    places = [(_x(point.step, steps), _y(point.share)) for point in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="4 4"' if curve.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for point, (x, y) in zip(curve.points, places, strict=True):
        if point.low is not None and point.high is not None:
            low, high = _y(point.low), _y(point.high)
            parts.append(
                f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="2" opacity="0.5"/>'
            )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{2.5 if curve.dashed else 4}" fill="{colour}"/>')
    at = WIDTH - RIGHT + 14
    parts.append(f'<line x1="{at}" y1="{label_y}" x2="{at + 18}" y2="{label_y}" stroke="{colour}" stroke-width="2"{dash}/>')
    parts.append(f'<text x="{at + 24}" y="{label_y + 4}" fill="#333">{escape(curve.name)}</text>')
    return parts


def text(curves: Sequence[Curve], steps: int, *, width: int = 64, height: int = 13) -> list[str]:
    """The same in characters: `height` lines of `width` columns with an axis, then a line that names each curve's mark. Where marks meet,
    an earlier curve's is seen."""
    grid = [[" "] * width for _ in range(height)]

    def place(step: float, share: float | None, sign: str, *, over: str) -> None:
        """Draws `sign` where nothing stands, or one of `over`."""
        if share is not None:
            row = height - 1 - round((height - 1) * min(1.0, max(0.0, share)))
            column = round((width - 1) * step / max(1, steps))
            if grid[row][column] in over:
                grid[row][column] = sign

    for number, curve in reversed(list(enumerate(curves))):
        for point in curve.points:
            place(point.step, point.share, _mark(number, curve), over=" ╷╵·" + MARKS)
            place(point.step, point.high, "╷", over=" ")
            place(point.step, point.low, "╵", over=" ")
    lines = []
    for row, cells in enumerate(grid):
        share = (height - 1 - row) / (height - 1)
        label = f"{share:4.0%}" if row % 3 == 0 or row == height - 1 else "    "
        lines.append(f"{label} ┤{''.join(cells)}".rstrip())
    lines.append("     └" + "─" * width)
    lines.append("      0" + f"{steps} steps".rjust(width - 1))
    return [*lines, "      " + "   ".join(f"{_mark(number, curve)} {curve.name}" for number, curve in enumerate(curves))]


def _mark(number: int, curve: Curve) -> str:
    return "·" if curve.dashed else MARKS[number % len(MARKS)]


def bar(share: float, width: int = 10) -> str:
    """A share as a bar of `width` characters at most."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + (BARS[eighths % 8] if eighths % 8 else "")
