"""What a row holds: exactly the tokens and messages that the model sampled are trained, in every form."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from export_samples import TOKENIZER, Talk, Write, answer_ids, fill, lines, solved
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import Image, Message, Text, Thinking, ToolCall
from polar.errors import ConfigError
from polar.export import About, Maker, Spec, export, facts_of
from polar.export.columns import COLUMNS
from polar.export.read import rows_in
from polar.trajectory.credit import advantages, groups
from polar.trajectory.row import Trace
from polar.trajectory.validate import validate

SYSTEM = Message("system", "You are an agent.")
IGNORE = -100


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def trained_runs(row: dict[str, Any]) -> list[list[int]]:
    """The runs of labels that are trained."""
    runs: list[list[int]] = [[]]
    for label in row["labels"]:
        if label != IGNORE:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


# --- tokens ------------------------------------------------------------------------------------------------------------


async def test_labels_are_the_assistants_own_tokens_and_nothing_else(write: Write) -> None:
    talk = solved("a", reward=1.0, turns=4)
    _, folder = await write([talk], form="tokens")
    (row,) = lines(folder)
    assert trained_runs(row) == [answer_ids(completion.answer) for completion in talk.completions]
    assert row["input_ids"] == talk.completions[-1].ids.tolist()
    assert all(label in (IGNORE, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert row["attention_mask"] == [1] * len(row["input_ids"])


async def test_a_missing_log_probability_does_not_stop_sft_of_the_rest(write: Write) -> None:
    talk = Talk("a", {"reward": 1.0})
    made = talk.say([SYSTEM, user("go")], assistant("one two three"))
    made.logprobs[1] = np.nan
    facts, folder = await write([talk], form="tokens")
    (row,) = lines(folder)
    assert sum(label != IGNORE for label in row["labels"]) == len(made.sampled_ids) - 1
    assert facts["tokens"]["ledger_by"] == {"missing_logprob": 1}


# --- conversations -------------------------------------------------------------------------------------------------------


async def test_a_conversation_with_its_tools_and_a_weight_for_each_message(write: Write) -> None:
    _, folder = await write([solved("a", task="t", reward=1.0, turns=3)])
    (row,) = lines(folder)
    assert [(message["role"], message["weight"]) for message in row["messages"]] == [
        ("system", 0), ("user", 0), ("assistant", 1), ("tool", 0), ("assistant", 1), ("tool", 0), ("assistant", 1),
    ]  # fmt: skip
    call = row["messages"][2]["tool_calls"][0]
    assert call["function"] == {"name": "shell", "arguments": '{"command": "step 0 of a"}'}
    assert row["messages"][3]["tool_call_id"] == call["id"]
    assert row["messages"][2]["reasoning_content"] == "I look first."
    assert '"name":"shell"' in row["tools"]
    assert (row["task"], row["reward"], row["harness"], row["role"]) == ("t", 1.0, "pi", "main")


async def test_b114_what_the_harness_wrote_in_the_assistants_name_is_not_trained(write: Write) -> None:
    talk = Talk("a", {"reward": 1.0})
    talk.say([SYSTEM, user("go"), assistant("Sorry, max turns"), user("on")], assistant("mine"))
    _, folder = await write([talk])
    (row,) = lines(folder)
    assert [message["content"] for message in row["messages"] if message["weight"]] == ["mine"]


async def test_an_answer_that_the_harness_has_begun_is_trained_from_ids_only(write: Write) -> None:
    """Its message holds what nobody sampled; its ids do not."""
    talk = Talk("a", {"reward": 1.0})
    talk.say([SYSTEM, user("go")], assistant("begun and ended"), tags=frozenset({"prefilled"}))
    facts, folder = await write([talk])
    assert lines(folder) == []
    assert facts["rows"]["dropped"] == {"its trained answers are not among its messages": 1}
    _, folder = await write([talk], form="tokens")
    assert len(lines(folder)) == 1


async def test_b114_a_session_without_completions_has_no_row(write: Write) -> None:
    facts, folder = await write([Talk("empty", {"reward": 0.0})])
    assert lines(folder) == []
    assert facts["rows"]["written"] == 0


async def test_a_turn_that_two_branches_share_is_trained_in_one_row(write: Write) -> None:
    talk = Talk("a", {"reward": 1.0})
    talk.say([SYSTEM, user("go")], assistant("shared"))
    talk.say([user("left")], assistant("first branch"), after=0)
    talk.say([user("right")], assistant("second"), after=0)
    _, folder = await write([talk])
    trained = [message["content"] for row in lines(folder) for message in row["messages"] if message["weight"]]
    assert sorted(trained) == ["first branch", "second", "shared"]


async def test_a_sub_agent_is_a_row_of_its_own_and_can_be_left_out(write: Write) -> None:
    talk = Talk("a", {"reward": 1.0, "harness": "claude-code"})
    talk.say([SYSTEM, user("go")], assistant("I delegate"))
    talk.say([user("look around")], assistant("found it"), after=None, hints={"headers": {"x-claude-code-agent-id": "a1"}})
    _, folder = await write([talk])
    assert [row["role"] for row in lines(folder)] == ["main", "sub_agent"]
    facts, folder = await write([talk], roles=("main",))
    assert [row["role"] for row in lines(folder)] == ["main"]
    assert facts["rows"]["dropped"] == {"another role": 1}


async def test_a_title_is_in_the_ledger_and_in_no_row(write: Write) -> None:
    talk = solved("a", reward=1.0, harness="claude-code")
    title = talk.say([Message("system", "Make a title."), user("go")], assistant("A title"), after=None, tools=())
    facts, folder = await write([talk])
    assert len(lines(folder)) == 1
    assert facts["tokens"]["ledger_by"] == {"title": len(title.sampled_ids)}


async def test_credit_for_the_main_conversation_only_leaves_the_sub_agents_row_out(write: Write) -> None:
    talk = Talk("a", {"reward": 1.0, "harness": "claude-code"})
    talk.say([SYSTEM, user("go")], assistant("I delegate"))
    talk.say([user("look around")], assistant("found it"), after=None, hints={"headers": {"x-claude-code-agent-id": "a1"}})
    facts, folder = await write([talk], credit="main_only")
    assert [row["role"] for row in lines(folder)] == ["main"]
    assert facts["rows"]["dropped"] == {"no reward was credited to it": 1}


async def test_rewards_by_row(write: Write) -> None:
    talk = Talk("a", {"row_rewards": [0.25, 0.75]})
    talk.say([SYSTEM, user("go")], assistant("one"))
    talk.say([user("other")], assistant("two"), after=None)
    _, folder = await write([talk], credit="per_row")
    assert [row["reward"] for row in lines(folder)] == [0.25, 0.75]
    facts, folder = await write([talk], credit="per_row", min_reward=0.5)
    assert [row["reward"] for row in lines(folder)] == [0.75]
    assert facts["rows"]["dropped"] == {"reward below the threshold": 1}
    talk.metadata["row_rewards"] = [1.0]
    with pytest.raises(ConfigError, match="2 rows, and its evaluator gave 1"):
        await write([talk], credit="per_row")


@pytest.mark.parametrize("form", ["chat", "tokens"])
async def test_images_have_no_place_in_text_or_ids_and_the_manifest_says_so(write: Write, form: str) -> None:
    talk = Talk("a", {"reward": 1.0})
    picture = Message("user", (Text("look"), Image("data:image/png;base64,AA==")))
    talk.say([SYSTEM, picture], assistant("a cat"))
    facts, folder = await write([talk], form=form)
    assert lines(folder) == []
    assert facts["rows"]["dropped"] == {"holds images": 1}
    _, folder = await write([talk], form="rl")
    assert len(lines(folder)) == 1


@pytest.mark.parametrize("form", ["chat", "rl", "tokens"])
@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
async def test_half_a_surrogate_pair_breaks_nothing(write: Write, form: str, file_format: str) -> None:
    talk = Talk("a", {"reward": 1.0})
    talk.say([SYSTEM, user("cut \ud83d")], assistant("fine"))
    facts, _ = await write([talk], form=form, file_format=file_format)
    assert facts["rows"]["written"] == 1


# --- duplicates, lengths, faithfulness --------------------------------------------------------------------------------------


async def test_equal_conversations_stand_once_whatever_their_call_ids(write: Write) -> None:
    talks = [solved(name, text="same", created=i, reward=1.0) for i, name in enumerate(("a", "b"))]
    facts, folder = await write(talks)
    assert [row["session_id"] for row in lines(folder)] == ["a"]
    assert facts["rows"]["dropped"] == {"duplicate": 1}
    facts, folder = await write(talks, deduplicate=False)
    assert len(lines(folder)) == 2


async def test_other_tools_make_another_conversation(write: Write) -> None:
    talks = [solved(name, text="same", created=i, reward=1.0) for i, name in enumerate(("a", "b"))]
    for completion in talks[1].completions:
        completion.tools = ()
    _, folder = await write(talks)
    assert len(lines(folder)) == 2


async def test_long_rows_are_left_out_or_cut_at_a_whole_answer(write: Write) -> None:
    talk = solved("a", reward=1.0, turns=5)
    length = len(talk.completions[-1].ids)
    facts, folder = await write([talk], max_tokens=length - 1)
    assert lines(folder) == []
    assert facts["rows"]["dropped"] == {"longer than --max-tokens": 1}
    facts, folder = await write([talk], options={"max_length": length - 1})
    (row,) = lines(folder)
    assert sum(message["weight"] for message in row["messages"]) == 4
    assert row["messages"][-1]["weight"] == 1
    assert facts["tokens"]["ledger_by"]["over_length"] == len(talk.completions[-1].sampled_ids)


@pytest.mark.parametrize("form", ["chat", "rl", "tokens"])
async def test_unfaithful_rows_are_refused_unless_asked_for(write: Write, form: str) -> None:
    """Law 2: the reference system's merging trains turns in contexts that the model never saw."""
    talk = Talk("a", {"reward": 1.0})
    talk.say([SYSTEM, user("go")], Message("assistant", "one", (Thinking("hm"),)))
    talk.say([user("more")], assistant("two"), broken=True)
    splice = {"on_break": "splice"}
    faithful, _ = await write([talk], form=form)
    assert faithful["rows"]["written"] == 2
    facts, _ = await write([talk], form=form, options=splice)
    assert set(facts["rows"]["dropped"]) == {"not context-faithful"}
    facts, folder = await write([talk], form=form, options=splice, unfaithful=True)
    assert facts["rows"]["written"] == 1
    assert "not context-faithful" in (folder / "README.md").read_text()


# --- training rows ------------------------------------------------------------------------------------------------------------


async def test_rl_lines_are_the_rows_of_the_builder_bit_by_bit(write: Write, tmp_path: Path) -> None:
    talk = solved("a", task="t", repository="r", group_id="g", reward=0.5, turns=3)
    _, folder = await write([talk], form="rl")
    (line,) = lines(folder)
    assert validate(line) == []
    assert Trace.from_json(line) == await only_trace(tmp_path, talk)


async def test_rl_tables_hold_the_same_bit_by_bit(write: Write, tmp_path: Path) -> None:
    talk = solved("a", task="t", repository="r", group_id="g", reward=0.5, turns=3)
    _, folder = await write([talk], form="rl", file_format="parquet")
    table = pq.read_table(folder / "data" / "train-00000.parquet")
    assert table.column_names == [column.name for column in COLUMNS["rl"]]
    trace = await only_trace(tmp_path, talk)
    for name, wanted in (
        ("prompt_ids", trace.prompt_ids),
        ("response_ids", trace.response_ids),
        ("loss_mask", trace.mask[trace.prompt_length :].view(np.int8)),
        ("response_logprobs", trace.logprobs[trace.prompt_length :]),
    ):
        found = table[name].chunk(0).values.to_numpy()
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()
    assert table["group_id"].to_pylist() == ["g"]


async def only_trace(tmp_path: Path, talk: Talk) -> Trace:
    store = await fill(tmp_path / "again.db", [talk])
    try:
        trajectory = await Maker("prefix_merging", {}).trajectory(store, facts_of(talk.session))
    finally:
        await store.aclose()
    (trace,) = trajectory.traces
    return trace


# --- conservation ---------------------------------------------------------------------------------------------------------------


@st.composite
def talks(draw: st.DrawFn) -> list[Talk]:
    """Sessions with forks, new roots, lost thinking, retries, aborted and untrainable calls, missing ids and log-probabilities."""
    made = []
    for number in range(draw(st.integers(1, 5))):
        metadata: dict[str, Any] = {"repository": draw(st.sampled_from(["r0", "r1", "r2"]))}
        if draw(st.integers(0, 4)):
            metadata["reward"] = draw(st.sampled_from([0.0, 1.0]))
        talk = Talk(f"s{number}", metadata, created=float(number))
        for turn in range(draw(st.integers(0, 5))):
            after = draw(st.none() | st.integers(0, turn - 1)) if turn else None
            thinking = (Thinking("hm"),) if draw(st.booleans()) else ()
            calls = (ToolCall(f"c{turn}", "shell", "{}"),) if draw(st.booleans()) else ()
            changes = draw(
                st.sampled_from(
                    [
                        {},
                        {},
                        {},
                        {"status": "aborted"},
                        {"untrainable": "a helper"},
                        {"logprobs": None},
                        {"prompt_ids": None},
                        {"tags": frozenset({"constrained"})},
                    ]
                )
            )
            said = draw(st.sampled_from(["yes", "no", "perhaps so"]))
            news = [user(draw(st.sampled_from(["go", "on"])))]
            talk.say(news, Message("assistant", said, thinking, calls), after=after, broken=draw(st.booleans()), **changes)
        made.append(talk)
    return made


@settings(max_examples=25, deadline=None)
@given(
    talks=talks(),
    form=st.sampled_from(["chat", "rl", "tokens"]),
    options=st.fixed_dictionaries({}, optional={"deduplicate": st.just(False), "max_tokens": st.just(40), "min_reward": st.just(0.5)}),
    splits=st.sampled_from([{}, {"test": 0.4}]),
)
def test_every_sampled_token_is_exported_dropped_or_in_the_ledger(
    talks: list[Talk], form: Any, options: dict[str, Any], splits: dict[str, float]
) -> None:
    """Law 3 through the export; and the labels decode to what was sampled, nothing else."""

    async def run(folder: Path) -> dict[str, Any]:
        store = await fill(folder / "a.db", talks)
        try:
            spec = Spec(form=form, file_format="jsonl", splits=splits, **options)
            return await export(store, "x", folder / "out", spec, about=About("T"))
        finally:
            await store.aclose()

    with tempfile.TemporaryDirectory() as scratch:
        try:
            facts = asyncio.run(run(Path(scratch)))
        except ConfigError as error:
            if "nothing" not in str(error):
                raise
            return  # too few to be split
        rows = {split: lines(Path(scratch) / "out", split) for split in ("train", "test")}
    tokens = facts["tokens"]
    assert tokens["exported"] + tokens["dropped"] + tokens["ledger"] == tokens["sampled"]
    graded = [t for t in talks if t.metadata.get("reward") is not None and t.metadata["reward"] >= options.get("min_reward", 0)]
    assert tokens["sampled"] == sum(len(c.sampled_ids) for t in graded for c in t.completions)
    answers = {TOKENIZER.decode(c.sampled_ids) for t in talks for c in t.completions}
    for row in (row for side in rows.values() for row in side):
        if form == "tokens":
            assert {TOKENIZER.decode(run) for run in trained_runs(row)} <= answers
        if form == "rl":
            assert validate(row) == []
    if form != "rl":
        sides = [{row["repository"] for row in side} for side in rows.values()]
        assert not sides[0] & sides[1]


# --- public bug reports -----------------------------------------------------------------------------------------------------------


async def test_b115_every_row_says_its_rollout_and_its_group(write: Write) -> None:
    """A rollout of three rows must count once in a baseline: trainers need to know which rows are one rollout."""
    split, whole = Talk("A", {"group_id": "g", "reward": 1.0}), Talk("B", {"group_id": "g", "reward": 0.0}, created=2.0)
    for word in ("one", "two", "three"):
        split.say([SYSTEM, user(word)], assistant(word), after=None)
    whole.say([SYSTEM, user("go")], assistant("four"))
    for file_format in ("jsonl", "parquet"):
        _, folder = await write([split, whole], form="rl", file_format=file_format)
        rows = [row for _, row in rows_in(folder)]
        assert [(row["metadata"]["rollout_id"], row["metadata"]["group_id"]) for row in rows] == [("A", "g")] * 3 + [("B", "g")]
        traces = [Trace.from_json(row) for row in rows]
        assert groups(traces)["g"].mean == 0.5
        assert advantages(traces) == [0.5, 0.5, 0.5, -0.5]


async def test_b119_exported_ids_decode_to_what_was_said(write: Write) -> None:
    for file_format in ("jsonl", "parquet"):
        _, folder = await write([solved("a", reward=1.0, turns=4)], form="rl", file_format=file_format)
        for _, row in rows_in(folder):
            assert validate(row, vocabulary=len(TOKENIZER), tokenizer=TOKENIZER) == []
            assert len(row["response_ids"]) == len(row["loss_mask"]) == len(row["response_logprobs"])
