"""The official `google-genai` SDK reads our bodies, streams and errors, over a transport that never leaves the process."""

from __future__ import annotations

from typing import Any

import httpx2
import orjson
import pytest
from google import genai
from google.genai import errors, types

from polar.chat import Answer, Message, Thinking, TokenLogprob, ToolCall, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.google import Google
from polar.errors import CallError, ContextOverflow, EngineBusy, EngineUnavailable

GOOGLE = Google()
REF = "0123456789abcdef0123456789"
ANSWER = Answer(
    Message("assistant", "hi\u2028there", (Thinking("plan"),), (ToolCall("x", "f", '{"a":1}'), ToolCall("y", "f", '{"a":2}'))),
    "tool_calls",
    Usage(10, 5, thinking=2),
    logprobs=(TokenLogprob("hi", -0.5),),
)
TEXT = Answer(Message("assistant", "hi"), "stop", Usage(10, 5))
CONFIG = types.GenerateContentConfig(
    tools=[
        types.Tool(
            function_declarations=[
                types.FunctionDeclaration(
                    name="f", parameters=types.Schema(type=types.Type.OBJECT, properties={"a": types.Schema(type=types.Type.INTEGER)})
                )
            ]
        )
    ],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    thinking_config=types.ThinkingConfig(include_thoughts=True),
)


class Server:
    """Answers every call with `answers`; keeps the bodies and the canonical requests that it was sent."""

    def __init__(self, *answers: Answer, error: CallError | None = None, broken: CallError | None = None) -> None:
        self.answers = answers
        self.error = error
        self.broken = broken
        self.requests: list[Any] = []
        self.bodies: list[Any] = []

    def client(self) -> genai.Client:
        transport = httpx2.Client(transport=httpx2.MockTransport(self.handle))
        retry = types.HttpRetryOptions(attempts=1)
        options = types.HttpOptions(base_url="http://127.0.0.1:1", httpx_client=transport, retry_options=retry)
        return genai.Client(api_key="the-key", http_options=options)

    def handle(self, http: httpx2.Request) -> httpx2.Response:
        headers = {name.lower(): value for name, value in http.headers.items()}
        query = dict(http.url.params.items())
        route = GOOGLE.route(http.method, http.url.path, query, headers)
        assert route is not None, http.url
        assert GOOGLE.key(headers, query) == "the-key"
        if route.operation is Operation.MODELS:
            return httpx2.Response(200, json=GOOGLE.models(["m"]))
        if route.operation is Operation.MODEL:
            return httpx2.Response(200, json=GOOGLE.model(route.params["model"]))
        if self.error is not None:
            refused = GOOGLE.error(self.error)
            return httpx2.Response(refused.status, json=refused.body, headers=dict(refused.headers))
        return self.generate(orjson.loads(http.content), route)

    def generate(self, body: Any, route: Route) -> httpx2.Response:
        request = GOOGLE.parse(body, route)
        self.requests.append(request)
        self.bodies.append(body)
        if route.operation is Operation.COUNT:
            return httpx2.Response(200, json=GOOGLE.count(5, request))
        reply = Reply(request, REF, created=1, prompt_tokens=10)
        encoder = GOOGLE.encoder(reply)
        if self.broken is not None:
            stream = encoder.start() + encoder.ping() + encoder.error(self.broken)
        elif request.stream:
            early, late = replay(encoder, self.answers)
            stream = encoder.ping() + early + encoder.ping() + late
        else:
            return httpx2.Response(200, json=GOOGLE.complete(reply, self.answers))
        return httpx2.Response(200, content=stream, headers={"content-type": encoder.content_type})


def test_a_whole_answer() -> None:
    server = Server(ANSWER)
    response = server.client().models.generate_content(model="m", contents="x", config=CONFIG)
    assert response.candidates is not None
    assert response.candidates[0].finish_reason == types.FinishReason.STOP
    assert [(call.id, call.args) for call in response.function_calls or []] == [(f"call_{REF}00", {"a": 1}), (f"call_{REF}01", {"a": 2})]
    assert response.usage_metadata is not None
    assert response.usage_metadata.thoughts_token_count == 2
    assert response.response_id == REF
    assert server.requests[0].tools[0].parameters == {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_a_stream() -> None:
    chunks = list(Server(ANSWER).client().models.generate_content_stream(model="m", contents="x", config=CONFIG))
    parts = [
        part for chunk in chunks for candidate in chunk.candidates or [] for part in (candidate.content and candidate.content.parts) or []
    ]
    assert [(part.text, part.thought) for part in parts if part.text] == [("plan", True), ("hi\u2028there", None)]
    assert [part.function_call.args for part in parts if part.function_call] == [{"a": 1}, {"a": 2}]
    assert chunks[-1].candidates is not None
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata is not None
    assert chunks[-1].usage_metadata.total_token_count == 15


@pytest.mark.parametrize("streamed", [True, False])
def test_a_chat_keeps_the_turn_and_echoes_it_whole(streamed: bool) -> None:
    server = Server(ANSWER)
    chat = server.client().chats.create(model="m", config=CONFIG)
    if streamed:
        list(chat.send_message_stream("one"))
    else:
        chat.send_message("one")
    results = [types.Part.from_function_response(name="f", response={"output": text}) for text in ("1", "2")]
    chat.send_message(results)
    messages = server.requests[1].messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1].text == "hi\u2028there"
    assert messages[1].reasoning == "plan"
    assert [call.id for call in messages[1].tool_calls] == [message.tool_call_id for message in messages[2:]]
    assert [message.content for message in messages[2:]] == ["1", "2"]
    assert messages[1].refs


def test_a_text_only_chat_goes_on() -> None:
    server = Server(TEXT)
    chat = server.client().chats.create(model="m")
    list(chat.send_message_stream("one"))
    chat.send_message("two")
    assert [(message.role, message.content) for message in server.requests[1].messages] == [
        ("user", "one"),
        ("assistant", "hi"),
        ("user", "two"),
    ]


def test_images_and_system_instructions_arrive() -> None:
    server = Server(TEXT)
    data = bytes(range(248, 256)) * 3
    server.client().models.generate_content(
        model="org/name:tag",
        contents=["see", types.Part.from_bytes(data=data, mime_type="image/png")],
        config=types.GenerateContentConfig(
            system_instruction="S", max_output_tokens=5, thinking_config=types.ThinkingConfig(thinking_budget=0)
        ),
    )
    request = server.requests[0]
    assert request.messages[0].content == "S"
    assert request.messages[1].images[0].url.startswith("data:image/png;base64,+Pn6")
    assert (request.model, request.thinking, request.sampling.max_tokens) == ("org/name:tag", False, 5)


def test_a_count_and_models() -> None:
    client = Server().client()
    assert client.models.count_tokens(model="m", contents="x").total_tokens == 5
    assert [model.name for model in client.models.list()] == ["models/m"]
    assert client.models.get(model="m").name == "models/m"


def test_log_probabilities() -> None:
    config = types.GenerateContentConfig(response_logprobs=True, logprobs=0)
    response = Server(ANSWER).client().models.generate_content(model="m", contents="x", config=config)
    assert response.candidates is not None
    result = response.candidates[0].logprobs_result
    assert result is not None
    assert [entry.log_probability for entry in result.chosen_candidates or []] == [-0.5]


def test_errors_are_the_sdks_own() -> None:
    with pytest.raises(errors.ClientError) as caught:
        Server(error=ContextOverflow("x", prompt_tokens=20, limit=10)).client().models.generate_content(model="m", contents="x")
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    assert "exceeds the maximum number of tokens allowed (10)" in str(caught.value)
    with pytest.raises(errors.ClientError) as limited:
        Server(error=EngineBusy("slow", retry_after="7")).client().models.generate_content(model="m", contents="x")
    assert limited.value.status == "RESOURCE_EXHAUSTED"


def test_an_error_in_a_stream_is_raised() -> None:
    stream = Server(broken=EngineUnavailable("engine went away")).client().models.generate_content_stream(model="m", contents="x")
    with pytest.raises(errors.ServerError, match="engine went away"):
        list(stream)
