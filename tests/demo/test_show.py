"""What the demo prints of sessions that have gone."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from polar.chat import Message
from polar.demo.play import Played, choose
from polar.demo.show import show_all
from polar.harness import RunResult
from polar.records import Break, Cause, Completion, Session
from polar.tasks import Grade, bundled
from polar.trajectory import build


def completion(number: int, prompt: list[int], sampled: list[int], **more: object) -> Completion:
    fields: dict[str, object] = {
        "session": "ses_1",
        "number": number,
        "status": "complete",
        "dialect": "openai_chat",
        "mode": "tokens",
        "messages": (Message("user", "x"),),
        "answer": Message("assistant", "y"),
        "finish": "stop",
        "prompt_ids": np.array(prompt, np.int32),
        "sampled_ids": np.array(sampled, np.int32),
        "logprobs": np.full(len(sampled), -0.25, np.float32),
    }
    return Completion(**{**fields, **more})  # type: ignore[arg-type]


def played(*completions: Completion, reward: float = 1.0, problem: str | None = None) -> Played:
    run = RunResult("pi", 0, 1.5, False, Path("out"), Path("err"), "Done.", problem)
    return Played("ses_1", bundled("train")[0], run, Grade(reward, ""), completions, Path("work"))


def printed(*sessions: Played) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    session = Session("ses_1", b"", b"", metadata={"harness": "pi"})
    built = [(one, build(session, one.completions)) for one in sessions]
    show_all(console, built, lambda ids: " ".join(f"t{one}" for one in ids), Path("runs/demo"))
    return console.export_text()


def test_every_count_stands_in_the_table_and_the_sum_holds() -> None:
    text = printed(played(completion(0, [1, 2], [3]), completion(1, [1, 2, 3, 4], [5, 6])))
    assert "3 sampled tokens in rows + 0 in the ledger = 3 sampled" in text
    assert "1 of 1 sessions passed" in text
    assert "every sampled token stands in exactly one training row" in text
    assert "t1 t2" in text
    assert "t5 t6" in text


def test_what_is_not_trained_is_shown_with_its_reason() -> None:
    text = printed(played(completion(0, [1], [2, 3], status="aborted"), reward=0.0))
    assert "2 sampled tokens" in text
    assert "aborted" in text
    assert "0 sampled tokens in rows + 2 in the ledger = 2 sampled" in text


def test_a_broken_prefix_is_shown_with_its_cause() -> None:
    broken = Break(Cause.THINKING_STRIPPED, 0, 1, 7)
    text = printed(played(completion(0, [1], [2]), completion(1, [5], [6], broken=broken)))
    assert "call 1 does not extend call 0" in text
    assert "thinking_stripped" in text


def test_a_harness_that_failed_says_why() -> None:
    assert "exit code 3" in printed(played(completion(0, [1], [2]), reward=0.0, problem="exit code 3"))


def test_a_session_without_a_call_is_shown_too() -> None:
    assert "0 sampled tokens in rows + 0 in the ledger = 0 sampled" in printed(played(reward=0.0, problem="died"))


def test_tasks_are_chosen_once_each_before_any_comes_twice() -> None:
    names = [task.name for task in choose(len(bundled()) + 1, seed=3)]
    assert len(set(names[:-1])) == len(bundled())
    assert names == [task.name for task in choose(len(bundled()) + 1, seed=3)]
