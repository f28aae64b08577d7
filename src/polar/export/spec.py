"""What an export shall hold, as plain data. Knows no store, no trajectory and no file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import orjson

from polar.errors import ConfigError
from polar.export.facts import Facts

Form = Literal["rl", "chat", "tokens"]
"""`rl`: training rows with log-probabilities and rewards. `chat`: one conversation a row with tools and a training mask per message.
`tokens`: pre-tokenised rows with labels."""
FileFormat = Literal["parquet", "jsonl"]
SplitBy = Literal["repository", "task", "split"]


@dataclass(frozen=True, slots=True)
class Spec:
    """The options of an export. Two runs with equal specs over one store write equal files.

    `kind` is of sessions: those of an evaluation are no training data unless asked for. `min_reward` leaves out sessions below it
    (rejection sampling), `best_of` keeps at most that many of each group, the best first.
    `splits` maps names to fractions of the sessions; what they leave is `train`. `known_splits` is a `splits.jsonl` of an earlier export,
    whose repositories or tasks keep their side. `allow_shared_prompts` lets rows of several splits start with the same prompt, where tasks
    differ only in what the harness reads later. `max_tokens` leaves out longer rows; to cut them instead, use the builder's own option.
    `part_mb` is when a file ends (counted before compression), and so how much work an interruption can cost.
    """

    form: Form = "chat"
    file_format: FileFormat = "parquet"
    builder: str = "prefix_merging"
    options: Mapping[str, Any] = field(default_factory=dict)
    credit: str = "broadcast"
    min_reward: float | None = None
    best_of: int | None = None
    keep_unrewarded: bool = False
    include_open: bool = False
    kind: Literal["train", "eval", "any"] = "train"
    harness: str | None = None
    task: str | None = None
    roles: tuple[str, ...] = ()
    max_tokens: int | None = None
    deduplicate: bool = True
    unfaithful: bool = False
    splits: Mapping[str, float] = field(default_factory=dict)
    split_by: SplitBy = "repository"
    known_splits: str | None = None
    allow_shared_prompts: bool = False
    labels: str | None = None
    seed: int = 0
    part_mb: float = 64.0

    def check(self) -> None:
        """Raises `ConfigError` for options that contradict each other."""
        if self.best_of is not None and self.best_of < 1:
            raise ConfigError("--best-of must be at least 1")
        if self.best_of is not None and self.keep_unrewarded:
            raise ConfigError("--best-of compares rewards: it goes without --keep-unrewarded")
        if self.form == "chat" and self.options.get("cut") == "token":
            raise ConfigError("a conversation ends with a whole answer: --as chat goes with cut=turn, not cut=token")
        if self.part_mb <= 0:
            raise ConfigError("--part-mb must be above 0")
        if "train" in self.splits:
            raise ConfigError("`train` is what the other splits leave: name only those, as in --split test=0.1")
        for name, share in self.splits.items():
            if not name.isidentifier():
                raise ConfigError(f"a split's name is made of letters, digits and underscores, not {name!r}")
            if not 0 < share < 1:
                raise ConfigError(f"--split {name}={share}: a share is above 0 and below 1")
        if sum(self.splits.values()) >= 1:
            raise ConfigError("the splits leave nothing for `train`")
        if self.splits and self.split_by == "split":
            raise ConfigError("--split-by split takes the task set's own splits: it goes without --split")
        for path in (self.known_splits, self.labels):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{path} is not a file" if Path(path).exists() else f"{path} does not exist")

    @property
    def is_split(self) -> bool:
        return bool(self.splits) or self.known_splits is not None or self.split_by == "split"

    def wants(self, facts: Facts) -> bool:
        """Whether the session is among those that the filters name."""
        return (self.harness is None or facts.harness == self.harness) and (self.task is None or fnmatchcase(facts.task or "", self.task))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def fingerprint(self, store: str) -> str:
        """Of these options over that store: an interrupted export goes on only if it is the same."""
        digest = hashlib.sha256(orjson.dumps([store, self.as_json()], option=orjson.OPT_SORT_KEYS))
        for path in (self.known_splits, self.labels):
            if path is not None:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()
