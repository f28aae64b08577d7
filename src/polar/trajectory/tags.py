"""What a session's calls were for: the recipe of its harness, applied to each recorded completion (design, "Tags").

Tags are computed when rows are built, never stored, so that a better recipe is one `polar rebuild` away. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polar.harness import Harness, Tag, registered
from polar.harness.base import hint
from polar.records import Completion, Session

Tagger = Callable[[Completion], Tag]

UNKNOWN = Tag("main", "unknown harness: every call is trained")

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
    """Empty where it is not known."""
    tag: Tagger
    rules: bool = True
    """Whether it can tell roles apart at all."""


def recipe(session: Session, completions: Iterable[Completion] = ()) -> Recipe:
    """The recipe of the harness that `session.metadata["harness"]` names, else of the one that the calls' headers give away.

    Only as many of `completions` are looked at as it takes. Without any sign, every call is `main`.
    """
    name = session.metadata.get("harness")
    known = registered()
    if isinstance(name, str) and name in known:
        return of(known[name])
    if not isinstance(name, str) or not name:
        for completion in completions:
            guessed = guess(completion)
            if guessed is not None:
                return of(known[guessed])
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


def _unknown(_: Completion) -> Tag:
    return UNKNOWN
