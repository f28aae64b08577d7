"""The ledger: every sampled token that no row trains, and why (law 3). Knows no rows.

A line is a run of one completion's sampled ids; a reason says what it is about, a rule what decided it. A session's lines and the trained
spans of its rows together cover every sampled id exactly once: `Coverage` proves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polar.errors import PolarError


class Reason(StrEnum):
    """Why sampled tokens are not trained."""

    TITLE = "title"
    ROUTER = "router"
    PROBE = "probe"
    COMPACTION = "compaction"
    MAIN = "main"
    """Only where the options leave the main conversation out; likewise `sub_agent`."""
    SUB_AGENT = "sub_agent"
    ABORTED = "aborted"
    ABANDONED_RETRY = "abandoned_retry"
    """The same prompt was sent again, and nothing goes on from this answer."""
    MISSING_IDS = "missing_ids"
    """The engine gave no prompt ids (or an empty prompt): what the tokens followed is not known."""
    MISSING_LOGPROB = "missing_logprob"
    CONSTRAINED = "constrained"
    """Sampled under a grammar or a bias."""
    GREEDY = "greedy"
    """Temperature 0: not a sample of the policy."""
    MALFORMED = "malformed"
    """A tool call that the parser could not read; trained unless the options say otherwise."""
    UNTRAINABLE = "untrainable"
    """The capture said so; the rule has its words."""
    OVER_LENGTH = "over_length"
    CHAIN_BROKEN = "chain_broken"
    """Only with `on_break="splice"`: the reference system drops a chain's calls after its first break."""


@dataclass(frozen=True, slots=True)
class Line:
    """The sampled ids `start..end` (counted within the completion's own) of one completion."""

    completion: int
    start: int
    end: int
    reason: str
    rule: str
    """What decided it, for people: the recipe's rule, the option, the engine's words."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Ledger:
    """A session's lines, in order of completion and position."""

    lines: tuple[Line, ...] = ()

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def tokens(self) -> int:
        return sum(line.tokens for line in self.lines)

    def by_reason(self) -> dict[str, int]:
        """Tokens by reason, the most first."""
        found: Counter[str] = Counter()
        for line in self.lines:
            found[line.reason] += line.tokens
        return dict(found.most_common())


class LawBroken(PolarError):
    """A builder's rows and ledger break a law: a bug in the builder, never in a session."""


class ConservationError(LawBroken):
    """Sampled tokens are lost, doubled or invented (law 3)."""


class FaithfulnessError(LawBroken):
    """A trained token is not the engine's, or stands after other ids than the engine saw before it (laws 1 and 2)."""


class Coverage:
    """Accounts for each sampled id of a session. `sampled` maps the completions' numbers to their numbers of sampled ids."""

    def __init__(self, sampled: Mapping[int, int]) -> None:
        self._sampled = sampled
        self._starts: dict[int, int] = {}
        total = 0
        for number, count in sampled.items():
            self._starts[number] = total
            total += count
        self._seen = np.zeros(total, np.bool_)

    def add(self, completion: int, trained: NDArray[np.bool_], start: int = 0) -> None:
        """Accounts for the ids `start..start + len(trained)` of a completion where `trained: bool[n]` is true. Raises `ConservationError`
        for one that was accounted for before, or that was never sampled."""
        count = self._sampled.get(completion, 0)
        if not 0 <= start <= start + len(trained) <= count:
            raise ConservationError(f"completion {completion} sampled {count} tokens, and a row or the ledger has {start + len(trained)}")
        at = self._starts.get(completion, 0) + start
        seen = self._seen[at : at + len(trained)]
        twice = seen & trained
        if twice.any():
            raise ConservationError(f"the sampled token {start + int(twice.argmax())} of completion {completion} is accounted for twice")
        seen |= trained

    def add_lines(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.add(line.completion, np.ones(line.tokens, np.bool_), line.start)

    def check(self) -> None:
        """Raises `ConservationError` if a sampled id was not accounted for."""
        if self._seen.all():
            return
        for number, count in self._sampled.items():
            seen = self._seen[self._starts[number] : self._starts[number] + count]
            if not seen.all():
                missing = int(np.count_nonzero(~seen))
                raise ConservationError(
                    f"{missing} of the {count} tokens that completion {number} sampled are in no row and not in the ledger, "
                    f"the first at {int(seen.argmin())}"
                )
