"""What a supervised run trains on: rows of ids with a mask, from any form of `polar export` or anybody's conversations. Knows no model.

Rows with ids (`tokens`, `rl`) are taken as they are: exactly what a model saw and sampled. They mean something under one tokenizer only, so
an export whose manifest names another one, or another template, is refused. Conversations (`chat`) are rendered for the model
(`polar.train.sft_render`), so that it is trained on the prompts that it will meet.

All rows are held in memory, at five bytes a token.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar.errors import ConfigError
from polar.export.read import Unreadable, rows_in
from polar.export.rows import IGNORE
from polar.records import Ids
from polar.tokens.tokenizer import Tokenizer
from polar.train.sft_render import Conversations
from polar.trajectory.conversation import message_from_chat, tool_from_chat
from polar.trajectory.row import Mask

TOO_LONG = "longer than the limit"
NOTHING = "nothing in it is trained"
PICTURED = "ids that stand for images, too"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row. `ids`: int32[n]; `mask`: bool[n], true where trained, false at 0, true at the end: what comes after the last trained id is
    of no use and cut off. `place` is for people."""

    ids: Ids
    mask: Mask
    place: str

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Rows:
    """A split's rows in the order of its files, and how many were left out and why."""

    samples: tuple[Sample, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))

    @property
    def trained(self) -> int:
        return sum(int(np.count_nonzero(sample.mask)) for sample in self.samples)

    def fingerprint(self) -> str:
        """Of every id and every mask, in order: a run that goes on must go on with the same rows."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(len(sample).to_bytes(8, "little"))
            digest.update(sample.ids.tobytes())
            digest.update(np.packbits(sample.mask).tobytes())
        return digest.hexdigest()


def splits_of(data: Path) -> list[str]:
    """The splits of an export's folder, by their files; `train` alone for a file. Raises `ConfigError` where there is no data."""
    if data.is_file():
        return ["train"]
    found = sorted({file.name.rpartition("-")[0] for file in _files(data, "*")})
    if not found:
        raise ConfigError(f"{data} holds no data/NAME-00000.parquet or .jsonl: name a folder that `polar export` wrote, or a file of rows")
    return found


def read_rows(
    data: Path,
    split: str,
    tokenizer: Tokenizer,
    *,
    vocabulary: int,
    max_tokens: int,
    renderer: str | None = None,
    any_tokenizer: bool = False,
) -> Rows:
    """The rows of a split. `vocabulary` is the number of ids that the model has.

    Raises `ConfigError` for a split that is not there, a row that is none (with its place), ids that the model does not have, or that the
    manifest says another tokenizer or template made (unless `any_tokenizer`).
    """
    if split not in (names := splits_of(data)):
        raise ConfigError(f"{data} has no split {split}; it has {', '.join(names)}")
    reader = _Reader(data, tokenizer, renderer, any_tokenizer)
    samples: list[Sample] = []
    left_out: Counter[str] = Counter()
    for file in [data] if data.is_file() else _files(data, split):
        for place, row in rows_in(file):
            where = f"{file.name}, {place}"
            if _pictured(row):
                left_out[PICTURED] += 1
                continue
            ids, mask = reader.row(row, where)
            if mask.any():
                end = int(np.flatnonzero(mask)[-1]) + 1
                ids, mask = ids[:end], mask[:end]
            else:
                left_out[NOTHING] += 1
                continue
            if len(ids) > max_tokens:
                left_out[TOO_LONG] += 1
                continue
            if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
                raise ConfigError(f"{where}: id {int(ids.max())} is none of the model's {vocabulary}: another tokenizer made these rows")
            samples.append(Sample(ids, mask, where))
    return Rows(tuple(samples), dict(left_out))


def batches(lengths: Sequence[int], budget: int, *, epoch: int, seed: int) -> list[list[int]]:
    """Row numbers of an epoch's steps: every row once, in an order that depends on `seed` and `epoch` alone, filled up to `budget` tokens;
    a longer row goes alone."""
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    found: list[list[int]] = []
    used = 0
    for number in order.tolist():
        if found and used + lengths[number] <= budget:
            found[-1].append(number)
            used += lengths[number]
        else:
            found.append([number])
            used = lengths[number]
    return found


class _Reader:
    """Rows of any form to ids and mask. The manifest is asked at the first row with ids, a renderer made at the first conversation."""

    def __init__(self, data: Path, tokenizer: Tokenizer, renderer: str | None, any_tokenizer: bool) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._checked = any_tokenizer
        self._conversations: Conversations | None = None

    def row(self, row: Any, where: str) -> tuple[Ids, Mask]:
        if isinstance(row, Unreadable):
            raise ConfigError(f"{where}: {row}")
        try:
            ids, mask = self._row(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{where}: {why}") from error
        mask[:1] = False  # nothing stands before the first id
        return ids, mask

    def _row(self, row: Any) -> tuple[Ids, Mask]:
        if not isinstance(row, dict):
            raise ValueError("a row is an object")
        if "input_ids" in row and "labels" in row:
            self._check_ids()
            ids, labels = _integers(row, "input_ids"), _integers(row, "labels")
            mask = labels != IGNORE
            if labels.shape != ids.shape or (labels[mask] != ids[mask]).any():
                raise ValueError(f"labels are the input_ids themselves, unshifted, with {IGNORE} where nothing is trained")
            return ids, mask
        if "prompt_ids" in row and "response_ids" in row:
            self._check_ids()
            response = _integers(row, "loss_mask")
            ids = np.concatenate([_integers(row, "prompt_ids"), _integers(row, "response_ids")])
            if ((response != 0) & (response != 1)).any():
                raise ValueError("loss_mask holds values other than 0 and 1")
            if len(response) != len(row["response_ids"]):
                raise ValueError("loss_mask and response_ids are not of one length")
            return ids, np.concatenate([np.zeros(len(row["prompt_ids"]), np.bool_), response.astype(np.bool_)])
        if "messages" in row:
            return self._conversation(row)
        raise ValueError("a row has input_ids and labels, or prompt_ids, response_ids and loss_mask, or messages")

    def _conversation(self, row: Mapping[str, Any]) -> tuple[Ids, Mask]:
        """Without `weight`s, all of the assistant's messages are trained."""
        if self._conversations is None:
            self._conversations = Conversations(self.tokenizer, self.renderer)
        messages = [message_from_chat(message) for message in row["messages"]]
        if any(message.images for message in messages):
            raise ValueError("holds images, which cannot be trained")
        tools = row.get("tools") or []
        tools = json.loads(tools) if isinstance(tools, str) else tools
        trained = [
            message.role == "assistant" and bool(1 if given.get("weight") is None else given["weight"])
            for message, given in zip(messages, row["messages"], strict=True)
        ]
        return self._conversations.render(messages, [tool_from_chat(tool) for tool in tools], trained)

    def _check_ids(self) -> None:
        if self._checked:
            return
        self._checked = True
        ours = {"tokenizer_hash": self.tokenizer.hash, "template_hash": self.tokenizer.template_hash}
        for model in _models(self.data):
            for name, own in ours.items():
                theirs = model.get(name)
                if theirs is not None and theirs != own:
                    what = name.removesuffix("_hash").replace("template", "chat template")
                    raise ConfigError(
                        f"{self.data} holds ids of {model.get('model') or 'a model'}, whose {what} is not {self.tokenizer.name_or_path}'s "
                        f"({theirs[:12]}, {str(own)[:12]}). Export conversations (polar export --as chat), which are rendered for this "
                        "model. If it is the same and was only saved anew: --any-tokenizer"
                    )


def _pictured(row: Any) -> bool:
    """Whether a row of ids (`rl`) is of a conversation with images: where they stood, the model saw what no id says."""
    if not isinstance(row, dict) or "prompt_ids" not in row:
        return False
    messages = [*_listed(row.get("prompt_messages")), *_listed(row.get("response_messages"))]
    parts = (part for message in messages if isinstance(message, dict) for part in _listed(message.get("content")))
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _integers(row: Mapping[str, Any], name: str) -> Ids:
    """int32[n] of a list of integers or booleans: numpy would cut fractions off without a word."""
    values = np.asarray(row[name])
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iub"):
        raise ValueError(f"{name} is no list of integers")
    limits = np.iinfo(np.int32)
    if len(values) and (int(values.min()) < limits.min or int(values.max()) > limits.max):
        raise ValueError(f"{name} holds values that int32 cannot")
    return values.astype(np.int32)


def _models(data: Path) -> Iterator[Mapping[str, Any]]:
    """What the manifest beside the data says of the models that made it; nothing where there is no manifest."""
    place = (data if data.is_dir() else data.parent.parent) / "manifest.json"
    if place.is_file():
        try:
            yield from orjson.loads(place.read_bytes()).get("models") or ()
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{place} is not the manifest of an export: {error}") from error


def _files(folder: Path, split: str) -> list[Path]:
    parts = folder / "data"
    return sorted(parts.glob(f"{split}-[0-9]*.parquet")) or sorted(parts.glob(f"{split}-[0-9]*.jsonl"))
