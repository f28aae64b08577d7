"""The official SDKs drive a gateway over a real socket: streamed and not, tools and thinking, errors as their own classes."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from gateway_players import PARAMETERS, THINKING, call_text
from google import genai
from google.genai import errors as google_errors
from google.genai import types

from polar.errors import EngineBusy, EngineOverloaded, EngineUnavailable
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.records import Completion
from polar.testing.engine import Call, Reply, ScriptedEngine
from polar.testing.gateway import CachedServed


def script(call: Call) -> Reply | str:
    """Says what the last user message asks for; `loop` is a tool loop of two turns and an end."""
    asked = call.text.rpartition("<|im_start|>user\n")[2] if "loop" not in call.text else "loop"
    match asked.split("<|im_end|>")[0].split(" ")[0]:
        case "loop":
            results = call.text.count("<tool_response>")
            answers = {
                0: THINKING + "I look." + call_text('{"command" : "ls \\u002e"}'),
                1: THINKING + call_text('{"command": "a"}') + "\n" + call_text('{"command":"b"}'),
            }
            return answers.get(results, "Done.")
        case "think":
            return THINKING + "Hi."
        case "json":
            return '{"a": 1}'
        case "busy":
            return Reply(error=EngineBusy("slow down", retry_after="7"))
        case "full":
            return Reply(error=EngineOverloaded("full"))
        case "slow":
            return Reply("late", delay_s=60)
        case "gone":
            return Reply(error=EngineUnavailable("gone"))
    return "Hi."


@dataclass
class Listener:
    """A gateway on 127.0.0.1 in a thread of its own. `key()` makes a session; `made()` reads what the last one recorded."""

    gateway: Gateway
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], None]
    session: str = ""

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def key(self, **options: Any) -> str:
        record, key = self.run(self.gateway.new_session(**options))
        self.session = record.id
        return str(key)

    def base(self, key: str) -> str:
        return self.gateway.base_url(key)

    def made(self) -> list[Completion]:
        async def read() -> list[Completion]:
            return [one async for one in self.gateway.store.completions(self.session)]

        return list(self.run(read()))


@pytest.fixture(scope="module")
def listener(qwen3_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    engine_config = EngineConfig(urls=[], tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3")
    store = str(tmp_path_factory.mktemp("sdks") / "polar.db")
    config = GatewayConfig(
        engines={"default": engine_config}, store=store, port=0, admin_port=0, check=False, grace_s=0.05, first_ping_s=0.2
    )
    ready = threading.Event()
    found: list[Listener] = []

    async def run() -> None:
        engine = ScriptedEngine(script, tokenizer_dir=qwen3_tokenizer_dir, context=4000)
        gateway = Gateway(config, served={"default": CachedServed("default", engine_config, [engine])})
        stop = asyncio.Event()
        async with serving(gateway):
            found.append(Listener(gateway, asyncio.get_running_loop(), stop.set))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield found[0]
    found[0].loop.call_soon_threadsafe(found[0].stop)
    thread.join(10)


def all_extend(made: list[Completion]) -> bool:
    return all(
        later.prompt_ids is not None and earlier.ids is not None and later.prompt_ids[: len(earlier.ids)].tolist() == earlier.ids.tolist()
        for earlier, later in pairwise(made)
    )


# --- anthropic ---------------------------------------------------------------------------------------------------

ANTHROPIC_TOOLS: list[Any] = [{"name": "bash", "description": "Runs a command", "input_schema": PARAMETERS}]


@pytest.fixture
def claude(listener: Listener) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="unused", base_url=listener.base(listener.key()), max_retries=0)


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropic_plays_a_tool_loop(listener: Listener, claude: anthropic.Anthropic, stream: bool) -> None:
    messages = ask("loop")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    said: list[anthropic.types.Message] = []
    for _ in range(3):
        options: Any = {"model": "m", "max_tokens": 2000, "messages": messages, "tools": ANTHROPIC_TOOLS, "thinking": thinking}
        if stream:
            with claude.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**options)
        said.append(message)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if calls:
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]}
            )
    assert [message.stop_reason for message in said] == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in said[0].content] == ["thinking", "text", "tool_use"]
    assert [block.input for block in said[1].content if block.type == "tool_use"] == [{"command": "a"}, {"command": "b"}]
    assert said[2].usage.output_tokens > 0
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_anthropic_streams_thinking_and_text(claude: anthropic.Anthropic) -> None:
    kinds: list[str] = []
    with claude.messages.stream(model="m", max_tokens=100, messages=ask("think")) as events:
        kinds.extend(event.type for event in events)
        final = events.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"thinking", "signature", "text"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_anthropic_counts_and_lists(listener: Listener, claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="m", messages=ask("hello"), tools=ANTHROPIC_TOOLS)
    message = claude.messages.create(model="m", max_tokens=9, messages=ask("hello"), tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == message.usage.input_tokens
    assert [model.id for model in claude.models.list()] == ["scripted"]
    assert claude.models.retrieve("scripted").display_name == "scripted"
    assert len(listener.made()) == 1


def test_anthropic_structured_output(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = claude.messages.create(model="m", max_tokens=50, messages=ask("json"), output_config=output)
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text) == {"a": 1}


ANTHROPIC_ERRORS = [
    ("busy", anthropic.RateLimitError, 429),
    ("full", anthropic.InternalServerError, 529),
    ("gone", anthropic.InternalServerError, 500),
    ("word " * 5000, anthropic.BadRequestError, 400),
]


@pytest.mark.parametrize(("text", "kind", "status"), ANTHROPIC_ERRORS, ids=["busy", "full", "gone", "overflow"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropic_errors(claude: anthropic.Anthropic, text: str, kind: type[anthropic.APIStatusError], status: int, stream: bool) -> None:
    with pytest.raises(kind) as caught:
        claude.messages.create(model="m", max_tokens=9, messages=ask(text), stream=stream)
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"


def test_anthropic_keys(listener: Listener) -> None:
    base = listener.base("x").partition("/s/")[0]
    good = anthropic.Anthropic(api_key=listener.key(), base_url=base, max_retries=0)
    assert good.messages.create(model="m", max_tokens=9, messages=ask("hello")).type == "message"
    bearer = anthropic.Anthropic(auth_token=listener.key(), base_url=base, max_retries=0)
    assert bearer.messages.create(model="m", max_tokens=9, messages=ask("hello")).type == "message"
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(api_key="no", base_url=base, max_retries=0).messages.create(model="m", max_tokens=9, messages=ask("hello"))


async def test_anthropic_async(listener: Listener) -> None:
    async with anthropic.AsyncAnthropic(api_key="unused", base_url=listener.base(listener.key()), max_retries=0) as client:
        messages = await asyncio.gather(*(client.messages.create(model="m", max_tokens=99, messages=ask("think")) for _ in range(4)))
        assert [message.content[-1].type for message in messages] == ["text"] * 4
        async with client.messages.stream(model="m", max_tokens=99, messages=ask("think")) as events:
            assert [text async for text in events.text_stream] == ["Hi."]


# --- openai: chat --------------------------------------------------------------------------------------------------

CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "description": "Runs a command", "parameters": PARAMETERS}}]


@pytest.fixture
def gpt(listener: Listener) -> openai.OpenAI:
    return openai.OpenAI(api_key="unused", base_url=listener.base(listener.key()) + "/v1", max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_plays_a_tool_loop(listener: Listener, gpt: openai.OpenAI, stream: bool) -> None:
    messages = ask("loop")
    finishes: list[str | None] = []
    for _ in range(3):
        if stream:
            with gpt.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as events:
                for _event in events:
                    pass
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = gpt.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS).choices[0]
        finishes.append(choice.finish_reason)
        messages.append(choice.message.to_dict())
        for call in choice.message.tool_calls or []:
            assert json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    assert finishes == ["tool_calls", "tool_calls", "stop"]
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_chat_streams_usage_and_reasoning(gpt: openai.OpenAI) -> None:
    chunks = list(gpt.chat.completions.create(model="m", messages=ask("think"), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert (chunks[-1].usage.completion_tokens_details.reasoning_tokens or 0) > 0
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for chunk in chunks for choice in chunk.choices)
    assert reasoning == "Let me see."


class Shape(pydantic.BaseModel):
    a: int


def test_chat_parses_structured_output(gpt: openai.OpenAI) -> None:
    parsed = gpt.chat.completions.parse(model="m", messages=ask("json"), response_format=Shape)
    assert parsed.choices[0].message.parsed == Shape(a=1)


def test_chat_shows_log_probabilities_and_choices(listener: Listener, gpt: openai.OpenAI) -> None:
    completion = gpt.chat.completions.create(model="m", messages=ask("hello"), logprobs=True, top_logprobs=2, n=2)
    assert len(completion.choices) == 2
    logprobs = completion.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    recorded = listener.made()[1].logprobs
    assert recorded is not None
    assert [entry.logprob for entry in logprobs.content] == recorded[:-1].tolist()


def test_openai_models(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list()] == ["scripted"]
    assert gpt.models.retrieve("scripted").id == "scripted"


OPENAI_ERRORS: list[tuple[str, type[openai.APIStatusError], int, str | None]] = [
    ("busy", openai.RateLimitError, 429, None),
    ("full", openai.InternalServerError, 503, None),
    ("gone", openai.InternalServerError, 502, None),
    ("word " * 5000, openai.BadRequestError, 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("text", "kind", "status", "code"), OPENAI_ERRORS, ids=["busy", "full", "gone", "overflow"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_errors(gpt: openai.OpenAI, text: str, kind: type[openai.APIStatusError], status: int, code: str | None, stream: bool) -> None:
    with pytest.raises(kind) as caught:
        gpt.chat.completions.create(model="m", messages=ask(text), stream=stream)
    assert caught.value.status_code == status
    assert code is None or caught.value.code == code


def test_openai_keys(listener: Listener) -> None:
    base = listener.base("x").partition("/s/")[0] + "/v1"
    assert openai.OpenAI(api_key=listener.key(), base_url=base, max_retries=0).chat.completions.create(model="m", messages=ask("hello")).id
    refused = openai.OpenAI(api_key="no", base_url=base, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        refused.chat.completions.create(model="m", messages=ask("hello"))
    with pytest.raises(openai.AuthenticationError):
        refused.responses.create(model="m", input="hello")
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(api_key=listener.key(), base_url=base, max_retries=0).embeddings.create(model="m", input="x")


async def test_openai_async(listener: Listener) -> None:
    async with openai.AsyncOpenAI(api_key="unused", base_url=listener.base(listener.key()) + "/v1", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(model="m", messages=ask("think")) for _ in range(4)))
        assert [answer.choices[0].message.content for answer in answers] == ["Hi."] * 4
        stream = await client.responses.create(model="m", input="think", stream=True)
        assert [event.type async for event in stream][-1] == "response.completed"


# --- openai: responses ------------------------------------------------------------------------------------------------

RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "bash", "description": "Runs a command", "parameters": PARAMETERS}]


def outputs(response: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_plays_a_tool_loop_with_its_own_history(listener: Listener, gpt: openai.OpenAI, stream: bool) -> None:
    history: list[Any] = ask("loop")
    kinds = []
    for _ in range(3):
        if stream:
            with gpt.responses.stream(model="m", input=history, tools=RESPONSES_TOOLS, store=False) as events:
                for _event in events:
                    pass
                response: Any = events.get_final_response()
        else:
            response = gpt.responses.create(model="m", input=history, tools=RESPONSES_TOOLS, store=False)
        kinds.append([item.type for item in response.output])
        history += [item.to_dict() for item in response.output]
        history += outputs(response)
    assert kinds == [["reasoning", "message", "function_call"], ["reasoning", "function_call", "function_call"], ["message"]]
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_responses_continues_by_id_and_is_fetched_and_deleted(listener: Listener, gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="m", input="loop", tools=RESPONSES_TOOLS)
    second = gpt.responses.create(model="m", input=outputs(first), previous_response_id=first.id, tools=RESPONSES_TOOLS)
    third = gpt.responses.create(model="m", input=outputs(second), previous_response_id=second.id, tools=RESPONSES_TOOLS)
    assert third.output_text == "Done."
    made = listener.made()
    assert all_extend(made)
    assert gpt.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert [item.type for item in gpt.responses.input_items.list(first.id)] == ["message"]
    gpt.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="m", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert len(listener.made()) == 3


def test_responses_compacts(listener: Listener, gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="m", input="hello", store=False)
    history = [*ask("hello"), *(item.to_dict() for item in first.output)]
    compacted = gpt.responses.compact(model="m", input=history)
    assert [item.type for item in compacted.output][-1] == "compaction"
    assert "compaction" in [item.type for item in compacted.output]
    after = gpt.responses.create(model="m", input=[*(item.to_dict() for item in compacted.output), *ask("hello")], store=False)
    assert after.output_text
    assert len(listener.made()) == 3


def test_responses_counts(gpt: openai.OpenAI) -> None:
    counted = gpt.responses.input_tokens.count(model="m", input="hello")
    created = gpt.responses.create(model="m", input="hello")
    assert created.usage is not None
    assert counted.input_tokens == created.usage.input_tokens


def test_responses_parses_structured_output(gpt: openai.OpenAI) -> None:
    assert gpt.responses.parse(model="m", input="json", text_format=Shape).output_parsed == Shape(a=1)


@pytest.mark.parametrize(("text", "kind", "status", "code"), OPENAI_ERRORS, ids=["busy", "full", "gone", "overflow"])
def test_responses_errors(gpt: openai.OpenAI, text: str, kind: type[openai.APIStatusError], status: int, code: str | None) -> None:
    with pytest.raises(kind) as caught:
        gpt.responses.create(model="m", input=text)
    assert caught.value.status_code == status
    assert code is None or caught.value.code == code


def test_a_streamed_overflow_is_an_event(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="context window") as caught:
        list(gpt.responses.create(model="m", input="word " * 5000, stream=True))
    assert caught.value.code == "context_length_exceeded"


# --- google ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gemini(listener: Listener) -> genai.Client:
    return genai.Client(api_key="unused", http_options=types.HttpOptions(base_url=listener.base(listener.key())))


def google_config() -> types.GenerateContentConfig:
    declaration = types.FunctionDeclaration(name="bash", description="Runs a command", parameters_json_schema=PARAMETERS)
    return types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declaration])],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_google_plays_a_tool_loop(listener: Listener, gemini: genai.Client, stream: bool) -> None:
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="loop")])]
    texts = []
    for _ in range(3):
        if stream:
            chunks = list(gemini.models.generate_content_stream(model="m", contents=contents, config=google_config()))
        else:
            chunks = [gemini.models.generate_content(model="m", contents=contents, config=google_config())]
        parts = [part for chunk in chunks for part in (chunk.candidates or [])[0].content.parts or []]  # type: ignore[union-attr]
        assert str((chunks[-1].candidates or [])[0].finish_reason) == "FinishReason.STOP"
        assert chunks[-1].usage_metadata is not None
        texts.append("".join(part.text or "" for part in parts if not part.thought))
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        if calls:
            results = [types.FunctionResponse(id=call.id, name=call.name, response={"output": "ok"}) for call in calls]
            contents.append(types.Content(role="user", parts=[types.Part(function_response=result) for result in results]))
    assert texts == ["I look.", "", "Done."]
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_google_chats_with_its_own_history(listener: Listener, gemini: genai.Client) -> None:
    chat = gemini.chats.create(model="m", config=types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True)))
    assert chat.send_message("think").text == "Hi."
    assert chat.send_message("hello").text == "Hi."
    made = listener.made()
    assert len(made) == 2
    assert all_extend(made)


def test_google_counts_and_lists(listener: Listener, gemini: genai.Client) -> None:
    counted = gemini.models.count_tokens(model="m", contents="hello")
    answer = gemini.models.generate_content(model="m", contents="hello")
    assert answer.usage_metadata is not None
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count
    assert [model.name for model in gemini.models.list()] == ["models/scripted"]
    assert gemini.models.get(model="scripted").name == "models/scripted"
    assert len(listener.made()) == 1


def test_google_structured_output(gemini: genai.Client) -> None:
    config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Shape)
    assert gemini.models.generate_content(model="m", contents="json", config=config).parsed == Shape(a=1)


GOOGLE_ERRORS: list[tuple[str, type[google_errors.APIError], str]] = [
    ("busy", google_errors.ClientError, "RESOURCE_EXHAUSTED"),
    ("full", google_errors.ServerError, "UNAVAILABLE"),
    ("gone", google_errors.ServerError, "UNAVAILABLE"),
    ("word " * 5000, google_errors.ClientError, "INVALID_ARGUMENT"),
]


@pytest.mark.parametrize(("text", "kind", "status"), GOOGLE_ERRORS, ids=["busy", "full", "gone", "overflow"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_google_errors(gemini: genai.Client, text: str, kind: type[google_errors.APIError], status: str, stream: bool) -> None:
    def call() -> object:
        ask_for = gemini.models.generate_content_stream if stream else gemini.models.generate_content
        return list(ask_for(model="m", contents=text))

    with pytest.raises(kind) as caught:
        call()
    assert caught.value.status == status


def test_google_keys(listener: Listener) -> None:
    base = listener.base("x").partition("/s/")[0]
    good = genai.Client(api_key=listener.key(), http_options=types.HttpOptions(base_url=base))
    assert good.models.generate_content(model="m", contents="hello").text == "Hi."
    bad = genai.Client(api_key="no", http_options=types.HttpOptions(base_url=base))
    with pytest.raises(google_errors.ClientError) as caught:
        bad.models.generate_content(model="m", contents="hello")
    assert caught.value.code == 401


async def test_google_async(listener: Listener) -> None:
    client = genai.Client(api_key="unused", http_options=types.HttpOptions(base_url=listener.base(listener.key()))).aio
    answers = await asyncio.gather(*(client.models.generate_content(model="m", contents="think") for _ in range(4)))
    assert [answer.text for answer in answers] == ["Hi."] * 4
    chunks = [chunk async for chunk in await client.models.generate_content_stream(model="m", contents="think")]
    assert "".join(chunk.text or "" for chunk in chunks) == "Hi."
    await client.aclose()


def test_websocket_upgrades_are_refused_over_a_real_socket(listener: Listener) -> None:
    key = listener.key()
    connection = http.client.HTTPConnection("127.0.0.1", listener.gateway.config.port, timeout=5)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x" * 22 + "==", "Sec-WebSocket-Version": "13"}
    connection.request("GET", f"/s/{key}/v1/responses", headers=headers)
    assert connection.getresponse().status == 426
    connection.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after_s", [0.05, 0.4], ids=["before the first byte", "after it"])
def test_b81_a_closed_socket_ends_the_generation(listener: Listener, stream: bool, after_s: float) -> None:
    key = listener.key()
    connection = http.client.HTTPConnection("127.0.0.1", listener.gateway.config.port, timeout=5)
    connection.request("POST", f"/s/{key}/v1/chat/completions", json.dumps({"model": "m", "messages": ask("slow"), "stream": stream}))
    deadline = time.monotonic() + 10
    while not listener.gateway.gate.inflight and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(after_s)
    connection.close()
    while listener.gateway.gate.inflight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listener.gateway.gate.inflight == 0
    (made,) = listener.made()
    assert (made.status, made.untrainable) == ("aborted", "aborted: the client left")
