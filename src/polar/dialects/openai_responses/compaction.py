"""Compaction: the request for a summary, and the opaque string that carries the summary back. Knows no model.

The provider hands a compacted conversation to its client as one item with an `encrypted_content` that only the provider can
read. Ours holds the summary itself, base64url in an envelope, so that it can be restored without a store, after a restart, and
in any session; the envelope names the completion that wrote it. Nobody's secret is inside: the client could have read the
conversation anyway.
"""

from __future__ import annotations

import base64
import binascii

from polar.chat import Message

_MAGIC = "cmp1"

REQUEST = (
    "The conversation up to here is about to be replaced by a summary that you write now. Another run of you will go on with "
    "the work from that summary alone, without seeing any of the above. Write down, as plain text and without calling a tool: "
    "what the user wants and every constraint that was given; what has been done and what came of it; files, commands, names, "
    "numbers and decisions that are still needed; what is open, and the next steps in order. Answer with the summary only."
)
"""What the model is asked when a client asks for a compaction. It comes last, so the prompt extends the conversation's."""

_PREFACE = "The conversation so far was replaced by this summary of it:\n\n"
_UNREADABLE = "[The conversation before this point was replaced by a summary that cannot be read here.]"


def seal(summary: str, ref: str) -> str:
    """The `encrypted_content` of a compaction item."""
    return f"{_MAGIC}.{ref}.{base64.urlsafe_b64encode(summary.encode()).decode()}"


def unseal(sealed: str) -> str | None:
    """The summary inside, or `None` if another server wrote the string."""
    parts = sealed.split(".")
    if len(parts) != 3 or parts[0] != _MAGIC:
        return None
    try:
        return base64.b64decode(parts[2].encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None


def restored(sealed: str | None, refs: tuple[str, ...]) -> Message:
    """The message that stands in the history for a compaction item."""
    summary = None if sealed is None else unseal(sealed)
    return Message("user", _UNREADABLE if summary is None else _PREFACE + summary, refs=refs)
