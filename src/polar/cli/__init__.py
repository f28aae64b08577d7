"""The `polar` command. What it is made of is imported inside `main`: a Ctrl-C while that loads is an end like any other."""

from __future__ import annotations

import sys

from polar.errors import PolarError


def main() -> None:
    """The console script. What the user can mend prints as one line: errors of ours, files and addresses that cannot be used."""
    try:
        from polar.cli.commands import app

        app()
    except PolarError as error:
        _leave(str(error))
    except OSError as error:
        named = f"{error.filename}: " if error.filename is not None else ""
        _leave(named + (error.strerror or str(error)))
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(message: str) -> None:
    from polar.cli.output import say

    say(f"error: {message}", style="red")
    sys.exit(2)
