"""The real CLIs through the gateway: acceptance 2 and 3 in the form that CI runs. Minutes; installs what is missing."""

from __future__ import annotations

import pytest
from rich.console import Console

from polar.harness import registered
from polar.harness.base import Dialect
from polar.harness.check import check, render_table
from polar.records import Mode

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

CASES: list[tuple[str, Dialect]] = [
    (name, dialect) for name, harness in registered().items() if harness.package is not None for dialect in harness.dialects
]


@pytest.mark.parametrize("mode", ["tokens", "messages"])
@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_a_real_cli_is_captured_faithfully(name: str, dialect: Dialect, mode: Mode) -> None:
    rows = check([name], modes=(mode,), dialects=(dialect,))
    Console(width=220).print(render_table(rows))
    assert [row.problems for row in rows] == [[]]
    (row,) = rows
    if mode == "tokens":
        assert not row.broken
        assert row.breaks_off
        assert row.edited == "history_edited"
    else:
        assert all(item.cause and item.why for item in row.broken)


@pytest.mark.parametrize("mode", ["tokens", "messages"])
def test_mini_swe_agent_through_the_shell_preset(mode: Mode) -> None:
    rows = check(["mini-swe-agent"], modes=(mode,), dialects=("openai_chat",))
    assert [row.problems for row in rows] == [[]]


def test_with_bridging_switched_off_a_real_cli_shows_breaks() -> None:
    (row,) = check(["pi"], modes=("tokens",), dialects=("openai_chat",), bridging=False)
    assert row.problems == []
    assert row.extended < len(row.broken)
