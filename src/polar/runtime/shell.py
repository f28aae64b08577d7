"""How a shell line becomes a program's arguments, the same in every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_CHOOSE = (
    'if command -v bash >/dev/null 2>&1; then exec bash -o pipefail -c "$1"; fi; '
    "if (set -o pipefail) 2>/dev/null; then set -o pipefail; fi; "
    'eval "$1"'
)
MAX_ARGUMENT = 32 * 4096
"""Bytes of one argument or variable, with its end: Linux's MAX_ARG_STRLEN."""


def arguments(command: str | Sequence[str]) -> list[str]:
    """A sequence as it is; a line run by bash where there is one, else by sh, with pipefail where the shell has it."""
    if isinstance(command, str):
        return ["/bin/sh", "-c", _CHOOSE, "sh", command]
    return list(command)


def unfit(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Why no kernel starts a program with these: a daemon that is given them answers as one that is broken. `None` if they will do."""
    for one in (*argv, *(f"{name}={value}" for name, value in env.items())):
        if "\0" in one:
            return "its arguments or its environment cannot be handed over: a NUL in them"
        if len(one.encode("utf-8", "surrogatepass")) >= MAX_ARGUMENT:
            return "Argument list too long"
    if any(not name or "=" in name for name in env):
        return "its arguments or its environment cannot be handed over: a variable has no name, or one with a '='"
    return None
