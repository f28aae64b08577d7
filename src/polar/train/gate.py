"""The gate before a step: does the trainer give the recorded ids the log-probabilities that the engine gave them when it sampled them?

If it does not, something between the two is wrong, and a step would train on ratios that mean nothing. The comparison is over rows as they
were delivered, so it sees everything in between: weights, template, tokenizer, alignment, temperature, policy version. What rows say of
themselves is compared as well: ids of another tokenizer, prompts of another template or samples of another temperature shut the gate even
where the numbers happen to agree. It runs before anything is trained; a failed one stops the run with its cause.

Knows no engine and no file: rows, log-probabilities and facts in, a report out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polar.errors import NotTrainable
from polar.trajectory.row import Trace

Floats = NDArray[np.float32]

Suspect = Literal["stale_policy", "tokenizer", "chat_template", "temperature", "shifted", "weights"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """In nats. Float32 on both sides agrees within 1e-4, bfloat16 within some hundredths on the mean."""

    mean: float = 0.02
    """Of the absolute difference over all compared tokens."""
    largest: float = 1.0
    """Of the 99.9th percentile: one token may differ by chance of rounding, one in a thousand may not."""

    @property
    def row(self) -> float:
        """Of the mean over each row of `ROW_TOKENS` tokens and more: one engine of many may be wrong, and drown in the mean over all."""
        return ROW_FACTOR * self.mean


ROW_TOKENS = 16
ROW_FACTOR = 5.0
"""How much more than all tokens those of one row may differ."""


@dataclass(frozen=True, slots=True)
class Part:
    """The difference over some of the tokens."""

    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class Report:
    """`whole`: over all tokens; `by`: over those of each harness, and of each turn (`turn 0`, ...). `suspects`: the likeliest cause first,
    with what speaks for it; empty where the gate is open. `worst`: the row that differs most, with its session."""

    whole: Part
    by: Mapping[str, Part]
    open: bool
    suspects: tuple[tuple[Suspect, str], ...] = ()
    threshold: Threshold = field(default_factory=Threshold)
    worst: tuple[str, Part] | None = None

    def __str__(self) -> str:
        said = f"mean {self.whole.mean:.2g}, largest {self.whole.largest:.2g} over {self.whole.tokens:,} tokens"
        if self.open:
            return f"recorded and recomputed log-probabilities agree ({said})"
        why = "; ".join(f"{name}: {detail}" for name, detail in self.suspects)
        if not self.differs:
            return f"rows are not of this policy, though recorded and recomputed log-probabilities agree ({said}). Look at {why}"
        if self.worst is not None and self.worst[1].mean > self.threshold.row:
            said += f"; mean {self.worst[1].mean:.2g} over the {self.worst[1].tokens:,} of session {self.worst[0]!r}"
        return f"recorded and recomputed log-probabilities differ ({said}; allowed: mean {self.threshold.mean:g}). Look at {why}"

    @property
    def differs(self) -> bool:
        """Whether the numbers are beyond the threshold, or are none (NaN), whatever the rows say of themselves."""
        whole, limit = self.whole, self.threshold
        rows_agree = self.worst is None or self.worst[1].mean <= limit.row
        return not (whole.mean <= limit.mean and whole.largest <= limit.largest and rows_agree)

    def check(self) -> None:
        """Raises `NotTrainable` if the gate is shut."""
        if not self.open:
            raise NotTrainable(str(self))


@dataclass(frozen=True, slots=True)
class Facts:
    """What the trainer knows of itself, to be compared with what the rows say of the engine. `None`: not known."""

    policy_version: str | None = None
    tokenizer_hash: str | None = None
    template_hash: str | None = None
    temperature: float = 1.0
    allowed_versions: frozenset[str] | None = None
    """Older versions that the staleness bound lets through: what they sampled is compared with nothing."""


def compare(
    traces: Sequence[Trace],
    recomputed: Sequence[Floats],
    facts: Facts,
    *,
    provenance: Sequence[Mapping[str, Any]] = (),
    threshold: Threshold | None = None,
) -> Report:
    """`recomputed[i]`: float32[k], the trainer's log-probability of each trained id of row i. `provenance[i]`: what is recorded of row i's
    engine (`tokenizer_hash`, `template_hash`). Spans of another policy version are left out, and reported when nothing else is left.

    Raises `ValueError` where a row's numbers are not as many as its trained ids.
    """
    threshold = threshold or Threshold()
    gaps: list[Floats] = []
    keys: dict[str, list[Floats]] = {}
    stale: set[str] = set()
    worst: tuple[str, Part] | None = None
    for trace, found in zip(traces, recomputed, strict=True):
        places = np.flatnonzero(trace.mask)
        if len(found) != len(places):
            raise ValueError(f"row of session {trace.session!r}: {len(places)} trained ids and {len(found)} recomputed log-probabilities")
        gap = np.asarray(found, np.float32) - trace.logprobs[places]
        own: list[Floats] = []
        for turn, span in enumerate(span for span in trace.spans if span.trained):
            inside = (places >= span.start) & (places < span.end)
            if facts.policy_version is not None and span.policy_version not in (None, facts.policy_version):
                if facts.allowed_versions is None or span.policy_version not in facts.allowed_versions:
                    stale.add(str(span.policy_version))
                continue
            part = gap[inside]
            own.append(part)
            for key in (f"harness {trace.metadata.get('harness', 'unknown')}", f"turn {turn}"):
                keys.setdefault(key, []).append(part)
        gaps += own
        row = _part(own)
        if row.tokens >= ROW_TOKENS and (worst is None or row.mean > worst[1].mean):
            worst = (trace.session, row)
    told = _told(traces, facts, provenance, stale)
    report = Report(_part(gaps), {key: _part(parts) for key, parts in keys.items()}, True, (), threshold, worst)
    if not told and not report.differs:
        return report
    return replace(report, open=False, suspects=(*told, *(_seen(traces, recomputed, not told) if report.differs else ())))


def _told(
    traces: Sequence[Trace], facts: Facts, provenance: Sequence[Mapping[str, Any]], stale: set[str]
) -> tuple[tuple[Suspect, str], ...]:
    """What the rows say of themselves that is not so of the trainer."""
    found: list[tuple[Suspect, str]] = []
    if stale:
        versions = ", ".join(sorted(stale))
        found.append(("stale_policy", f"rows were sampled by policy version {versions}, and the trainer is at {facts.policy_version}"))
    for name, own in (("tokenizer", facts.tokenizer_hash), ("chat_template", facts.template_hash)):
        field_name = "tokenizer_hash" if name == "tokenizer" else "template_hash"
        theirs = {str(one[field_name]) for one in provenance if one.get(field_name)}
        if own is not None and theirs - {own}:
            found.append((name, f"the rows' is {sorted(theirs)[0][:12]}, the trainer's {own[:12]}"))  # type: ignore[arg-type]
    trained = [span for trace in traces for span in trace.spans if span.trained]
    other = {float(t) for span in trained if (t := span.sampling.get("temperature")) is not None} - {facts.temperature}
    if other:
        said = ", ".join(f"{temperature:g}" for temperature in sorted(other))
        found.append(("temperature", f"rows were sampled at {said}, the trainer computes for {facts.temperature:g}"))
    return tuple(found)


def _seen(traces: Sequence[Trace], recomputed: Sequence[Floats], alone: bool) -> tuple[tuple[Suspect, str], ...]:
    """What the numbers look like. `alone`: nothing else explains them."""
    found: list[tuple[Suspect, str]] = []
    if (shift := _shift(traces, recomputed)) is not None:
        found.append(
            (
                "shifted",
                f"the recorded values fit the ids {abs(shift)} place{'s' if abs(shift) > 1 else ''} {'later' if shift > 0 else 'earlier'}",
            )
        )
    if not found and alone:
        found.append(
            ("weights", "nothing else explains it: the engine's weights are not the trainer's (a reload that failed or was half done?)")
        )
    return tuple(found)


def _shift(traces: Sequence[Trace], recomputed: Sequence[Floats]) -> int | None:
    """The shift under which the recorded values fit far better than in place, if there is one. Spans are shifted each by itself: what
    stands between them was not sampled."""
    pairs = [pair for trace, found in zip(traces, recomputed, strict=True) for pair in _spans(trace, np.asarray(found, np.float32))]

    def distance(shift: int) -> float:
        parts = [
            np.abs(recorded[max(0, -shift) : len(recorded) - max(0, shift)] - found[max(0, shift) : len(found) - max(0, -shift)])
            for recorded, found in pairs
            if len(recorded) > abs(shift) + 1
        ]
        return float(np.mean(np.concatenate(parts))) if parts else float("inf")

    best = min((-2, -1, 1, 2), key=distance)
    return best if 3 * distance(best) < distance(0) else None


def _spans(trace: Trace, found: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Of each trained span, what was recorded and what was recomputed."""
    places = np.flatnonzero(trace.mask)
    for span in trace.spans:
        inside = (places >= span.start) & (places < span.end)
        if inside.any():
            yield trace.logprobs[places[inside]], found[inside]


def _part(gaps: Sequence[Floats]) -> Part:
    values = np.abs(np.concatenate(gaps)) if gaps else np.zeros(0, np.float32)
    if not len(values):
        return Part(0, 0.0, 0.0)
    return Part(len(values), float(values.mean(dtype=np.float64)), float(np.quantile(values, 0.999)))
