from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polar.chat import Message, Tool
from polar.engines.base import Generation, Ids, MessagesRequest, TokensRequest
from polar.engines.check import Report, check, check_tools
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.testing import Call, Reply, ScriptedEngine, serve_scripted
from polar.tokens.path import TokenPath
from polar.tokens.tokenizer import load_tokenizer


class ScriptedPath:
    """Renders as a scripted engine does, or not quite."""

    def __init__(self, engine: ScriptedEngine, *, wrong: bool = False) -> None:
        self._engine = engine
        self._wrong = wrong

    def render_ids(self, messages: list[Message], tools: list[Tool], thinking: bool | None) -> Ids:
        from polar.engine.text import normalise_messages
        from polar.engines.chat import chat_message, tools_body

        text = self._engine.template.render(normalise_messages([chat_message(message) for message in messages]), tools_body(tools))
        ids = np.array(self._engine.tokenizer.encode(text), np.int32)
        return np.append(ids[:-1], np.int32(33)) if self._wrong else ids

    def decode(self, ids: Ids) -> str:
        return self._engine.tokenizer.decode(list(ids), skip_special=False)


def talk(call: Call) -> Reply:
    return Reply("hello there")


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_an_engine_that_does_it_right_is_trainable_in_both_modes(wire: str) -> None:
    path = ScriptedPath(ScriptedEngine([]))
    with serve_scripted(talk, wire=wire) as server:  # type: ignore[arg-type]
        engine = VllmEngine(server.url) if wire == "vllm" else SglangEngine(server.url)
        reports = [await check(engine, path, "scripted"), await check(engine, None, "scripted")]
        await engine.aclose()
    for report in reports:
        assert (report.trainable, report.problems, report.logprobs, report.prompts_differ) == (True, [], "processed", None)
    assert reports[0].facts["prompts_compared"] == 9


async def test_renderer_and_template_of_qwen3_agree_on_every_probe(qwen3_tokenizer_dir: Path) -> None:
    path = TokenPath(load_tokenizer(qwen3_tokenizer_dir), model="Qwen/Qwen3-8B", renderer=None, mode="tokens")
    report = await check(ScriptedEngine(talk, tokenizer_dir=qwen3_tokenizer_dir), path, "scripted")
    assert (report.problems, report.facts["prompts_compared"]) == ([], 9)


async def test_a_difference_in_rendering_is_told_with_its_place() -> None:
    engine = ScriptedEngine(talk)
    report = await check(engine, ScriptedPath(engine, wrong=True), "scripted")
    assert not report.trainable
    assert report.prompts_differ is not None
    assert "at token" in report.prompts_differ
    assert "'!'" in report.prompts_differ


async def test_a_tool_set_is_compared_alone() -> None:
    engine = ScriptedEngine(talk)
    tools = [Tool("f", "d")]
    assert await check_tools(engine, ScriptedPath(engine), tools) is None
    assert "these tools" in str(await check_tools(engine, ScriptedPath(engine, wrong=True), tools))


async def test_an_engine_without_ids_is_not_trainable() -> None:
    class Plain(OpenAIEngine):
        async def chat(self, request: MessagesRequest) -> list[Generation]:
            generations = await super().chat(request)
            for generation in generations:
                generation.token_ids, generation.untrainable = None, "the engine returned no sampled ids"
            return generations

    with serve_scripted(talk) as server:
        engine = Plain(server.url)
        report = await check(engine, None, "scripted")
        await engine.aclose()
    assert (report.trainable, report.problems) == (False, ["the engine returned no sampled ids"])


@pytest.mark.parametrize(
    ("logprobs", "words"), [([None, -1.0, -2.0], "missing"), ([-9999.0, -1.0, -2.0], "missing"), ([0.5, -1.0, -2.0], "positive")]
)
async def test_b95_missing_or_impossible_logprobs_are_not_trainable(logprobs: list[float | None], words: str) -> None:
    with serve_scripted(lambda call: Reply(ids=[1, 2, 3], logprobs=logprobs)) as server:
        engine = VllmEngine(server.url)
        report = await check(engine, None, "scripted")
        await engine.aclose()
    assert not report.trainable
    assert words in report.problems[0]


async def test_an_engine_that_ends_its_first_answers_at_once_is_checked_by_the_others() -> None:
    """Its list of ids is empty, not missing: nothing is wrong with it."""
    with serve_scripted(talk) as server:
        engine = VllmEngine(server.url)
        report = await check(NothingAtFirst(engine), None, "scripted")  # type: ignore[arg-type]
        await engine.aclose()
    assert (report.trainable, report.problems, report.facts["sampled"]) == (True, [], 0)


class NothingAtFirst:
    """An engine whose first answer has no ids, as of a server that leaves the end token out."""

    name = "vllm"
    returns_tokens = True

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._asked = 0

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        (generation,) = await self._engine.chat(request)
        self._asked += 1
        if self._asked == 1:
            generation.token_ids, generation.logprobs = generation.token_ids[:0], generation.logprobs[:0]
            generation.completion_tokens = 0
        return [generation]


@pytest.mark.parametrize(("truncates", "kind"), [(False, "raw"), (True, "raw")])
async def test_b97_raw_logprobs_are_recognised(truncates: bool, kind: str) -> None:
    class Raw(ScriptedEngine):
        """Log-probabilities of the model's own distribution, whatever is asked."""

        async def generate(self, request: TokensRequest) -> list[Generation]:
            top_p = request.sampling.top_p if truncates else 1.0
            return await super().generate(replace(request, sampling=replace(request.sampling, temperature=1.0, top_p=top_p)))

    engine = Raw(talk)
    report = await check(engine, ScriptedPath(engine), "scripted")
    assert (report.trainable, report.logprobs) == (True, kind)


async def test_b97_tempered_but_not_truncated_logprobs_are_recognised() -> None:
    class Tempered(ScriptedEngine):
        async def generate(self, request: TokensRequest) -> list[Generation]:
            return await super().generate(replace(request, sampling=replace(request.sampling, top_p=1.0)))

    engine = Tempered(talk)
    assert (await check(engine, ScriptedPath(engine), "scripted")).logprobs == "temperature"


@pytest.mark.parametrize(
    ("logprobs", "sampling", "fine"),
    [
        ("processed", {"temperature": 0.6, "top_p": 0.8}, True),
        ("temperature", {"temperature": 0.6, "top_p": 1.0, "top_k": 0}, True),
        ("temperature", {"temperature": 0.6, "top_p": 0.8}, False),
        ("raw", {"temperature": 1.0, "top_k": -1}, True),
        ("raw", {}, True),
        ("raw", {"temperature": 0.6}, False),
        ("raw", {"repetition_penalty": 1.1}, False),
        ("unknown", {"temperature": 1.0}, True),
        ("unknown", {"min_p": 0.1}, False),
    ],
)
def test_b97_what_may_be_trained_depends_on_the_sampling(logprobs: str, sampling: dict[str, float], fine: bool) -> None:
    report = Report(True, logprobs=logprobs)  # type: ignore[arg-type]
    assert (report.untrainable(sampling) is None) == fine
