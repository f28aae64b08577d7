"""How a shell line becomes a program's arguments, the same in every backend."""

from __future__ import annotations

from collections.abc import Sequence

_CHOOSE = (
    'if command -v bash >/dev/null 2>&1; then exec bash -o pipefail -c "$1"; fi; '
    "if (set -o pipefail) 2>/dev/null; then set -o pipefail; fi; "
    'eval "$1"'
)


def arguments(command: str | Sequence[str]) -> list[str]:
    """A sequence as it is; a line run by bash where there is one, else by sh, with pipefail where the shell has it."""
    if isinstance(command, str):
        return ["/bin/sh", "-c", _CHOOSE, "sh", command]
    return list(command)
