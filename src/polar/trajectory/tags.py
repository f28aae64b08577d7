"""What a session's calls were for: the recipe of its harness, applied to each recorded completion (design, "Tags").

Tags are computed when rows are built, never stored, so that a better recipe is one `polar rebuild` away. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from polar.harness import Harness, Tag, registered
from polar.harness.base import hint
from polar.records import Completion, Session

Tagger = Callable[[Completion], Tag]

UNKNOWN = Tag("main", "unknown harness: every call is trained")
MIXED = "mixed"
"""What a session is said to be of whose calls give several harnesses away."""

_SIGNS: tuple[tuple[str, str, str], ...] = (
    ("x-claude-code-session-id", "", "claude-code"),
    ("user-agent", "claude-cli/0.", "qwen-code"),
    ("user-agent", "qwencode/", "qwen-code"),
    ("user-agent", "geminicli", "gemini-cli"),
    ("user-agent", "codex", "codex"),
    ("user-agent", "opencode/", "opencode"),
    ("user-agent", "pi/", "pi"),
)
"""Hint, what its value starts with in lower case, harness; the first that fits wins. Qwen Code calls itself `claude-cli/0.x` on the
Messages API, and never sends Claude Code's session header."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A session's harness as far as it is known, and how it tags."""

    harness: str
    """Empty where it is not known; `MIXED` where the calls come from several, each of which is tagged by its own recipe."""
    tag: Tagger
    rules: bool = True
    """Whether it can tell roles apart at all."""
    guessed: bool = False
    """Whether `harness` comes from the calls' headers, which any program may send, and not from the session's metadata."""

    def harness_of(self, completion: Completion) -> str:
        """The harness of one call; empty where it is not known."""
        return (guess(completion) or "") if self.harness == MIXED and self.guessed else self.harness


def recipe(session: Session, completions: Iterable[Completion] = ()) -> Recipe:
    """The recipe of the harness that `session.metadata["harness"]` names, else of those that the calls' headers give away.

    `completions` are looked at only where the metadata name none. Calls without a sign count to the one harness that the others give
    away; where these are several, they are `main`, as are all calls of a session without any sign.
    """
    name = session.metadata.get("harness")
    known = registered()
    if isinstance(name, str) and name in known:
        return of(known[name])
    if not isinstance(name, str) or not name:
        found = sorted({guessed for completion in completions if (guessed := guess(completion)) is not None})
        if len(found) == 1:
            return replace(of(known[found[0]]), guessed=True)
        if found:
            return Recipe(MIXED, _each_by_its_own, guessed=True)
    return Recipe(name if isinstance(name, str) else "", _unknown, rules=False)


def of(harness: Harness) -> Recipe:
    """A harness without rules, such as any shell command, is an unknown one."""
    overridden = type(harness).tag is not Harness.tag
    return Recipe(harness.name, harness.tag) if harness.rules or overridden else Recipe(harness.name, _unknown, rules=False)


def guess(completion: Completion) -> str | None:
    """The name of the harness that a call's recorded headers give away; `None` where they do not."""
    for header, sign, name in _SIGNS:
        value = hint(completion, header).lower()
        if value and value.startswith(sign) and name in registered():
            return name
    return None


def _each_by_its_own(completion: Completion) -> Tag:
    guessed = guess(completion)
    return UNKNOWN if guessed is None else registered()[guessed].tag(completion)


def _unknown(_: Completion) -> Tag:
    return UNKNOWN
