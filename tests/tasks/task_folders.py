"""What the tests of tasks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MakeTask = Callable[..., Path]
