"""How each CLI is led through the exercise: its runs, what they exercise, and where its conversation overflows.

The numbers are measured: prompts of the pinned versions in Qwen3 tokens. `compact_at` lies between the prompt before the second long
listing and the one after it, so that the compaction comes where the scenario wants it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polar.harness.check.scenario import EVERYTHING, PROMPT_ONE, PROMPT_TWO, Abilities


@dataclass(frozen=True, slots=True)
class Leg:
    """One run of the CLI. `refused` says that it must end in the refused call and not in success."""

    prompt: str
    resume: bool = False
    refused: bool = False
    compact_at: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of one CLI, in one home and one folder."""

    legs: tuple[Leg, ...]
    abilities: Abilities = EVERYTHING
    compaction: bool = True
    sub_agent: bool = True
    edits: int = 0
    """How often the CLI itself changes the history of its main conversation, besides by compaction; each costs a row more."""
    timeout_s: float = 180.0


def _cut_and_resumed(compact_at: int, *, sub_agent: bool = True) -> Plan:
    legs = (Leg(PROMPT_ONE, refused=True, compact_at=compact_at), Leg(PROMPT_TWO, resume=True, compact_at=compact_at))
    return Plan(legs, Abilities(sub_agent=sub_agent), sub_agent=sub_agent)


_GEMINI = Plan(
    # A resumed Gemini CLI sends every tool result twice, which is an edited history. So its user message comes from within the
    # run (it asks a model who speaks next, then says `Please continue.`), and the resumed run is for the compaction.
    (
        Leg(PROMPT_ONE, settings={"model": {"skipNextSpeakerCheck": False}}),
        Leg(PROMPT_TWO, resume=True, compact_at=1_000),
    ),
    Abilities(cut=False),
)

_MINI = Plan(
    # Its answer to a plain text is a user message, with the text itself left out of the history; and only a command ends it. It has
    # neither sub-agents nor compaction.
    (Leg(PROMPT_ONE),),
    Abilities(sub_agent=False, cut=False, submit="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    compaction=False,
    sub_agent=False,
    edits=1,
)

_QWEN = Plan(
    # A resumed Qwen Code writes its first message anew (the folder's listing, the date), which is an edited history. So its user
    # message comes from within the run, as Gemini CLI's does, and the compaction after it, when the last step's listing is in.
    (Leg(PROMPT_ONE, compact_at=19_500, settings={"model": {"skipNextSpeakerCheck": False}}),),
    Abilities(cut=False, listings=(7,)),
)

PLANS: Mapping[str, Plan] = {
    "codex": _cut_and_resumed(16_000),
    "claude-code": _cut_and_resumed(20_000),
    "gemini-cli": _GEMINI,
    "qwen-code": _QWEN,
    "opencode": _cut_and_resumed(10_500),
    "pi": _cut_and_resumed(8_000, sub_agent=False),
    "mini-swe-agent": _MINI,
}
