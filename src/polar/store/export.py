"""A completion as one JSON object, for people and scripts.

Ids and log-probabilities are lists; a log-probability that is missing or not finite is null.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from polar.chat import JsonObject
from polar.records import Completion, Floats
from polar.store.codec import dumps, message_to_json, messages_to_json, tools_to_json


def completion_to_json(completion: Completion) -> bytes:
    """One line, without its newline."""
    broken: JsonObject | None = None
    if completion.broken is not None:
        broken = asdict(completion.broken)
        broken["cause"] = completion.broken.cause.value
    return dumps(
        {
            "session": completion.session,
            "number": completion.number,
            "choice": completion.choice,
            "status": completion.status,
            "dialect": completion.dialect,
            "mode": completion.mode,
            "parent": completion.parent,
            "shared": completion.shared,
            "broken": broken,
            "model": completion.model,
            "model_requested": completion.model_requested,
            "policy_version": completion.policy_version,
            "prompt_ids": None if completion.prompt_ids is None else completion.prompt_ids.tolist(),
            "sampled_ids": None if completion.sampled_ids is None else completion.sampled_ids.tolist(),
            "logprobs": _logprobs(completion.logprobs),
            "messages": messages_to_json(completion.messages),
            "answer": message_to_json(completion.answer),
            "tools": tools_to_json(completion.tools),
            "finish": completion.finish,
            "stop_sequence": completion.stop_sequence,
            "sampling": completion.sampling,
            "asked": completion.asked,
            "tags": sorted(completion.tags),
            "untrainable": completion.untrainable,
            "provenance": completion.provenance,
            "hints": completion.hints,
            "cached_tokens": completion.cached_tokens,
            "thinking_tokens": completion.thinking_tokens,
            "routed_experts": completion.routed_experts,
            "started": completion.started,
            "ended": completion.ended,
            "delivered": completion.delivered,
        }
    )


def _logprobs(logprobs: Floats | None) -> list[float | None] | None:
    """float32 as its shortest decimal, so that it reads back to the same bits."""
    if logprobs is None:
        return None
    return [float(str(value)) if np.isfinite(value) else None for value in logprobs]
