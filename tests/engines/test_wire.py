"""The clients against servers written from the recorded wire, whole and streamed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.chat import Image, Message, Sampling, Text, Thinking, Tool, ToolCall, ToolChoice
from polar.engines.base import Engine, MessagesRequest, TokensRequest
from polar.engines.chat import chat_body, chat_message
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import EngineRejected
from polar.testing import Call, Reply, ScriptedEngine, fake_logprob, serve_scripted

KINDS = {"vllm": VllmEngine, "sglang": SglangEngine}
TOOL = Tool("f", "A tool.", {"type": "object", "properties": {"x": {"type": "integer"}}})


def tokens(ids: list[int], **more: object) -> TokensRequest:
    return TokensRequest("scripted", np.array(ids, np.int32), Sampling(max_tokens=500, temperature=1.0), **more)  # type: ignore[arg-type]


def messages(*sent: Message, tools: tuple[Tool, ...] = (), **more: object) -> MessagesRequest:
    return MessagesRequest("scripted", sent or (Message("user", "q"),), tools, ToolChoice(), Sampling(max_tokens=500), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_every_sampled_id_and_logprob_comes_through_whole_and_streamed(wire: str) -> None:
    """The ids need not be text: halves of characters, unknown ids, the end token and what follows it."""
    answers = [[5, 0xE6, 0x97, 300, 257], [0xA5, 257], [257], [70000, 1, 2, 3] * 40]
    for per_chunk in (1, 3):
        script = [Reply(ids=answer) for answer in answers for _ in range(2)]
        with serve_scripted(script, wire=wire, tokens_per_chunk=per_chunk) as server:  # type: ignore[arg-type]
            engine: Engine = KINDS[wire](server.url)
            for answer in answers:
                expected = [np.float32(fake_logprob(token, at)) for at, token in enumerate(answer)]
                whole = (await engine.generate(tokens([1, 2, 3])))[0]
                assert whole.token_ids is not None
                assert whole.logprobs is not None
                assert whole.token_ids.tolist() == answer
                assert whole.logprobs.tolist() == expected
                assert (whole.untrainable, whole.finish, whole.completion_tokens) == (None, "stop", len(answer))
                ids: list[int] = []
                logprobs: list[float] = []
                async for chunk in engine.stream(tokens([1, 2, 3])):
                    ids += chunk.token_ids
                    logprobs += chunk.logprobs
                assert ids == answer
                assert logprobs == expected
                assert (chunk.finish, chunk.completion_tokens) == ("stop", len(answer))
            await engine.aclose()


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_prompt_ids_reach_the_engine_exactly(wire: str) -> None:
    prompt = list(range(0, 151_000, 5))
    with serve_scripted(["a"], wire=wire) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        await engine.generate(tokens(prompt))
        await engine.aclose()
        assert list(server.calls[0].prompt_ids) == prompt


async def test_vllm_sends_the_prompt_back_only_when_asked() -> None:
    with serve_scripted(["a", "a"]) as server:
        engine = VllmEngine(server.url)
        assert (await engine.generate(tokens([1, 2])))[0].prompt_ids is None
        echoed = (await engine.generate(tokens([1, 2], return_prompt_ids=True)))[0].prompt_ids
        await engine.aclose()
    assert echoed is not None
    assert echoed.tolist() == [1, 2]


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_b67_integer_top_logprobs_always_and_alternatives_only_when_asked(wire: str) -> None:
    with serve_scripted(lambda call: "hi", wire=wire) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        plain = (await engine.chat(messages()))[0]
        asked = (await engine.chat(messages(top_logprobs=2)))[0]
        await engine.aclose()
        sent = [call.body for call in server.calls]
    assert [body["logprobs"] for body in sent] == [True, True]
    assert [body["top_logprobs"] for body in sent] == [0, 2]
    assert plain.logprobs is not None
    assert asked.top is not None
    assert [len(entry) for entry in asked.top] == [2, 2, 2]


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_b92_messages_mode_is_never_streamed_and_covers_what_the_parsers_eat(wire: str) -> None:
    text = '<think>\nhm\n</think>\n\nI look.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    with serve_scripted([text], wire=wire) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        answer = (await engine.chat(messages(tools=(TOOL,))))[0]
        await engine.aclose()
        assert not server.calls[0].body.get("stream")
    assert answer.token_ids is not None
    assert bytes(answer.token_ids[:-1].tolist()).decode() == text
    assert answer.token_ids[-1] == 257
    assert (answer.untrainable, answer.finish) == (None, "tool_calls")
    assert answer.message is not None
    assert (answer.message.reasoning, answer.message.text) == ("\nhm\n", "I look.")
    assert [(call.name, call.arguments) for call in answer.message.tool_calls] == [("f", '{"x": 1}')]
    assert answer.prompt_ids is not None
    assert len(answer.prompt_ids) == answer.prompt_tokens


async def test_a_malformed_tool_call_stays_text() -> None:
    text = 'so: <tool_call>\n{"name": "f", "arguments": {\n</tool_call>'
    with serve_scripted([text]) as server:
        engine = VllmEngine(server.url)
        answer = (await engine.chat(messages(tools=(TOOL,))))[0]
        await engine.aclose()
    assert answer.message is not None
    assert (answer.message.text, answer.message.tool_calls, answer.finish) == (text, (), "stop")


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_several_choices_are_several_generations(wire: str) -> None:
    with serve_scripted(lambda call: f"answer {call.index}", wire=wire) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        many = await engine.generate(tokens([1], n=3))
        chats = await engine.chat(messages(n=2))
        await engine.aclose()
    assert [bytes(item.token_ids[:-1].tolist()).decode() for item in many if item.token_ids is not None] == [
        "answer 0",
        "answer 1",
        "answer 2",
    ]
    assert [item.untrainable for item in (*many, *chats)] == [None] * 5


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_an_answer_cut_at_its_length_says_so(wire: str) -> None:
    request = TokensRequest("scripted", np.array([1], np.int32), Sampling(max_tokens=3))
    with serve_scripted(["hello"], wire=wire) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        answer = (await engine.generate(request))[0]
        await engine.aclose()
    assert answer.finish == "length"
    assert answer.token_ids is not None
    assert answer.token_ids.tolist() == list(b"hel")


async def test_a_stop_string_ends_the_text_and_its_ids_stay() -> None:
    request = TokensRequest("scripted", np.array([1], np.int32), Sampling(max_tokens=50, stop=("lo",)))
    with serve_scripted(["hello world"]) as server:
        engine = VllmEngine(server.url)
        answer = (await engine.generate(request))[0]
        await engine.aclose()
    assert answer.token_ids is not None
    assert answer.token_ids.tolist() == list(b"hello")
    assert (answer.finish, answer.stop, answer.untrainable) == ("stop", "lo", None)


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_without_max_tokens_the_room_is_asked_for(wire: str) -> None:
    request = TokensRequest("scripted", np.array([1, 2], np.int32), Sampling())
    with serve_scripted(["x" * 40], wire=wire, context=100) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        answer = (await engine.generate(request))[0]
        await engine.aclose()
    assert answer.completion_tokens == 41


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_info_tells_model_context_and_version(wire: str) -> None:
    with serve_scripted([], wire=wire, model="m", context=77) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url + "/v1")
        info = await engine.info()
        await engine.aclose()
    assert (info.models, info.context) == (("m",), 77)
    assert info.version == {"vllm": "0.32.0", "sglang": "0.5.23"}[wire]


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_tokenize_is_the_engines_own_rendering(wire: str) -> None:
    with serve_scripted(lambda call: "x", wire=wire) as server:  # type: ignore[arg-type]
        engine: Engine = KINDS[wire](server.url)
        ids = await engine.tokenize([Message("user", "hé")], [], thinking=True)
        await engine.aclose()
    expected = await ScriptedEngine([]).tokenize([Message("user", "hé")], [])
    assert ids is not None
    assert expected is not None
    assert ids.tolist() == expected.tolist()


# --- bodies ------------------------------------------------------------------------------------------------------


def test_b58_content_is_never_null() -> None:
    sent = chat_message(Message("assistant", "", (), (ToolCall("c", "f", "{}"),)))
    assert sent["content"] == ""


def test_b64_reasoning_goes_under_both_keys() -> None:
    sent = chat_message(Message("assistant", "a", (Thinking("r"),)))
    assert (sent["reasoning"], sent["reasoning_content"]) == ("r", "r")


def test_images_and_text_become_parts() -> None:
    sent = chat_message(Message("user", (Text("see"), Image("data:image/png;base64,AA==", "low"))))
    assert sent["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    ]


def test_arguments_that_are_no_object_still_travel_as_one() -> None:
    sent = chat_message(Message("assistant", "", (), (ToolCall("c", "f", '{"x": '), ToolCall("d", "g", ""))))
    assert [call["function"]["arguments"] for call in sent["tool_calls"]] == ['{"arguments":"{\\"x\\": "}', "{}"]


def test_thinking_tools_and_choice_are_in_the_body() -> None:
    request = messages(tools=(TOOL,), thinking=False, response_format={"type": "json_object"}, parallel_tool_calls=False)
    body = chat_body(request)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["tools"] == [TOOL.schema()]
    assert (body["tool_choice"], body["parallel_tool_calls"], body["response_format"]) == ("auto", False, {"type": "json_object"})


# --- any OpenAI-compatible server ----------------------------------------------------------------------------------


async def test_openai_reads_ids_where_the_server_gives_them() -> None:
    with serve_scripted(["hi"]) as server:
        engine = OpenAIEngine(server.url)
        answer = (await engine.chat(messages()))[0]
        await engine.aclose()
    assert answer.untrainable is None
    assert answer.token_ids is not None
    assert answer.token_ids.tolist() == [*b"hi", 257]


async def test_openai_drops_what_the_server_refuses_by_name_and_remembers() -> None:
    def script(call: Call) -> Reply:
        for name in ("return_token_ids", "logprobs"):
            if name in call.body:
                return Reply(error=EngineRejected(f"Unrecognized request argument supplied: {name}"))
        return Reply("hi")

    with serve_scripted(script) as server:
        engine = OpenAIEngine(server.url + "/v1")
        first = (await engine.chat(messages()))[0]
        calls = len(server.calls)
        await engine.chat(messages())
        await engine.aclose()
        assert len(server.calls) == calls + 1
    assert first.message is not None
    assert first.message.text == "hi"
    assert first.untrainable is not None


@pytest.mark.parametrize(
    "words",
    [
        "max_tokens is too large: 32000. This model supports at most 16384 completion tokens, whereas you provided 32000.",
        "The parameter `max_completion_tokens` is not valid: integer above maximum value, expected a value <= 16384, but got 32000.",
        "Range of max_tokens should be [1, 16384]",
        "Invalid max_tokens value, the valid range of max_tokens is [1, 16384]",
        "`max_tokens` must be less than or equal to `16384`, the maximum value for `max_tokens` is less than the `context_window`",
        "max_tokens: 32000 > 16384, which is the maximum allowed number of output tokens for this model",
        "max_tokens=32000 cannot be greater than max_model_len=max_total_tokens=16384.",
    ],
)
async def test_openai_asks_for_no_longer_an_answer_than_the_server_gives(words: str) -> None:
    """Gitlawb/openclaude#58 and #331: every call of a harness that asks for 32,000 tokens was refused by a model that gives 16,384."""

    def script(call: Call) -> Reply:
        return Reply("hi") if call.body["max_tokens"] <= 16384 else Reply(error=EngineRejected(words))

    with serve_scripted(script) as server:
        engine = OpenAIEngine(server.url)
        for asked, cut in ((32000, 16384), (20000, 16384), (5, None)):
            (made,) = await engine.chat(replace(messages(), sampling=Sampling(max_tokens=asked)))
            assert made.max_tokens == cut
        await engine.aclose()
        assert [call.body["max_tokens"] for call in server.calls] == [32000, 16384, 16384, 5]


@pytest.mark.parametrize("words", ["top_logprobs must be less than or equal to 5", "top_logprobs: expected a value <= 5, not 20"])
async def test_openai_takes_the_limit_of_another_field_for_none_of_the_answer(words: str) -> None:
    def script(call: Call) -> Reply:
        return Reply(error=EngineRejected(words)) if call.body.get("top_logprobs") else Reply("hi")

    with serve_scripted(script) as server:
        engine = OpenAIEngine(server.url)
        for top in (20, None):
            await engine.chat(replace(messages(), top_logprobs=top, sampling=Sampling(max_tokens=32000)))
        await engine.aclose()
        assert {call.body["max_tokens"] for call in server.calls} == {32000}


async def test_openai_raises_a_refusal_that_names_nothing_optional() -> None:
    with serve_scripted([Reply(error=EngineRejected("messages are wrong"))]) as server:
        engine = OpenAIEngine(server.url)
        with pytest.raises(EngineRejected, match="messages are wrong"):
            await engine.chat(messages())
        await engine.aclose()


# --- in process ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=60), st.integers(1, 80), st.integers(1, 7))
async def test_the_scripted_engine_gives_what_it_was_told_whole_and_streamed(answer: list[int], limit: int, per_chunk: int) -> None:
    engine = ScriptedEngine([answer, answer], tokens_per_chunk=per_chunk)
    request = TokensRequest("m", np.array([1], np.int32), Sampling(max_tokens=limit))
    whole = (await engine.generate(request))[0]
    streamed = [chunk async for chunk in engine.stream(request)]
    assert whole.token_ids is not None
    assert whole.token_ids.tolist() == answer[:limit] == [token for chunk in streamed for token in chunk.token_ids]
    assert whole.finish == ("stop" if len(answer) <= limit else "length") == streamed[-1].finish
