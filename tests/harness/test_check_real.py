"""The real CLIs through the gateway, and the rows built of what they did, in the form that CI runs. Minutes; installs what is missing.

Each row of the table is run once, two at a time, and judged by several tests. Only rows whose tests were selected are run.
"""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from polar.harness import registered
from polar.harness.base import Dialect
from polar.harness.check import Row, check, check_async, render_table
from polar.harness.check.plan import PLANS
from polar.records import Mode

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

Case = tuple[str, Dialect, Mode]
MODES: tuple[Mode, ...] = ("tokens", "messages")
CASES: list[Case] = [
    (name, dialect, mode)
    for name, harness in registered().items()
    if harness.package is not None
    for dialect in harness.dialects
    for mode in MODES
]
COMPACT: list[Case] = [case for case in CASES if PLANS[case[0]].compaction]
JOBS = 2
SIDE = {"compaction", "title", "router", "probe"}


def cases(*chosen: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=["-".join(case) for case in chosen])


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> dict[Case, Row]:
    """The rows of all selected cases."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    wanted = {item.callspec.params["case"] for item in here if hasattr(item, "callspec")}
    rows = asyncio.run(run([case for case in CASES if case in wanted]))
    Console(width=220).print(render_table(rows))
    return {(row.harness, row.dialect, row.mode): row for row in rows}


async def run(chosen: list[Case]) -> list[Row]:
    free = asyncio.Semaphore(JOBS)

    async def one(name: str, dialect: Dialect, mode: Mode) -> Row:
        async with free:
            (row,) = await check_async([name], dialects=(dialect,), modes=(mode,))
        return row

    return await asyncio.gather(*(one(*case) for case in chosen))


@cases(*CASES)
def test_a_real_cli_is_captured_faithfully(case: Case, table: dict[Case, Row]) -> None:
    row = table[case]
    assert row.problems == []
    if row.mode == "tokens":
        assert not row.broken
        assert row.breaks_off
        assert row.edited == "history_edited"
    else:
        assert all(item.cause and item.why for item in row.broken)


@cases(*CASES)
def test_every_sampled_token_is_in_a_row_or_in_the_ledger_as_a_side_call_s(case: Case, table: dict[Case, Row]) -> None:
    built = table[case].built
    assert built.in_rows + built.in_ledger == built.sampled > 0
    assert set(built.untrained) <= SIDE


@cases(*CASES)
def test_rows_and_side_calls_are_roots_and_named_breaks(case: Case, table: dict[Case, Row]) -> None:
    built = table[case].built
    assert built.rows.total() + built.side == built.roots + built.breaks.total()


@cases(*(case for case in COMPACT if case[2] == "tokens"))
def test_a_main_conversation_is_one_row_up_to_its_compaction_and_one_after_it(case: Case, table: dict[Case, Row]) -> None:
    built = table[case].built
    assert built.rows["main"] == 2
    assert built.untrained["compaction"] >= 1


@cases(*(case for case in CASES if case[2] == "tokens" and registered()[case[0]].has_sub_agents))
def test_a_sub_agent_is_one_row(case: Case, table: dict[Case, Row]) -> None:
    assert table[case].roles["sub_agent"] >= 2
    assert table[case].built.rows["sub_agent"] == 1


def test_with_bridging_switched_off_a_real_cli_shows_breaks() -> None:
    (row,) = check(["pi"], modes=("tokens",), dialects=("openai_chat",), bridging=False)
    assert row.problems == []
    assert row.extended < len(row.broken)
