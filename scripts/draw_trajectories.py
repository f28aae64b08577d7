"""Draws the pictures of docs/trajectories.md: each case goes through the real builder, and what comes out is drawn.

    python scripts/draw_trajectories.py [FOLDER]     # default: docs/trajectories

Above, the calls of a session in the order in which they came: prompt in grey, what was sampled in its colour. Below, the rows: filled where
the mask is 1; outlined in colour where another row or the ledger has the token; grey for the rest of the context. Then the ledger and the
breaks, as text.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polar.chat import Message, Tool
from polar.harness import Tag
from polar.records import Break, Cause, Completion, Session
from polar.trajectory import Forest, Options, PrefixMerging, Recipe, Trace, Trajectory

COLOURS = ("#2f6fde", "#d9822b", "#2e9e5b", "#b0479b", "#7a5cd6", "#c0392b")
GREY, TEXT, PAPER = "#e4e6ea", "#30343b", "#ffffff"
CHARACTER, HEIGHT, GAP = 7.3, 22, 4

Cell = tuple[str, str, str | None]
"""Word, filling, outline."""


@dataclass
class Case:
    """A session to draw. Calls are written as words: prompt and answer, each a token."""

    name: str
    title: str
    options: dict[str, Any] = field(default_factory=dict)
    calls: list[Completion] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    roles: dict[int, str] = field(default_factory=dict)

    def call(
        self, prompt: str, sampled: str, *, role: str = "main", cause: Cause | None = None, parent: int | None = None, **more: Any
    ) -> Case:
        number = len(self.calls)
        if cause is not None and parent is not None:
            more["broken"] = Break(cause, parent, 0, 0)
        ids, answer = self._ids(prompt), self._ids(sampled)
        self.calls.append(
            Completion(
                session=self.name,
                number=number,
                status=more.pop("status", "complete"),
                dialect="openai_chat",
                mode="tokens",
                messages=(Message("user", "x"),),
                answer=Message("assistant", sampled),
                finish="stop",
                tools=(Tool("run"),),
                prompt_ids=ids,
                sampled_ids=answer,
                logprobs=np.full(len(answer), -0.5, np.float32),
                parent=parent,
                delivered=more.pop("delivered", True),
                ended=float(number),
                **more,
            )
        )
        self.roles[number] = role
        return self

    def build(self) -> Trajectory:
        recipe = Recipe("recipe", lambda one: Tag(self.roles[one.number], f"recipe: {self.roles[one.number]}"))  # type: ignore[arg-type]
        session = Session(self.name, b"", b"")
        return PrefixMerging(Options(**self.options)).build(Forest(self.name, self.calls), session, recipe)

    def _ids(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return np.array([self.words.index(word) for word in text.split()], np.int32)


def cases() -> list[Case]:
    long = Case("length", "A conversation beyond max_length", {"max_length": 8})
    for one in (turns := Case("turns", "Turns that extend each other"), long):
        one.call("sys task", "ls .").call("sys task ls . files", "cat a .", parent=0)
        one.call("sys task ls . files cat a . text", "done .", parent=1)
    splice = Case("splice", "The same, as the reference system merges it", {"on_break": "splice", "end_of_turn": 1})
    splice.words = ["sys", "."]
    stripped = Case("stripped", "A template that drops old thinking")
    for one in (stripped, splice):
        one.call("sys task", "hm ls .").call("sys task ls . files", "hm2 done .", cause=Cause.THINKING_STRIPPED, parent=0)
    return [
        turns,
        Case("sub_agent", "A sub-agent, interleaved")
        .call("sys task", "ask .")
        .call("sub job", "look .", role="sub_agent")
        .call("sub job look . files", "found .", role="sub_agent", parent=1)
        .call("sys task ask . found .", "done .", parent=0),
        Case("edit", "The harness goes back and on from there another way")
        .call("sys task", "ls .")
        .call("sys task ls . files", "cat a .", parent=0)
        .call("sys task ls . note", "cat b .", parent=0)
        .call("sys task ls . note cat b . text", "done .", parent=2),
        Case("retry", "A call that was tried again")
        .call("sys task", "ls .")
        .call("sys task ls . files", "cat .", parent=0, delivered=False)
        .call("sys task ls . files", "grep .", parent=0)
        .call("sys task ls . files grep . hits", "done .", parent=2),
        stripped,
        splice,
        Case("compaction", "A compaction")
        .call("sys task", "ls .")
        .call("sys task ls . files", "cat .", parent=0)
        .call("sys task ls . files cat . sum-up", "summary .", role="compaction", parent=1)
        .call("sys task summary", "go .", cause=Cause.COMPACTION, parent=1)
        .call("sys task summary go . ok", "done .", parent=3),
        Case("title", "Side calls")
        .call("title? task", "Task: ls", role="title")
        .call("sys task", "ls .")
        .call("sys task ls . files", "done .", parent=1),
        Case("aborted", "An answer that its client did not wait for")
        .call("sys task", "ls .")
        .call("sys task ls . files", "cat", parent=0, status="aborted", untrainable="aborted: the client left")
        .call("sys task ls . files", "cat a .", parent=0),
        long,
    ]


def draw(case: Case) -> str:
    """The picture of a case, as SVG."""
    made = case.build()
    strips = [_call(case, one) for one in case.calls] + [_row(case, number, trace) for number, trace in enumerate(made.traces)]
    left = 24 + CHARACTER * max(len(label) for label, _ in strips)
    lines: list[str] = []
    y, widest = 34.0, 0.0
    for number, (label, cells) in enumerate(strips):
        if number == len(case.calls):
            y += 14
        widest = max(widest, _strip(lines, left, y, label, cells))
        y += HEIGHT + GAP
    y += 12
    notes = [f"ledger: {line.tokens} tokens of call {line.completion}, {line.reason}" for line in made.ledger]
    notes += [f"break: call {line.completion} against call {line.parent}, {line.cause}, at id {line.position}" for line in made.drift]
    notes.append(f"{made.in_rows} in rows + {made.ledger.tokens} in the ledger = {made.sampled} sampled")
    for note in notes:
        lines.append(f'<text x="10" y="{y:.0f}" fill="{TEXT}">{html.escape(note)}</text>')
        widest = max(widest, 10 + CHARACTER * len(note))
        y += 17
    width, height = max(widest, 10 + 1.05 * CHARACTER * len(case.title)) + 14, y - 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}" stroke="{GREY}"/>\n'
        f'<text x="10" y="20" fill="{TEXT}" font-weight="bold">{html.escape(case.title)}</text>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def _call(case: Case, one: Completion) -> tuple[str, list[Cell]]:
    """Label and cells of a call."""
    assert one.prompt_ids is not None
    assert one.sampled_ids is not None
    cells: list[Cell] = [(case.words[i], GREY, None) for i in one.prompt_ids]
    cells += [(case.words[i], _colour(one.number), None) for i in one.sampled_ids]
    role = case.roles[one.number]
    return f"call {one.number}" + ("" if role == "main" else f" {role.replace('_', '-')}"), cells


def _row(case: Case, number: int, trace: Trace) -> tuple[str, list[Cell]]:
    """Label and cells of a row."""
    owner = {place: span.completion for span in trace.spans for place in range(span.start, span.end)}
    cells: list[Cell] = []
    for place, token in enumerate(trace.ids.tolist()):
        if place not in owner:
            cells.append((case.words[token], GREY, None))
        elif trace.mask[place]:
            cells.append((case.words[token], _colour(owner[place]), None))
        else:
            cells.append((case.words[token], PAPER, _colour(owner[place])))
    return f"row {number}" + (" cut" if trace.cut else "") + ("" if trace.faithful else " unfaithful"), cells


def _strip(lines: list[str], x: float, y: float, label: str, cells: list[Cell]) -> float:
    """Draws a label, and its cells from `x` on; returns the right edge."""
    lines.append(f'<text x="10" y="{y + 15:.0f}" fill="{TEXT}">{html.escape(label)}</text>')
    for word, filling, outline in cells:
        width = CHARACTER * len(word) + 10
        ink = TEXT if filling in (GREY, PAPER) else PAPER
        edge = f' stroke="{outline}" stroke-width="1.5"' if outline else ""
        lines.append(f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{HEIGHT}" rx="3" fill="{filling}"{edge}/>')
        lines.append(f'<text x="{x + 5:.1f}" y="{y + 15:.0f}" fill="{ink}">{html.escape(word)}</text>')
        x += width + 2
    return x


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases():
        (folder / f"{case.name}.svg").write_text(draw(case), encoding="utf-8")


if __name__ == "__main__":
    main()
