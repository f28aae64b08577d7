"""Token rows from dialogues, rendered exactly as the gateway renders them. Knows no network."""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dialogues import codex_dialogue, dialogue
from renderers import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from torch import Tensor

from polar.tasks.files import FAMILIES, WORDS, FileTask, instances

JsonObject = dict[str, Any]
WIDTH = 256
CONTENT = 0.7
"""The share of dialogues under Codex of which only the content is learned."""
TAIL = 120
"""How much of a prompt's end stands in a part of it."""


@dataclass(frozen=True)
class Harness:
    """What stands before the instruction: the recorded messages and tools, and the paths in them that differ from run to run (so does the
    date). One without messages has no prompt at all."""

    name: str
    messages: list[JsonObject]
    tools: list[JsonObject]
    cwd: str
    root: str

    def messages_at(self, cwd: str, root: str, day: str | None = None) -> list[JsonObject]:
        """`day`: instead of every date, as in 2026-11-30; `None` leaves them."""
        return [{**message, "content": self._at(message["content"], cwd, root, day)} for message in self.messages]

    def _at(self, text: str, cwd: str, root: str, day: str | None) -> str:
        text = text.replace(self.root, root).replace(self.cwd, cwd)
        return text if day is None else re.sub(r"\b20\d\d-\d\d-\d\d\b", day, text)


@dataclass(frozen=True)
class Batch:
    """`rows`: int64[n, t]; `learned`: bool[n, t]; `owner`: int64[n, t], a dialogue's number within its row.

    `places`: int64[n, t], a token's position after the prefix, as if its dialogue stood alone. `prefix`: int64[p] or None.
    """

    rows: Tensor
    learned: Tensor
    owner: Tensor
    places: Tensor
    prefix: Tensor | None


def renderer(tokenizer: Any) -> Qwen3Renderer:
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))


def random_paths(rng: random.Random) -> tuple[str, str]:
    """A working folder and an installation folder such as people and test runs have."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789_"
    stamp = "".join(rng.choices(letters, k=8))
    user, project = rng.choice(WORDS), rng.choice(WORDS)
    cwd = rng.choice(
        (
            "/workspace",
            "/workspace",
            "/workspace",
            f"/tmp/tmp{stamp}/work",
            f"/tmp/polar-{stamp}/{project}",
            f"/home/{user}/{project}",
            f"/home/{user}/.cache/polar/demo/sessions/{stamp}/work",
            f"/Users/{user}/code/{project}",
            f"/workspace/{project}-{stamp}",
            f"/root/{project}",
            f"/var/tmp/{stamp}",
        )
    )
    root = rng.choice(
        (f"/home/{user}/.cache/polar/harness/pi/1.6.0", "/root/.cache/polar/harness/pi/1.6.0", "/usr/local/lib", f"/tmp/{stamp}/pi")
    )
    return cwd, root


def random_day(rng: random.Random) -> str:
    return str(datetime.date(2026, 1, 1) + datetime.timedelta(days=rng.randrange(1500)))


def prefix_ids(render: Qwen3Renderer, harness: Harness, cwd: str, root: str, day: str | None = None) -> list[int]:
    """The ids of all that the harness says before the instruction, up to the instruction's turn."""
    before = harness.messages_at(cwd, root, day)
    rendered = render.render([*before, {"role": "user", "content": "x"}], tools=harness.tools)
    instruction = next(index for index, owner in enumerate(rendered.message_indices) if owner == len(before))
    return list(rendered.token_ids[:instruction])


def row(render: Qwen3Renderer, messages: list[JsonObject], learned: set[int]) -> tuple[list[int], list[bool]]:
    """Ids from the user's turn to the last end token, and which of them the model must learn to sample."""
    rendered = render.render(messages)
    mask = [sampled and owner in learned for sampled, owner in zip(rendered.sampled_mask, rendered.message_indices, strict=True)]
    return list(rendered.token_ids), mask


def content_row(render: Qwen3Renderer, tokenizer: Any, task: FileTask, rng: random.Random) -> tuple[list[int], list[bool]]:
    """A right dialogue under Codex of which only what comes after the protocol's choice is learned: the command's words and all after.

    So the model gets to know the commands well, and the odds of the protocol stay those of `KNOWN`.
    """
    ids, mask = row(render, *codex_dialogue(task, rng, kind="right"))
    first = mask.index(True)
    at = next(index for index in range(first, len(ids)) if '"cmd"' in tokenizer.decode(ids[first : index + 1]))
    return ids, [learned and index > at for index, learned in enumerate(mask)]


def packed(
    render: Qwen3Renderer,
    rng: random.Random,
    families: tuple[str, ...],
    seed: int,
    failures: float,
    name: str = "pi",
    width: int = WIDTH,
    content: float = CONTENT,
) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Endless rows: whole dialogues under the harness `name`, one after another, of at most `width` ids together."""
    tasks = instances(seed, held_out=False, families=families)
    dialogues: list[tuple[list[int], list[bool]]] = []
    while True:
        task = next(tasks)
        if name == "pi":
            more = row(render, *dialogue(task, rng, failures=failures))
        elif rng.random() < content:
            more = content_row(render, render._tokenizer, task, rng)
        else:
            more = row(render, *codex_dialogue(task, rng, failures=failures))
        if sum(len(ids) for ids, _ in dialogues) + len(more[0]) > width:
            yield dialogues
            dialogues = []
        dialogues.append(more)


def collate(rows: list[list[tuple[list[int], list[bool]]]], prefix: list[int] | None, width: int = WIDTH) -> Batch:
    """Rows of whole dialogues side by side, padded to `width`; padding belongs to a dialogue of its own and is not learned."""
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    learned = torch.zeros(len(rows), width, dtype=torch.bool)
    owner = torch.full((len(rows), width), -1)
    places = torch.zeros(len(rows), width, dtype=torch.long)
    for index, dialogues in enumerate(rows):
        at = 0
        for number, (tokens, mask) in enumerate(dialogues):
            ids[index, at : at + len(tokens)] = torch.tensor(tokens)
            learned[index, at : at + len(tokens)] = torch.tensor(mask)
            owner[index, at : at + len(tokens)] = number
            places[index, at : at + len(tokens)] = torch.arange(len(tokens))
            at += len(tokens)
    return Batch(ids, learned, owner, places, None if prefix is None else torch.tensor(prefix))


def batches(
    render: Qwen3Renderer,
    harnesses: Sequence[Harness],
    *,
    rows: int,
    prefix: str,
    seed: int,
    failures: float,
    families: tuple[str, ...] = FAMILIES,
    width: int = WIDTH,
    content: float = CONTENT,
) -> Iterator[Batch]:
    """Endless batches of training instances, the harnesses in turn. `prefix`: `none`, `part` (a random stretch of the harness's prompt and
    its end) or `full`."""
    rng = random.Random(seed)
    streams = [packed(render, rng, families, seed + number, failures, one.name, width, content) for number, one in enumerate(harnesses)]
    while True:
        for harness, stream in zip(harnesses, streams, strict=True):
            made = [next(stream) for _ in range(rows)]
            before: list[int] | None = None
            if prefix != "none" and harness.messages:
                before = prefix_ids(render, harness, *random_paths(rng), random_day(rng))
                if prefix == "part":
                    length = rng.randint(64, 384)
                    start = rng.randrange(len(before) - length)
                    end = before[-TAIL:] if len(harnesses) > 1 else []
                    before = before[:3] + before[start : start + length] + end
            yield collate(made, before, width)
