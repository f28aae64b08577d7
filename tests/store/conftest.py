"""Where a store can be: a fresh SQLite file, or a fresh schema of a private PostgreSQL (marked `real`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

SQLITE_AND_POSTGRES = ["sqlite", pytest.param("postgres", marks=pytest.mark.real)]
_names = itertools.count()


@pytest.fixture(params=SQLITE_AND_POSTGRES)
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes places for stores, each empty."""
    if request.param == "sqlite":
        return lambda: str(tmp_path / f"store-{next(_names)}.db")
    made: Callable[[], str] = request.getfixturevalue("new_schema")
    return made


@pytest.fixture
def place(new_place: Callable[[], str]) -> str:
    return new_place()
