"""Prometheus metrics, one registry per gateway. No label carries a session, a key or content."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polar.records import Completion

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("polar_requests", "HTTP requests", ["dialect", "operation", "status"], registry=registry)
        self.completions = Counter("polar_completions", "Recorded completions", ["dialect", "mode", "status"], registry=registry)
        self.untrainable = Counter("polar_untrainable", "Recorded completions that cannot be trained", ["mode"], registry=registry)
        self.prompt_tokens = Counter("polar_prompt_tokens", "Prompt tokens", registry=registry)
        self.sampled_tokens = Counter("polar_sampled_tokens", "Sampled tokens", registry=registry)
        self.breaks = Counter("polar_prefix_breaks", "Prompts that do not extend their parent", ["cause"], registry=registry)
        self.bridged = Counter("polar_prefix_extended", "Prompts that extend their parent", registry=registry)
        self.roots = Counter("polar_roots", "Prompts without a parent", registry=registry)
        self.adopted = Counter("polar_retries_adopted", "Retries that took over a running generation", registry=registry)
        self.left = Counter("polar_clients_left", "Clients that left before their answer", registry=registry)
        self.engine_seconds = Histogram("polar_engine_seconds", "Time in the engine", buckets=SECONDS, registry=registry)
        self.commit_seconds = Histogram("polar_commit_seconds", "Time until a completion is synced", buckets=SECONDS, registry=registry)
        self.request_seconds = Histogram("polar_request_seconds", "Time to the last byte", ["dialect"], buckets=SECONDS, registry=registry)
        self.inflight = Gauge("polar_inflight", "Calls inside the engine", registry=registry)
        self.sessions = Gauge("polar_sessions_loaded", "Sessions in memory", registry=registry)

    def recorded(self, completion: Completion) -> None:
        self.completions.labels(completion.dialect, completion.mode, completion.status).inc()
        if completion.untrainable is not None:
            self.untrainable.labels(completion.mode).inc()
        if completion.prompt_ids is not None:
            self.prompt_tokens.inc(len(completion.prompt_ids))
        if completion.sampled_ids is not None:
            self.sampled_tokens.inc(len(completion.sampled_ids))
        if completion.broken is not None:
            self.breaks.labels(completion.broken.cause.value).inc()
        elif completion.parent is None:
            self.roots.inc()
        else:
            self.bridged.inc()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
