"""Token rows from dialogues, rendered exactly as the gateway renders them. Knows no network."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dialogues import dialogue
from renderers import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from torch import Tensor

from polar.tasks.files import FAMILIES, WORDS, instances

JsonObject = dict[str, Any]
WIDTH = 256


@dataclass(frozen=True)
class Harness:
    """What stands before the user's message: the recorded system text, its tools, and the paths in it that differ from run to run."""

    system: str
    tools: list[JsonObject]
    cwd: str
    root: str

    def system_at(self, cwd: str, root: str) -> str:
        return self.system.replace(self.root, root).replace(self.cwd, cwd)


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


def prefix_ids(render: Qwen3Renderer, harness: Harness, cwd: str, root: str) -> list[int]:
    """The ids of system and tools, up to the user's turn."""
    messages = [{"role": "system", "content": harness.system_at(cwd, root)}, {"role": "user", "content": "x"}]
    rendered = render.render(messages, tools=harness.tools)
    first_user = next(index for index, owner in enumerate(rendered.message_indices) if owner == 1)
    return list(rendered.token_ids[:first_user])


def row(render: Qwen3Renderer, messages: list[JsonObject], learned: set[int]) -> tuple[list[int], list[bool]]:
    """Ids from the user's turn to the last end token, and which of them the model must learn to sample."""
    rendered = render.render(messages)
    mask = [sampled and owner in learned for sampled, owner in zip(rendered.sampled_mask, rendered.message_indices, strict=True)]
    return list(rendered.token_ids), mask


def packed(
    render: Qwen3Renderer, rng: random.Random, families: tuple[str, ...], seed: int, failures: float
) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Endless rows: whole dialogues, one after another, of at most `WIDTH` ids together."""
    tasks = instances(seed, held_out=False, families=families)
    dialogues: list[tuple[list[int], list[bool]]] = []
    while True:
        more = row(render, *dialogue(next(tasks), rng, failures=failures))
        if sum(len(ids) for ids, _ in dialogues) + len(more[0]) > WIDTH:
            yield dialogues
            dialogues = []
        dialogues.append(more)


def collate(rows: list[list[tuple[list[int], list[bool]]]], prefix: list[int] | None) -> Batch:
    """Rows of whole dialogues side by side, padded to `WIDTH`; padding belongs to a dialogue of its own and is not learned."""
    ids = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    learned = torch.zeros(len(rows), WIDTH, dtype=torch.bool)
    owner = torch.full((len(rows), WIDTH), -1)
    places = torch.zeros(len(rows), WIDTH, dtype=torch.long)
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
    render: Qwen3Renderer, harness: Harness, *, rows: int, prefix: str, seed: int, failures: float, families: tuple[str, ...] = FAMILIES
) -> Iterator[Batch]:
    """Endless batches of training instances. `prefix`: `none`, `part` (a random stretch of the harness's prompt) or `full`."""
    rng = random.Random(seed)
    stream = packed(render, rng, families, seed, failures)
    while True:
        made = [next(stream) for _ in range(rows)]
        before: list[int] | None = None
        if prefix != "none":
            before = prefix_ids(render, harness, *random_paths(rng))
            if prefix == "part":
                length = rng.randint(64, 384)
                start = rng.randrange(len(before) - length)
                before = before[:3] + before[start : start + length]
        yield collate(made, before)
