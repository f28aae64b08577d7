"""The official `anthropic` SDK reads what the dialect writes, and the dialect reads what the SDK writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import orjson
import pytest

from polar.chat import Answer, ChatRequest, Message, Thinking, ToolCall, Usage
from polar.dialects.anthropic import Anthropic
from polar.dialects.base import Operation, Reply, replay
from polar.errors import CallError, ContextOverflow, EngineBusy, NotFound, SessionClosed, StoreError, Unauthenticated

DIALECT = Anthropic()
REF = "0123456789abcdef0123456789"
TOOLS: list[Any] = [{"name": "ls", "description": "d", "input_schema": {"type": "object", "properties": {"p": {"type": "string"}}}}]
USER: list[Any] = [{"role": "user", "content": "u"}]
ANSWER = Answer(
    Message("assistant", "so:", (Thinking("plan"),), (ToolCall("a", "ls", '{"p": "\\u00e9"}'), ToolCall("b", "ls", "{}"))),
    "tool_calls",
    Usage(prompt=100, completion=40, cached=80, thinking=30),
)


class Provider:
    """The dialect behind an HTTP transport, without a gateway: answers every generation with `answer`, or refuses with `error`."""

    def __init__(self, answer: Answer = ANSWER, error: CallError | None = None, *, in_stream: bool = False) -> None:
        self.answer, self.error, self.in_stream = answer, error, in_stream
        self.requests: list[ChatRequest] = []
        self.calls = 0

    def __call__(self, http: httpx2.Request) -> httpx2.Response:
        self.calls += 1
        route = DIALECT.route(
            http.method, http.url.path, dict(http.url.params), {key.lower(): value for key, value in http.headers.items()}
        )
        if route is None:
            return self._refusal(NotFound("no such path"))
        if self.error is not None and not self.in_stream:
            return self._refusal(self.error)
        if route.operation is Operation.MODELS:
            return httpx2.Response(200, json=DIALECT.models(["m", "n"]))
        if route.operation is Operation.MODEL:
            return httpx2.Response(200, json=DIALECT.model(route.params["model"]))
        request = DIALECT.parse(orjson.loads(http.content), route)
        self.requests.append(request)
        if route.operation is Operation.COUNT:
            return httpx2.Response(200, json=DIALECT.count(7, request))
        reply = Reply(request, REF, 0, prompt_tokens=100)
        if not request.stream:
            return httpx2.Response(200, json=DIALECT.complete(reply, [self.answer]))
        encoder = DIALECT.encoder(reply)
        if self.error is not None:
            content = encoder.start() + encoder.ping() + encoder.error(self.error)
        else:
            early, late = replay(encoder, [self.answer])
            content = encoder.ping().join([early, late])
        return httpx2.Response(200, content=content, headers={"content-type": encoder.content_type})

    @staticmethod
    def _refusal(error: CallError) -> httpx2.Response:
        shape = DIALECT.error(error)
        return httpx2.Response(shape.status, json=shape.body, headers=dict(shape.headers))


@pytest.fixture
def client() -> Callable[..., anthropic.Anthropic]:
    def build(provider: Provider, retries: int = 0) -> anthropic.Anthropic:
        transport = httpx2.Client(transport=httpx2.MockTransport(provider))
        return anthropic.Anthropic(api_key="k", base_url="http://127.0.0.1:1", http_client=transport, max_retries=retries)

    return build


Build = Callable[[Provider], anthropic.Anthropic]


def check(message: Any) -> None:
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "plan", f"polar_{REF}")
    assert (text.type, text.text) == ("text", "so:")
    assert (first.type, first.id, first.name, first.input) == ("tool_use", f"toolu_{REF}00", "ls", {"p": "é"})
    assert (second.id, second.input) == (f"toolu_{REF}01", {})
    assert (message.id, message.model, message.role, message.stop_reason) == (f"msg_{REF}", "m", "assistant", "tool_use")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (20, 80, 40)
    assert usage.output_tokens_details.thinking_tokens == 30


def test_create(client: Build) -> None:
    message = client(Provider()).messages.create(model="m", max_tokens=99, messages=USER, tools=TOOLS)
    check(message)


def test_stream_accumulates_to_the_same_message(client: Build) -> None:
    provider = Provider()
    with client(provider).messages.stream(model="m", max_tokens=99, messages=USER, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    check(message)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    whole = client(provider).messages.create(model="m", max_tokens=99, messages=USER)
    assert message.to_dict() == whole.to_dict()


def test_beta_stream_with_thinking_and_edits(client: Build) -> None:
    provider = Provider()
    with client(provider).beta.messages.stream(
        model="m",
        max_tokens=9999,
        messages=USER,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        betas=["context-management-2025-06-27"],
    ) as stream:
        message = stream.get_final_message()
    check(message)
    assert message.context_management is not None
    assert message.context_management.applied_edits == []
    assert provider.requests[0].thinking is True


async def test_async_stream() -> None:
    transport = httpx2.AsyncClient(transport=httpx2.MockTransport(Provider()))
    async with (
        anthropic.AsyncAnthropic(auth_token="k", base_url="http://127.0.0.1:1", http_client=transport) as client,
        client.messages.stream(model="m", max_tokens=99, messages=USER) as stream,
    ):
        check(await stream.get_final_message())


def test_the_answer_sent_back_is_the_canonical_message(client: Build) -> None:
    provider = Provider()
    sdk = client(provider)
    message = sdk.messages.create(model="m", max_tokens=99, messages=USER, tools=TOOLS)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "o"} for block in message.content if block.type == "tool_use"
    ]
    sdk.messages.create(model="m", max_tokens=99, messages=[*USER, message.to_param(), {"role": "user", "content": results}], tools=TOOLS)
    echoed = provider.requests[1].messages[1]
    assert (echoed.text, echoed.reasoning) == ("so:", "plan")
    assert echoed.thinking[0].signature == f"polar_{REF}"
    assert [call.arguments for call in echoed.tool_calls] == ['{"p":"é"}', "{}"]
    assert [result.tool_call_id for result in provider.requests[1].messages[2:]] == [f"toolu_{REF}00", f"toolu_{REF}01"]


def test_structured_output_is_parsed(client: Build) -> None:
    provider = Provider(Answer(Message("assistant", '{"a": 1}'), "stop", Usage(5, 5)))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client(provider).messages.create(
        model="m", max_tokens=9, messages=USER, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    )
    assert provider.requests[0].response_format is not None
    assert provider.requests[0].effort == "low"


@pytest.mark.parametrize("finish", ["stop", "length", "content_filter"])
def test_b35_an_empty_answer_is_legal(client: Build, finish: Any) -> None:
    provider = Provider(Answer(Message("assistant"), finish, Usage(5, 1)))
    with client(provider).messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        message = stream.get_final_message()
    assert message.content == []
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}[finish]


def test_b27_the_sdk_reads_a_cut_call_as_text(client: Build) -> None:
    provider = Provider(Answer(Message("assistant", tool_calls=(ToolCall("t", "write", '{"p": "a'),)), "length", Usage(5, 9)))
    with client(provider).messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


def test_count_models_and_model(client: Build) -> None:
    sdk = client(Provider())
    assert sdk.messages.count_tokens(model="m", messages=USER, tools=TOOLS).input_tokens == 7
    assert [model.id for model in sdk.models.list()] == ["m", "n"]
    assert sdk.models.retrieve("org/name").id == "org/name"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Unauthenticated("x"), anthropic.AuthenticationError),
        (NotFound("x"), anthropic.NotFoundError),
        (ContextOverflow("x", prompt_tokens=9, limit=8), anthropic.BadRequestError),
        (EngineBusy("x", retry_after="0"), anthropic.RateLimitError),
        (StoreError("x"), anthropic.APIStatusError),
    ],
)
def test_errors_are_the_sdks_own(client: Build, error: CallError, raised: type[anthropic.APIStatusError]) -> None:
    with pytest.raises(raised) as caught:
        client(Provider(error=error)).messages.create(model="m", max_tokens=9, messages=USER)
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("req_")


def test_an_error_in_the_stream_is_raised(client: Build) -> None:
    provider = Provider(error=StoreError("disk full"), in_stream=True)
    with (
        pytest.raises(anthropic.APIStatusError, match="disk full"),
        client(provider).messages.stream(model="m", max_tokens=9, messages=USER) as stream,
    ):
        stream.get_final_message()


def test_the_sdk_retries_what_may_pass_and_not_what_has_ended() -> None:
    for error, calls in [(EngineBusy("x", retry_after="0"), 3), (SessionClosed("x"), 1)]:
        provider = Provider(error=error)
        transport = httpx2.Client(transport=httpx2.MockTransport(provider))
        sdk = anthropic.Anthropic(api_key="k", base_url="http://127.0.0.1:1", http_client=transport, max_retries=2)
        with pytest.raises(anthropic.APIStatusError):
            sdk.messages.create(model="m", max_tokens=9, messages=USER)
        assert provider.calls == calls
