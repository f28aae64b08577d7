"""The drift report: where prompts did not extend what came before them, why, and what it costs (law 8). Knows no forest and no store.

A builder that obeys law 2 starts another row at every break. That loses no sampled token; it costs the context that the new row has to
repeat (`repeated`), and it hides the earlier turns' gradient from the later ones. `lost` counts what is not trained because of the break:
the answers of abandoned retries, and with `on_break="splice"` the rest of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polar.records import Cause

SIDE_CALL = "side_call"
"""Besides the causes of `polar.records.Cause`: a title, router or probe call on a history that goes on without it."""
CHOICE = "choice"
"""Likewise: a further answer of one call (`n` > 1)."""

FIXES: dict[str, str] = {
    Cause.VOLATILE_HEADER: "switch the changing header off in the harness (the presets do), or let the gateway hold it still",
    Cause.TOOLS_CHANGED: "give the harness one fixed set of tools for the whole session (no tools that load on demand)",
    Cause.SETTINGS_CHANGED: "fix the thinking switch and the template's arguments for the session",
    Cause.SYSTEM_CHANGED: "fix what the harness writes into its system prompt (date, folder, memory files)",
    Cause.THINKING_STRIPPED: "serve in mode `tokens`, which keeps thinking, or use a template that does",
    Cause.ARGUMENTS_RESERIALISED: "serve in mode `tokens`, which keeps tool arguments as they were sampled",
    Cause.HISTORY_EDITED: "none: the harness rewrote its history, and the rows say so; switch its context editing off to avoid it",
    Cause.RENDERER_REFUSED: "see the detail; a renderer for this model that can bridge such turns would help",
    Cause.BRIDGING_OFF: "let the engine bridge turns (it was switched off)",
    Cause.IMAGE: "none: from its first image on a conversation is rendered by the engine",
    Cause.COMPACTION: "none: a compacted conversation is a new one; a larger `compact_at` makes it rarer",
    Cause.SUB_AGENT: "none: a sub-agent is a conversation of its own",
    Cause.BPE_SPLIT: "serve in mode `tokens`, which never re-tokenises what was sampled",
    Cause.RETRY: "raise the harness's timeout; a retry within the gateway's grace adopts the first call",
    Cause.MODEL_CHANGED: "map all of the harness's model names to one model, or leave the side model's calls untrained",
    CHOICE: "none needed: the harness asked for several answers",
    SIDE_CALL: "none needed: the conversation goes on without it",
}
"""What would avoid a break of each cause."""


@dataclass(frozen=True, slots=True)
class DriftLine:
    """One break. Counts are of ids.

    `completion` is the turn that breaks and `parent` the one that it is compared with: the turn that it would have extended; for a
    retry the earlier try, for a branch the turn that the row goes on with instead. `position` is the first index at which its prompt
    differs from `parent`'s prompt and answer; `before_id` and `after_id` are the ids there (`None` past an end), `before` and `after` the
    decoded text around them, empty where no tokenizer was given. `dropped` counts the parent's ids from there on, `repeated` the prompt,
    which the new row carries anew.
    """

    completion: int
    parent: int | None
    cause: str
    position: int
    dropped: int
    repeated: int
    lost: int = 0
    before_id: int | None = None
    after_id: int | None = None
    before: str = ""
    after: str = ""
    detail: str = ""
    harness: str = ""
    dialect: str = ""
    mode: str = ""

    @property
    def fix(self) -> str:
        return FIXES.get(self.cause, "none known")


@dataclass(slots=True)
class DriftTotal:
    """All breaks of one cause in one harness and dialect."""

    harness: str
    dialect: str
    cause: str
    breaks: int = 0
    dropped: int = 0
    repeated: int = 0
    lost: int = 0

    @property
    def fix(self) -> str:
        return FIXES.get(self.cause, "none known")


def aggregate(lines: Iterable[DriftLine]) -> list[DriftTotal]:
    """Totals by harness, dialect and cause, the costliest (`repeated + lost`) first. Streams over `lines`."""
    totals: dict[tuple[str, str, str], DriftTotal] = {}
    for line in lines:
        key = (line.harness, line.dialect, line.cause)
        total = totals.setdefault(key, DriftTotal(*key))
        total.breaks += 1
        total.dropped += line.dropped
        total.repeated += line.repeated
        total.lost += line.lost
    return sorted(totals.values(), key=lambda total: (-(total.repeated + total.lost), total.harness, total.dialect, total.cause))
