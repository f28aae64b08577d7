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

from polar.tasks.files import WORDS, instances

JsonObject = dict[str, Any]


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
    """`rows`: int64[n, t]; `learned`: bool[n, t]; `lengths`: int64[n]; `prefix`: int64[p] or None."""

    rows: Tensor
    learned: Tensor
    lengths: Tensor
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


def collate(rows: list[tuple[list[int], list[bool]]], prefix: list[int] | None) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    learned = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (tokens, mask) in enumerate(rows):
        ids[index, : len(tokens)] = torch.tensor(tokens)
        learned[index, : len(mask)] = torch.tensor(mask)
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    return Batch(ids, learned, lengths, None if prefix is None else torch.tensor(prefix))


def batches(render: Qwen3Renderer, harness: Harness, *, rows: int, prefix: str, seed: int, failures: float) -> Iterator[Batch]:
    """Endless batches of training instances. `prefix`: `none`, `part` (a random stretch of the harness's prompt) or `full`."""
    rng = random.Random(seed)
    tasks = instances(seed, held_out=False)
    while True:
        made = []
        for _ in range(rows):
            messages, learned = dialogue(next(tasks), rng, failures=failures)
            made.append(row(render, messages, learned))
        before: list[int] | None = None
        if prefix != "none":
            before = prefix_ids(render, harness, *random_paths(rng))
            if prefix == "part":
                length = rng.randint(64, 384)
                start = rng.randrange(len(before) - length)
                before = before[:3] + before[start : start + length]
        yield collate(made, before)
