"""What `/metrics` shows: the counts of `polar.rollout.reading.overview` for Prometheus. Counted from the database, so a restart resets
nothing. No label carries a task, a session or content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def exposition(overview: Mapping[str, Any], trouble: str | None) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Counts(overview, trouble))
    return generate_latest(registry)


class _Counts(Collector):
    def __init__(self, overview: Mapping[str, Any], trouble: str | None) -> None:
        self._overview = overview
        self._trouble = trouble

    def collect(self) -> Iterator[Metric]:
        told = self._overview
        yield _by("polar_rollout_tasks", "Tasks kept", "state", told["tasks"])
        yield _by("polar_rollout_sessions", "Sessions kept", "state", told["sessions"])
        yield _by("polar_rollout_sessions_running", "Running sessions", "status", told["sessions_by_status"])
        yield _by("polar_rollout_outcomes", "Sessions that ended", "outcome", told["outcomes"])
        yield _by("polar_rollout_deliveries", "Callbacks", "state", told["deliveries"])
        by_turns = told["retries"]["by_turns"]
        ended = {name: counts["attempts"] for name, counts in by_turns.items()}
        failed = {name: counts["failed"] for name, counts in by_turns.items()}
        yield _by("polar_rollout_attempts", "Attempts that ended, by the turns reached", "turns", ended)
        yield _by("polar_rollout_attempts_failed", "Of those, by infrastructure", "turns", failed)
        yield _by("polar_rollout_attempts_failed_by_code", "The same by cause", "code", told["retries"]["by_code"])
        states: dict[str, int] = {}
        for node in told["nodes"]:
            states[node["status"]] = states.get(node["status"], 0) + 1
        yield _by("polar_rollout_nodes", "Nodes", "status", states)
        yield GaugeMetricFamily("polar_rollout_store_healthy", "Whether the database takes writes", float(self._trouble is None))


def _by(name: str, about: str, label: str, counts: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
