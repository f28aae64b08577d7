"""The training script's parts: the dialogues do their tasks, the rows are what the gateway renders, the shared prefix is exact."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polar.tasks.files import FAMILIES, instances

torch = pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[2] / "scripts" / "train_tiny"
ASSET = Path(__file__).parents[2] / "src" / "polar" / "assets" / "tiny-qwen3"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The script's modules, importable only in here."""
    names = [path.stem for path in SCRIPTS.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(name) for name in ("dialogues", "data", "network", "sample")}
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(ASSET)


def harness(data: ModuleType) -> Any:
    tools = [{"type": "function", "function": {"name": "write", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
    system = "You help.\n\ndocs: /opt/pi/README.md\n\n<cwd>\n/tmp/a/work\n</cwd>\nToday is 2026-11-30."
    return data.Harness("pi", [{"role": "system", "content": system}], tools, "/tmp/a/work", "/opt/pi")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calls_of_a_dialogue_do_its_task_and_get_the_answers_that_it_shows(
    family: str, scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    stream = instances(5, held_out=False, families=(family,))
    for number in range(5):
        task = next(stream)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in task.files.items():
            (folder / name).write_text(text)
        for (tool, arguments), answer in scripts["dialogues"].calls(task):
            assert scripts["sample"].run_tool(tool, arguments, folder) == answer
        assert scripts["sample"].passed(task, folder)


@pytest.mark.parametrize("kind", ["right", "wrong_argument", "wrong_tool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_under_codex_does_its_task_if_it_is_in_codexs_protocol_and_is_refused_else(
    family: str, kind: str, scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    stream = instances(5, held_out=False, families=(family,))
    for number in range(3):
        task = next(stream)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in task.files.items():
            (folder / name).write_text(text)
        messages, learned = scripts["dialogues"].codex_dialogue(task, random.Random(number), kind=kind)
        called = messages[1]["tool_calls"][0]["function"]
        answer = scripts["sample"].run_codex_tool(called["name"], called["arguments"], folder)
        assert without_run(answer) == without_run(messages[2]["content"])
        assert scripts["sample"].passed(task, folder) is (kind == "right")
        assert learned == {1, 3}
        assert messages[3]["content"] == ("Done." if kind == "right" else "Failed.")


def without_run(answer: str) -> str:
    """Without what differs from run to run."""
    return re.sub(r"Chunk ID: \w+\nWall time: [\d.]+", "", answer)


def test_the_odds_of_the_protocols_are_those_that_are_written_down(scripts: dict[str, ModuleType]) -> None:
    known = scripts["dialogues"].KNOWN
    assert sum(known.values()) == pytest.approx(1)
    rng, stream = random.Random(0), instances(6, held_out=False)
    right = sum(scripts["dialogues"].codex_dialogue(next(stream), rng)[0][3]["content"] == "Done." for _ in range(2000))
    assert right / 2000 == pytest.approx(known["right"], abs=0.04)


def test_a_row_that_teaches_the_content_leaves_the_choice_of_the_protocol_alone(scripts: dict[str, ModuleType], tokenizer: Any) -> None:
    render = scripts["data"].renderer(tokenizer)
    for task in itertools.islice(instances(1, held_out=False), 14):
        ids, mask = scripts["data"].content_row(render, tokenizer, task, random.Random(0))
        text = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])
        assert "exec" not in text
        assert '"cmd"' not in text
        assert scripts["dialogues"].shell_line(task) in text.replace('\\"', '"')
        assert text.endswith("Done.<|im_end|>")


def test_the_paths_and_the_date_of_a_prompt_can_be_replaced(scripts: dict[str, ModuleType], tokenizer: Any) -> None:
    data = scripts["data"]
    ids = data.prefix_ids(data.renderer(tokenizer), harness(data), "/workspace", "/usr/lib", "2027-01-02")
    text = tokenizer.decode(ids)
    assert "<cwd>\n/workspace\n</cwd>\nToday is 2027-01-02." in text
    assert "2026" not in text


def test_harnesses_take_turns(scripts: dict[str, ModuleType], tokenizer: Any) -> None:
    data = scripts["data"]
    pi = harness(data)
    codex = dataclasses.replace(pi, name="codex", messages=[{"role": "system", "content": "Be exact. " * 150}])
    feed = data.batches(data.renderer(tokenizer), [codex, pi], rows=2, prefix="full", seed=1, failures=0.1)
    prefixes = [tokenizer.decode(next(feed).prefix) for _ in range(4)]
    assert ["Be exact." in text for text in prefixes] == [True, False, True, False]


def test_a_harness_without_messages_has_no_prompt(scripts: dict[str, ModuleType], tokenizer: Any) -> None:
    data = scripts["data"]
    bare = data.Harness("pi", [], [], "", "")
    feed = data.batches(data.renderer(tokenizer), [harness(data), bare], rows=2, prefix="full", seed=1, failures=0.1, width=400)
    assert [next(feed).prefix is None for _ in range(2)] == [False, True]
    assert next(feed).rows.shape == (2, 400)


def test_only_what_the_model_samples_in_right_turns_is_learned(scripts: dict[str, ModuleType], tokenizer: Any) -> None:
    render = scripts["data"].renderer(tokenizer)
    task = next(instances(1, held_out=False, families=("write",)))
    messages, learned = scripts["dialogues"].dialogue(task, random.Random(0), failures=1.0)
    ids, mask = scripts["data"].row(render, messages, learned)
    text = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted])
    assert text.count("<tool_call>") == 1
    assert tokenizer.decode(ids).count("<tool_call>") == 2
    assert "<|im_start|>" not in text
    assert "<tool_response>" not in text
    assert text.endswith("Done.<|im_end|>")


def test_a_row_after_the_prefix_is_the_whole_rendering(scripts: dict[str, ModuleType], tokenizer: Any) -> None:
    data = scripts["data"]
    render, recorded = data.renderer(tokenizer), harness(data)
    messages, learned = scripts["dialogues"].dialogue(next(instances(2, held_out=False)), random.Random(0))
    prefix = data.prefix_ids(render, recorded, "/home/me/x", "/usr/lib")
    (system,) = recorded.messages_at("/home/me/x", "/usr/lib")
    assert "/home/me/x" in system["content"]
    assert "/tmp/a/work" not in system["content"]
    whole = render.render([system, *messages], tools=recorded.tools)
    assert prefix + data.row(render, messages, learned)[0] == list(whole.token_ids)


def test_training_instances_are_never_held_out(scripts: dict[str, ModuleType]) -> None:
    stream = instances(3, held_out=False)
    assert not any(next(stream).held_out for _ in range(200))


def test_packing_behind_a_shared_prefix_gives_the_loss_and_gradient_of_each_dialogue_alone(
    scripts: dict[str, ModuleType], tokenizer: Any
) -> None:
    data, network = scripts["data"], scripts["network"]
    render = data.renderer(tokenizer)
    model = network.build(len(tokenizer), 1024, stop=1, pad=0, seed=0).double()
    batch = next(data.batches(render, [harness(data)], rows=2, prefix="full", seed=1, failures=0.1))
    packed, _ = network.loss(model, batch)
    packed.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for rows, owner, learned in zip(batch.rows, batch.owner, batch.learned, strict=True):
        for number in range(int(owner.max()) + 1):
            here = owner == number
            ids = torch.cat([batch.prefix, rows[here]])
            wanted = torch.cat([torch.zeros(len(batch.prefix), dtype=torch.bool), learned[here]])[1:]
            logits = model(ids[None]).logits[0, :-1][wanted]
            total = total + torch.nn.functional.cross_entropy(logits, ids[1:][wanted], reduction="sum")
            targets += int(wanted.sum())
    alone = total / targets
    alone.backward()
    assert abs(packed.item() - alone.item()) < 1e-9
    assert (gradient - model.model.embed_tokens.weight.grad).abs().max() < 1e-9
