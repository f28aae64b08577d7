"""What an agent and its user say to each other, in no dialect yet. All text is ours.

Every text of a conversation carries the conversation's canary, so whatever comes out somewhere else betrays where it came from.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fuzz_json import Verbatim

from polar.testing.engine import Call, Reply

CANARY = re.compile(r"zq[0-9a-f]{10}qz")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

_SENTENCES = (
    "Please list the files of this folder and tell me which ones changed.",
    "The test fails with `KeyError: 'größe'` on line 42; why?",
    "Rename `old_name` to `new_name` everywhere, but leave the docs alone.",
    "def add(a, b):\n    return a + b  # as in “the spec”",
    '{"looks": "like json", "n": [1, 2.50, null]}',
    "日本語のテキストと emoji 🦙 and a tab\there.",
    "  indented, with trailing blanks   ",
    "<html><b>not markup for us</b></html>",
    "Error: command not found: frobnicate\n(exit code 127)",
    "Now do the same for C:\\Users\\me\\src and /usr/local/share.",
    "ok",
    "Line one.\n\nLine three after an empty one.\n",
)
_THOUGHTS = ("The user wants the list first.", "Two files differ; look at both.\nThen decide.", "Nothing to do here.")


@dataclass
class ToolSpec:
    name: str
    description: str | None
    schema: Verbatim


@dataclass
class Asked:
    """A user's turn: the results of the calls before it, then texts and images."""

    texts: list[str] = field(default_factory=list)
    images: int = 0
    results: list[Result] = field(default_factory=list)


@dataclass
class Result:
    name: str
    text: str
    error: bool = False


@dataclass
class Said:
    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, Verbatim]] = field(default_factory=list)


@dataclass
class Talk:
    canary: str
    system: str
    tools: list[ToolSpec]
    turns: list[Asked | Said]
    stream: bool
    thinking: bool | None
    effort: str | None
    max_tokens: int
    temperature: float | None
    stop: list[str]
    choice: str | None
    """`auto`, `none`, `required`, a tool's name, or nothing said."""
    schema: Verbatim | None


def sentence(rng: random.Random, canary: str) -> str:
    return f"{rng.choice(_SENTENCES)} [{canary}]"


def arguments(rng: random.Random, canary: str) -> Verbatim:
    values: dict[str, Any] = {
        "path": f"src/{canary}/größe.py",
        "command": 'grep -rn "x" . | sort\n',
        "limit": rng.choice([0, 7, 10_000]),
        "ratio": rng.choice([0.5, 1e-7, 2.0]),
        "recursive": True,
        "edits": [{"old": "a", "new": "b", "at": None}],
    }
    names = rng.sample(sorted(values), rng.randrange(len(values)))
    return Verbatim((name, values[name]) for name in names)


def tool(rng: random.Random, index: int, canary: str) -> ToolSpec:
    properties: dict[str, Any] = {
        "path": {"type": "string", "description": f"Where, e.g. {canary}"},
        "limit": {"type": "integer", "minimum": 0},
        "edits": {"type": "array", "items": {"type": "object", "properties": {"old": {"type": "string"}}}},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
    }
    names = rng.sample(sorted(properties), rng.randrange(1, len(properties) + 1))
    schema = Verbatim(type="object", properties={name: properties[name] for name in names})
    if rng.random() < 0.5:
        schema["required"] = names[:1]
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return ToolSpec(f"{rng.choice(['read', 'write', 'run'])}_{index}", sentence(rng, canary) if rng.random() < 0.9 else None, schema)


def said(rng: random.Random, tools: Sequence[ToolSpec], canary: str) -> Said:
    turn = Said()
    if rng.random() < 0.4:
        turn.thinking = rng.choice(_THOUGHTS) + " " + canary
    if tools and rng.random() < 0.6:
        turn.calls = [(rng.choice(tools).name, arguments(rng, canary)) for _ in range(rng.choice([1, 1, 2]))]
    if not turn.calls or rng.random() < 0.5:
        turn.text = sentence(rng, canary)
    return turn


def answer_to(rng: random.Random, before: Said | None, canary: str) -> Asked:
    """The user's next turn; the results of all calls come first."""
    asked = Asked()
    if before is not None:
        for name, _ in before.calls:
            text = "" if rng.random() < 0.1 else sentence(rng, canary)
            asked.results.append(Result(name, text, error=rng.random() < 0.15))
    if not asked.results or rng.random() < 0.3:
        asked.texts = [sentence(rng, canary) for _ in range(rng.choice([1, 1, 2]))]
        asked.images = int(rng.random() < 0.1)
    return asked


def talk(rng: random.Random) -> Talk:
    canary = f"zq{rng.getrandbits(40):010x}qz"
    tools = [tool(rng, index, canary) for index in range(rng.choice([0, 1, 2, 3]))]
    turns: list[Asked | Said] = [answer_to(rng, None, canary)]
    for _ in range(rng.choice([0, 0, 1, 2])):
        turns.append(said(rng, tools, canary))
        turns.append(answer_to(rng, turns[-1], canary))  # type: ignore[arg-type]
    choice = None
    if tools and rng.random() < 0.25:
        choice = rng.choice(["auto", "none", "required", tools[0].name])
    return Talk(
        canary=canary,
        system=f"You are a careful engineer. {sentence(rng, canary)}" if rng.random() < 0.85 else "",
        tools=tools,
        turns=turns,
        stream=rng.random() < 0.5,
        thinking=rng.choice([None, None, True, False]),
        effort=rng.choice([None, None, None, "low", "high"]),
        max_tokens=rng.choice([200, 1000, 32_000]),
        temperature=rng.choice([None, 0, 0.7, 1]),
        stop=["\n\nHuman:"] if rng.random() < 0.1 else [],
        choice=choice,
        schema=Verbatim(type="object", properties={"answer": {"type": "string"}}) if rng.random() < 0.06 else None,
    )


# --- what the engine samples --------------------------------------------------------------------------------------------


class Sampler:
    """A script: the same prompt gets the same answer. `canaries` maps each prompt's `digest` to the canaries in its text."""

    def __init__(self) -> None:
        self.canaries: dict[int, frozenset[str]] = {}

    def __call__(self, call: Call) -> Reply:
        text = call.text
        digest = prompt_digest(call.prompt_ids)
        found = CANARY.findall(text)
        self.canaries[digest] = frozenset(found)
        canary = found[-1] if found else "nothing"
        rng = random.Random(digest)
        names = re.findall(r'"function": \{"name": "([\w.-]+)"', text)
        opened = "" if text.endswith("<think>\n\n</think>\n\n") or rng.random() < 0.5 else f"<think>\nHm, {canary}.\n</think>\n\n"
        kind = rng.randrange(8)
        if kind == 0:
            return Reply(text=opened + f"  Done with {canary}, größe “ok” 🦙.\n ")
        if kind == 1:
            return Reply(text=opened + f'Look: <tool_call>\n{{"name": "read_0", "arguments": {{"path": {canary}\n</tool_call>')
        if kind == 2:
            return Reply(text=opened + f"I would say that {canary} is", finish="length")
        if kind < 6 and names:
            calls = [
                f'<tool_call>\n{{"name": "{rng.choice(names)}", "arguments": '
                f'{{"path" :"{canary}/\\u00e4",  "limit":{number}.0}}}}\n</tool_call>'
                for number in range(rng.choice([1, 1, 2]))
            ]
            return Reply(text=opened + (f"Looking at {canary}.\n" if rng.random() < 0.5 else "") + "\n".join(calls))
        ids = [one for piece in (opened, "Fin", "ished ", canary[:3], canary[3:6], canary[6:], ".") for one in call.tokenizer.encode(piece)]
        return Reply(ids=[*ids, *call.tokenizer.eos_ids[:1]])


def prompt_digest(ids: Sequence[int] | np.ndarray) -> int:
    return zlib.crc32(np.asarray(ids, np.int32).tobytes())
