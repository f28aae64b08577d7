"""What became of a session, in a word: passed, or how it failed. Reads the messages of its rows. Pure.

The refusals are those of the harnesses that the demo runs; each is what the CLI itself tells its model.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from polar.chat import JsonObject
from polar.rollout.models import SessionResult

Kind = Literal["passed", "wrong tool", "wrong arguments", "no tool call", "wrong result", "no outcome"]
KINDS: tuple[Kind, ...] = ("passed", "wrong tool", "wrong arguments", "no tool call", "wrong result", "no outcome")
"""*Wrong tool*: one that the harness does not have. *Wrong arguments*: a tool of the harness with arguments that it refuses. *No tool
call*:
text, or a call that nobody can read. *Wrong result*: spoke the protocol and did something else than asked. *No outcome*: the infrastructure
failed it; in no number."""

_NO_SUCH_TOOL = re.compile(r"unsupported call: |Tool \S+ not found")
_REFUSED = re.compile(r"failed to parse function arguments|Validation failed for tool")


def kind(result: SessionResult, passed: float = 1.0) -> Kind:
    """`passed`: the reward from which on a session has passed."""
    if not result.usable or result.reward is None:
        return "no outcome"
    if result.reward >= passed:
        return "passed"
    answers = list(tool_answers(result))
    refusals = [said for said in answers if _NO_SUCH_TOOL.match(said) or _REFUSED.match(said)]
    if not answers:
        return "no tool call"
    if len(refusals) < len(answers):
        return "wrong result"
    return "wrong tool" if _NO_SUCH_TOOL.match(refusals[0]) else "wrong arguments"


def tool_answers(result: SessionResult) -> Iterator[str]:
    """What the harness's tools answered, in order; rows that repeat a beginning repeat its answers."""
    for trace in (result.trajectory or {}).get("traces", ()):
        for message in (*_after_user(trace.get("prompt_messages") or ()), *(trace.get("response_messages") or ())):
            if message.get("role") == "tool":
                yield str(message.get("content") or "")


def _after_user(messages: Sequence[JsonObject]) -> Sequence[JsonObject]:
    return [message for message in messages if message.get("role") == "tool"]


def count(results: Iterable[SessionResult]) -> dict[Kind, int]:
    """Sessions of each kind, all kinds named."""
    found = Counter(kind(result) for result in results)
    return {name: found[name] for name in KINDS}


def by_family(results: Iterable[SessionResult]) -> dict[str, tuple[int, int]]:
    """By task family, how many sessions passed and how many count."""
    found: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        if result.usable:
            found[str(result.metadata.get("family", "other"))].append(kind(result) == "passed")
    return {family: (sum(passes), len(passes)) for family, passes in sorted(found.items())}
