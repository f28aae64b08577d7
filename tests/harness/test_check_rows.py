"""The judge of rows: on small sessions whose rows can be counted by hand, and on sessions that must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import Message, Tool
from polar.harness import named
from polar.harness.check.plan import PLANS, Plan
from polar.harness.check.rows import Built, judge_rows, judge_trajectory, parents_of, restarts_of, roots_of, side_ends
from polar.records import Break, Cause, Completion, Mode, Session
from polar.testing import fake_logprob
from polar.trajectory import Forest, Ledger, Options, PrefixMerging, Trajectory
from polar.trajectory.tags import of

CODEX = named("codex")
WHOLE = Plan(())
PLAIN = Plan((), compaction=False, sub_agent=False)
COMPACT = Message("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create")


def call(number: int, prompt: list[int], sampled: list[int], role: str = "main", **more: object) -> Completion:
    """A call of Codex in that role."""
    made = Completion(
        session="s",
        number=number,
        status="complete",
        dialect="openai_responses",
        mode="tokens",
        messages=(COMPACT if role == "compaction" else Message("user", "go"),),
        answer=Message("assistant", "ok"),
        finish="stop",
        tools=(Tool("shell"),),
        hints={"x-openai-subagent": "collab_spawn"} if role == "sub_agent" else {},
        prompt_ids=np.asarray(prompt, np.int32),
        sampled_ids=np.asarray(sampled, np.int32),
        logprobs=np.asarray([fake_logprob(token, at) for at, token in enumerate(sampled)], np.float32),
        delivered=True,
        started=float(number),
        ended=number + 0.5,
        untrainable="engine was not checked",
    )
    return replace(made, **more)  # type: ignore[arg-type]


def broken(cause: Cause, parent: int) -> Break:
    return Break(cause, parent, 1, 1, "it differs")


MAIN = [call(0, [1, 2], [3]), call(1, [1, 2, 3, 4], [5], parent=0)]
SUB = [call(2, [7, 7], [8], "sub_agent", broken=broken(Cause.SUB_AGENT, 1)), call(3, [7, 7, 8, 9], [8], "sub_agent", parent=2)]
SUMMARY = call(4, [6, 2, 3], [10], "compaction", broken=broken(Cause.COMPACTION, 1))
AFTER = [call(5, [1, 10], [11]), call(6, [1, 10, 11, 12], [13], parent=5)]
WITHIN = call(4, [1, 2, 3, 4, 5, 6], [10], "compaction", parent=1)
"""The summary asked for within the conversation, as Claude Code does."""
RUN = [*MAIN, *SUB, SUMMARY, *AFTER]


def verdict(calls: list[Completion], plan: Plan = WHOLE, mode: Mode = "tokens", harness: str = "codex") -> Built:
    return judge_rows(calls, named(harness), plan, mode, bridging=True)


def without_ids_of_parents(calls: list[Completion]) -> list[Completion]:
    """As in mode `messages`: every prompt is rendered anew and none extends another."""
    made = []
    for item in calls:
        assert item.prompt_ids is not None
        known = item.broken or (None if item.parent is None else broken(Cause.BPE_SPLIT, item.parent))
        ids = np.concatenate([np.asarray([100 + item.number], np.int32), item.prompt_ids])
        made.append(replace(item, mode="messages", prompt_ids=ids, broken=known))
    return made


def test_a_run_with_a_sub_agent_and_a_compaction_is_three_rows() -> None:
    built = verdict(RUN)
    assert built.problems == []
    assert built.rows == {"main": 2, "sub_agent": 1}
    assert built.untrained == {"compaction": 1}
    assert built.rules == {"compaction (codex: asks for a context checkpoint)": 1}
    assert (built.side, built.roots, built.breaks) == (1, 2, {"sub_agent": 1, "compaction": 1})
    assert (built.in_rows, built.in_ledger, built.sampled) == (6, 1, 7)


def test_a_summary_asked_for_within_the_conversation_is_no_way_of_its_own() -> None:
    built = verdict([*MAIN, *SUB, WITHIN, *AFTER])
    assert built.problems == []
    assert (built.rows.total(), built.side, built.roots, built.breaks.total()) == (3, 0, 2, 1)


def test_in_mode_messages_every_trained_call_is_a_row_and_every_break_has_a_name() -> None:
    built = verdict(without_ids_of_parents(RUN), mode="messages")
    assert built.problems == []
    assert (built.rows.total(), built.side, built.roots, built.breaks.total()) == (6, 1, 2, 5)
    assert built.breaks["bpe_split"] == 3


def test_breaks_in_mode_tokens_are_found() -> None:
    problems = "; ".join(verdict(without_ids_of_parents(RUN)).problems)
    assert "2 rows of sub-agents; 1 wanted" in problems
    assert "2 more rows of the main conversation (from calls [1, 6] on) for 0 edits" in problems
    assert "call 1: bpe_split, it differs" in problems


def test_an_edit_of_the_harness_is_a_row_more_where_the_plan_says_so() -> None:
    edited = call(7, [1, 9], [4], broken=broken(Cause.HISTORY_EDITED, 6))
    assert "1 more rows of the main conversation (from calls [7] on) for 0 edits" in "; ".join(verdict([*RUN, edited]).problems)
    assert verdict([*RUN, edited], replace(WHOLE, edits=1)).problems == []


def test_a_run_without_its_sub_agent_or_its_compaction_fails() -> None:
    assert "no row of a sub-agent" in verdict([*MAIN, SUMMARY, *AFTER]).problems
    problems = verdict([*MAIN, *SUB]).problems
    assert "no compaction is in the ledger" in problems
    assert "no turn of the main conversation comes after a compaction" in problems


def test_a_conversation_that_goes_on_as_if_it_had_not_been_compacted_is_found() -> None:
    on = call(5, [1, 2, 3, 4, 5, 6], [11], parent=1)
    assert "call 5 opens no row of its own" in verdict([*MAIN, *SUB, SUMMARY, on]).problems


def test_a_call_that_is_not_trained_for_another_reason_is_found() -> None:
    aborted = replace(AFTER[1], status="aborted")
    assert any(problem.startswith("call 6 is not trained: aborted") for problem in verdict([*RUN[:-1], aborted]).problems)


def test_a_break_without_a_detail_is_found() -> None:
    silent = replace(SUMMARY, broken=Break(Cause.COMPACTION, 1, 1, 1))
    assert any("no detail" in problem for problem in verdict([*MAIN, *SUB, silent, *AFTER]).problems)


def planted(spoil: Callable[[Trajectory], Trajectory]) -> str:
    """What is said of `RUN`'s own rows with a fault in them."""
    good = PrefixMerging(Options(untrainable=True)).build(Forest("s", RUN), Session("s", b"", b""), of(CODEX))
    return "; ".join(judge_trajectory(spoil(good), RUN, CODEX, WHOLE, "tokens", bridging=True).problems)


def test_a_row_that_is_lost_is_found_twice() -> None:
    problems = planted(lambda made: replace(made, traces=made.traces[:-1]))
    assert "4 tokens in rows and 1 in the ledger are not the 7 sampled" in problems
    assert "2 rows + 1 side ways are not 2 roots + 2 breaks" in problems


def test_a_row_in_a_context_that_the_engine_did_not_see_is_found() -> None:
    def spoil(made: Trajectory) -> Trajectory:
        first = made.traces[0]
        return replace(made, traces=(replace(first, ids=np.asarray([1, 9, *first.ids[2:]], np.int32)), *made.traces[1:]))

    assert "call 0 stands in a row after ids that the engine did not see" in planted(spoil)


def test_a_ledger_line_that_does_not_name_its_rule_is_found() -> None:
    assert "not by its recipe's rule" in planted(lambda made: replace(made, ledger=Ledger((replace(made.ledger.lines[0], rule="?"),))))


def test_a_session_without_rows_fails() -> None:
    assert "no rows were built" in verdict([], PLAIN).problems


def test_a_shell_s_calls_are_all_trained() -> None:
    built = verdict(MAIN, PLAIN, harness="shell")
    assert built.problems == []
    assert not built.untrained


def test_restarts_are_main_calls_next_after_a_compaction() -> None:
    again = replace(SUMMARY, number=5)
    calls = [MAIN[0], SUMMARY, again, replace(SUB[0], number=6), call(7, [1], [2]), call(8, [1], [2])]
    assert restarts_of(calls, CODEX) == [7]


def test_ends_below_untrained_calls_count_once_each() -> None:
    parents = {0: None, 1: 0, 2: 0, 3: None, 4: 3}
    assert side_ends(parents, {1, 2}) == [2]  # the first is the row's own end
    assert side_ends(parents, {3, 4}) == [4]
    assert side_ends(parents, {1}) == [1]  # the row goes on to 2
    assert side_ends(parents, set()) == []


def test_a_retry_of_a_root_is_no_other_root() -> None:
    twin = call(1, [1, 2], [4])
    assert roots_of([MAIN[0], twin], parents_of([MAIN[0], twin])) == [0]


def test_only_codex_and_the_like_need_a_sub_agent_and_a_compaction() -> None:
    assert {name for name, plan in PLANS.items() if plan.sub_agent and plan.compaction} >= {"codex", "claude-code"}


SESSIONS = st.lists(
    st.tuples(st.integers(-1, 11), st.sampled_from(["main", "main", "sub_agent", "compaction"]), st.booleans()), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(SESSIONS)
def test_rows_and_side_ways_are_roots_and_breaks_whatever_the_session(shape: list[tuple[int, str, bool]]) -> None:
    """Forks, sub-agents, summaries anywhere; each call extends an earlier one, or breaks with it, or stands alone."""
    calls: list[Completion] = []
    for number, (wanted, role, extending) in enumerate(shape):
        earlier = calls[wanted] if 0 <= wanted < number else None
        if earlier is not None and extending and earlier.ids is not None:
            prompt = [*earlier.ids.tolist(), 50 + number]
            calls.append(call(number, prompt, [200 + number], role, parent=earlier.number))
        else:
            known = None if earlier is None else broken(Cause.BPE_SPLIT, earlier.number)
            calls.append(call(number, [1, 100 + number], [200 + number], role, broken=known))
    problems = judge_rows(calls, CODEX, PLAIN, "messages", bridging=True).problems
    assert [
        problem for problem in problems if "roots" in problem or "sampled" in problem or "ledger" in problem or "stands" in problem
    ] == []
