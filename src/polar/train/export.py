"""A policy as an engine loads it: safetensors and config.json in a folder of its own, complete before its name is there.

*Untied*: a model whose LM head is its embedding is written with both, each under its own name, and a config.json that says so. Engines
that reload in place look for `lm_head.weight` when they were started with one, and a vLLM on a CPU that was started with a tied model keeps
a stale head without a word. So the folder that an engine is started from is to be untied, too: `untie` makes one of any model's folder.

The files are not synced to the disk: a crash that loses them loses the engine's copy as well, and the next start writes them anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar.errors import ConfigError
from polar.train.disk import saving

if TYPE_CHECKING:
    from polar.train.policy import Policy

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""What transformers calls the two: nearly all models have the first name of the embedding, GPT-2's kin the second, Falcon and BLOOM the
third."""
TIE = "tie_word_embeddings"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "generation_config.json"),
)


def export_model(policy: Policy, folder: Path, *, tokenizer: Path | None = None, adapter_only: bool = False) -> Path:
    """Writes the policy's weights into `folder`, which must not be there yet, and returns it. A LoRA adapter is merged into its base, in
    what is written only, or written alone (`adapter_only`). `tokenizer`: a model's folder whose tokenizer is copied beside, so that an
    engine can also be started from here.

    Raises `ConfigError` where `folder` exists, or the policy has no adapter to write.
    """
    from polar.train.loading import save_merged, save_model

    if folder.exists():
        raise ConfigError(f"{folder} is there already; each version of the weights has a folder of its own")
    making = _scratch(folder)
    if adapter_only:
        if not hasattr(policy.model, "peft_config"):
            raise ConfigError("this policy has no adapter: it is trained whole")
        save_model(policy.model, making)
    else:
        save_merged(policy.model, making)
        _untie_in_place(making)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, making)
    making.rename(folder)
    return folder


def untie(source: Path, target: Path) -> Path:
    """A copy of a model's folder with untied embeddings, made without loading the model; files that need no change are hard links where the
    file system has them. A model that is untied already is copied as it is. Raises `ConfigError` where `target` exists, or `source` is no
    model's folder."""
    if target.exists():
        raise ConfigError(f"{target} is there already")
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json: it is no model's folder")
    making = _scratch(target)
    for file in source.iterdir():
        if file.is_file():
            _link(file, making / file.name)
    _untie_in_place(making)
    making.rename(target)
    return target


class Exports:
    """Versions of a policy under one folder, `policy-000007` and so on; the newest `keep` of them stay, so that an engine which
    still reads the one before the last can."""

    def __init__(self, root: Path, *, keep: int = 2, tokenizer: Path | None = None, adapter_only: bool = False) -> None:
        self.root = root
        self._keep = keep
        self._tokenizer = tokenizer
        self._adapter_only = adapter_only

    def write(self, policy: Policy, version: int) -> Path:
        """The folder of that version, written anew: one that an earlier run left may hold other weights. Raises `SaveFailed`."""
        folder = self.root / f"policy-{version:06d}"
        with saving("the weights for the engines", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for left in self.root.glob(".policy-*"):
                shutil.rmtree(left)
            if folder.exists():
                shutil.rmtree(folder)
            export_model(policy, folder, tokenizer=self._tokenizer, adapter_only=self._adapter_only)
        for old in sorted(self.root.glob("policy-*"), key=lambda one: one.stat().st_mtime_ns)[: -self._keep]:
            shutil.rmtree(old)
        return folder


def _scratch(folder: Path) -> Path:
    making = folder.parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    return making


def _untie_in_place(folder: Path) -> None:
    """Adds the head to the weights and unsets the tie. Files are replaced, never written into: they may be links."""
    config = folder / "config.json"
    facts: dict[str, Any] = json.loads(config.read_text())
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"{folder} has no safetensors; save the model in that format first")
    places = {name: shard for shard in shards for name in _names(shard)}
    parts = [part for part in (facts, facts.get("text_config")) if isinstance(part, dict)]
    tied = HEAD not in places and _tied(parts, folder)
    if tied:
        embedding = _only([name for name in places if f".{name}".endswith(tuple(f".{end}" for end in EMBEDDINGS))], folder)
        _add_head(folder, shards, places, embedding)
    for part in parts:
        if tied or part.get(TIE):
            part[TIE] = False
    _replace(config, json.dumps(facts, indent=2, sort_keys=True) + "\n")


def _tied(parts: Sequence[dict[str, Any]], folder: Path) -> bool:
    """As its config.json says; where that is silent (Gemma's is), as transformers has it for such a model."""
    said = [bool(part[TIE]) for part in parts if TIE in part]
    if said:
        return any(said)
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(folder).get_text_config().tie_word_embeddings)


def _add_head(folder: Path, shards: Sequence[Path], places: dict[str, Path], embedding: str) -> None:
    """As one more shard. A single file is renamed for that: readers take `model.safetensors` for all there is."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(places[embedding], framework="pt") as file:
        weight = file.get_tensor(embedding)
    count = len(shards) + 1
    head = folder / f"model-{count:05d}-of-{count:05d}.safetensors"
    save_file({HEAD: weight}, head, metadata={"format": "pt"})
    renamed = {shard: folder / f"model-{number:05d}-of-{count:05d}.safetensors" for number, shard in enumerate(shards, start=1)}
    for shard, name in renamed.items():
        shard.rename(name)
    weight_map = {name: renamed[shard].name for name, shard in places.items()} | {HEAD: head.name}
    total = sum(file.stat().st_size for file in (*renamed.values(), head))
    _replace(
        folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
    )


def _names(shard: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(shard, framework="pt") as file:
        return list(file.keys())


def _only(names: list[str], folder: Path) -> str:
    if len(names) != 1:
        raise ConfigError(f"{folder}: its LM head is tied to its embedding, but {len(names)} tensors are called {' or '.join(EMBEDDINGS)}")
    return names[0]


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(text)
    temporary.replace(file)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and not (target / name).exists():
            _link(source / name, target / name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
