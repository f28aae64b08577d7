"""From a stored session to its rewarded trajectory: what `polar rebuild` and `polar export` both start from. No inference, no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.export.facts import KEYS, Facts
from polar.records import Completion
from polar.store.base import Store
from polar.trajectory.breaks import Decoder
from polar.trajectory.builders import builder
from polar.trajectory.credit import Policy, credit
from polar.trajectory.forest import Forest
from polar.trajectory.row import Trajectory

_RENDERED_BY = ("tokenizer_hash", "template_hash", "renderer", "thinking_retention")


class Maker:
    """A builder with its options, and a credit policy; with a `tokenizer` the drift report has text.

    Raises `ConfigError` for a builder, an option or a policy that does not exist.
    """

    def __init__(
        self, builder_name: str, options: Mapping[str, Any], credit_policy: str = "broadcast", tokenizer: Decoder | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._builder = builder(builder_name, options)
        if credit_policy not in get_args(Policy):
            raise ConfigError(f"no credit policy is called {credit_policy!r}; there are: {', '.join(get_args(Policy))}")
        self._policy: Policy = credit_policy  # type: ignore[assignment]

    async def trajectory(self, store: Store, facts: Facts) -> Trajectory:
        """Built with the facts in the session's metadata, where builders look for them.

        Raises `ConfigError` if the store has no such session, or if it has rewards by row that are not as many as its rows.
        """
        session = await store.session(facts.session)
        if session is None:
            raise ConfigError(f"no session is called {facts.session!r} in this store; see: polar session list")
        known = {name: getattr(facts, name) for name in KEYS}
        session = replace(session, metadata=session.metadata | {name: value for name, value in known.items() if value is not None})
        forest = Forest(session.id)
        async for completion in store.completions(session.id):
            forest.add(completion)
        trajectory = self._builder.build(forest, session, tokenizer=self._tokenizer)
        trajectory = replace(trajectory, builder=trajectory.builder | {"models": models(forest.records())})
        if self._policy == "per_row" and facts.row_rewards is None:
            return trajectory
        try:
            return credit(trajectory, facts.reward, self._policy, facts.row_rewards or () if self._policy == "per_row" else ())
        except ValueError as error:
            raise ConfigError(str(error)) from error


def models(completions: Iterable[Completion]) -> list[JsonObject]:
    """What sampled these completions, each once: whose ids they are (`tokenizer_hash`) and what rendered their prompts. `None` where the
    engine rendered and did not say."""
    found = {(one.model, *(one.provenance.get(name) for name in _RENDERED_BY)) for one in completions}
    return [dict(zip(("model", *_RENDERED_BY), one, strict=True)) for one in sorted(found, key=lambda one: tuple(map(str, one)))]
