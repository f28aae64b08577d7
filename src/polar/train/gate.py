"""The gate before a step: does the trainer give the recorded ids the log-probabilities that the engine gave them when it sampled them?

If it does not, something between the two is wrong, and a step would train on ratios that mean nothing. The comparison is over rows as they
were delivered, so it sees everything in between: weights, template, tokenizer, alignment, temperature, policy version. It runs before
anything is trained; a failed one stops the run with its cause.

Knows no engine and no file: rows, log-probabilities and facts in, a report out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Part:
    """The difference over some of the tokens."""

    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class Report:
    """`whole`: over all tokens; `by`: over those of each harness, and of each turn (`turn 0`, ...). `suspects`: the likeliest cause first,
    with what speaks for it; empty where the gate is open."""

    whole: Part
    by: Mapping[str, Part]
    open: bool
    suspects: tuple[tuple[Suspect, str], ...] = ()
    threshold: Threshold = field(default_factory=Threshold)

    def __str__(self) -> str:
        said = f"mean {self.whole.mean:.2g}, largest {self.whole.largest:.2g} over {self.whole.tokens:,} tokens"
        if self.open:
            return f"recorded and recomputed log-probabilities agree ({said})"
        why = "; ".join(f"{name}: {detail}" for name, detail in self.suspects)
        return f"recorded and recomputed log-probabilities differ ({said}; allowed: mean {self.threshold.mean:g}). Look at {why}"

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
    recorded_all: list[Floats] = []
    stale: set[str] = set()
    for trace, found in zip(traces, recomputed, strict=True):
        places = np.flatnonzero(trace.mask)
        if len(found) != len(places):
            raise ValueError(f"row of session {trace.session!r}: {len(places)} trained ids and {len(found)} recomputed log-probabilities")
        gap = np.asarray(found, np.float32) - trace.logprobs[places]
        for turn, span in enumerate(span for span in trace.spans if span.trained):
            inside = (places >= span.start) & (places < span.end)
            if facts.policy_version is not None and span.policy_version not in (None, facts.policy_version):
                if facts.allowed_versions is None or span.policy_version not in facts.allowed_versions:
                    stale.add(str(span.policy_version))
                continue
            part = gap[inside]
            gaps.append(part)
            recorded_all.append(trace.logprobs[places][inside])
            for key in (f"harness {trace.metadata.get('harness', 'unknown')}", f"turn {turn}"):
                keys.setdefault(key, []).append(part)
    whole = _part(gaps)
    passed = not stale and whole.mean <= threshold.mean and whole.largest <= threshold.largest
    suspects = () if passed else _suspects(traces, recomputed, facts, provenance, stale)
    return Report(whole, {key: _part(parts) for key, parts in keys.items()}, passed, suspects, threshold)


def _suspects(
    traces: Sequence[Trace], recomputed: Sequence[Floats], facts: Facts, provenance: Sequence[Mapping[str, Any]], stale: set[str]
) -> tuple[tuple[Suspect, str], ...]:
    found: list[tuple[Suspect, str]] = []
    if stale:
        versions = ", ".join(sorted(stale))
        found.append(("stale_policy", f"rows were sampled by policy version {versions}, and the trainer is at {facts.policy_version}"))
    for name, own in (("tokenizer", facts.tokenizer_hash), ("chat_template", facts.template_hash)):
        field_name = "tokenizer_hash" if name == "tokenizer" else "template_hash"
        theirs = {str(one[field_name]) for one in provenance if one.get(field_name)}
        if own is not None and theirs - {own}:
            found.append((name, f"the rows' is {sorted(theirs)[0][:12]}, the trainer's {own[:12]}"))  # type: ignore[arg-type]
    temperatures = {float(t) for trace in traces for span in trace.spans if (t := span.sampling.get("temperature")) is not None}
    if temperatures - {facts.temperature}:
        found.append(("temperature", f"rows were sampled at {sorted(temperatures)}, the trainer computes for {facts.temperature:g}"))
    if (shift := _shift(traces, recomputed)) is not None:
        found.append(
            (
                "shifted",
                f"the recorded values fit the ids {abs(shift)} place{'s' if abs(shift) > 1 else ''} {'later' if shift > 0 else 'earlier'}",
            )
        )
    if not found:
        found.append(
            ("weights", "nothing else explains it: the engine's weights are not the trainer's (a reload that failed or was half done?)")
        )
    return tuple(found)


def _shift(traces: Sequence[Trace], recomputed: Sequence[Floats]) -> int | None:
    """The shift under which the recorded values fit far better than in place, if there is one."""
    pairs = [(trace.logprobs[trace.mask], np.asarray(found, np.float32)) for trace, found in zip(traces, recomputed, strict=True)]

    def distance(shift: int) -> float:
        parts = [
            np.abs(recorded[max(0, -shift) : len(recorded) - max(0, shift)] - found[max(0, shift) : len(found) - max(0, -shift)])
            for recorded, found in pairs
            if len(recorded) > abs(shift) + 1
        ]
        return float(np.mean(np.concatenate(parts))) if parts else float("inf")

    best = min((-2, -1, 1, 2), key=distance)
    return best if distance(best) < 0.2 * distance(0) else None


def _part(gaps: Sequence[Floats]) -> Part:
    values = np.abs(np.concatenate(gaps)) if gaps else np.zeros(0, np.float32)
    if not len(values):
        return Part(0, 0.0, 0.0)
    return Part(len(values), float(values.mean(dtype=np.float64)), float(np.quantile(values, 0.999)))
