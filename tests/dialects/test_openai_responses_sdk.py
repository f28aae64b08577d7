"""The official `openai` SDK drives the Responses dialect over a transport that is the dialect itself, and parses everything."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import openai
import orjson
import pydantic
import pytest
from openai_responses_samples import CALLS, DIALECT, REF, TOOLS, answer

from polar.chat import Answer, Message, TokenLogprob, Usage
from polar.dialects.base import Operation, Reply, replay
from polar.errors import CallError, ContextOverflow, EngineBusy, InvalidRequest

Respond = Callable[[httpx.Request], httpx.Response]


def client(answered: Answer | CallError) -> openai.OpenAI:
    """A client whose server answers every call with `answered`, and retrieves what it answered last."""
    stored: list[Reply] = []

    def respond(http: httpx.Request) -> httpx.Response:
        try:
            return serve(http)
        except CallError as error:
            shape = DIALECT.error(error)
            return httpx.Response(shape.status, json=shape.body, headers=dict(shape.headers))

    def serve(http: httpx.Request) -> httpx.Response:
        route = DIALECT.route(http.method, http.url.path, dict(http.url.params), {})
        assert route is not None
        if route.operation is Operation.RETRIEVE:
            return httpx.Response(200, json=DIALECT.complete(stored[-1], [answered]))  # type: ignore[list-item]
        if route.operation is Operation.INPUT_ITEMS:
            return httpx.Response(200, json=DIALECT.items(stored[-1].request, route.params))
        if route.operation is Operation.DELETE:
            return httpx.Response(200, json=DIALECT.deleted(route.params["response_id"]))
        request = DIALECT.parse(orjson.loads(http.content or b"{}"), route)
        if route.operation is Operation.COUNT:
            return httpx.Response(200, json=DIALECT.count(42, request))
        reply = Reply(request, REF, 1_700_000_000)
        stored.append(reply)
        if isinstance(answered, CallError):
            if not DIALECT.errors_in_stream(answered, request):
                raise answered
            encoder = DIALECT.encoder(reply)
            return sse(encoder.start() + encoder.error(answered))
        if not request.stream:
            return httpx.Response(200, json=DIALECT.complete(reply, [answered]))
        encoder = DIALECT.encoder(reply)
        early, late = replay(encoder, [answered])
        return sse(encoder.ping() + early + encoder.ping() + late)

    transport = httpx.MockTransport(respond)
    return openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="k", max_retries=0, http_client=httpx.Client(transport=transport))


def sse(content: bytes) -> httpx.Response:
    return httpx.Response(200, content=content, headers={"content-type": "text/event-stream"})


def strict(response: pydantic.BaseModel) -> None:
    """The SDK builds models without validating; this validates."""
    type(response).model_validate(response.model_dump(exclude_unset=True, by_alias=True))


@pytest.mark.parametrize("kind", CALLS)
def test_create_parses_every_kind_of_call(kind: str) -> None:
    response = client(answer("t", CALLS[kind], thinking="r")).responses.create(model="m", input="hi", tools=TOOLS)  # type: ignore[call-overload]
    strict(response)
    assert response.output_text == "t"
    assert [item.type for item in response.output][:2] == ["reasoning", "message"]
    assert type(response.output[2]).__name__ != "ResponseOutputMessage"
    assert response.output[0].summary[0].text == "r"
    assert response.usage.output_tokens_details.reasoning_tokens == 30


@pytest.mark.parametrize("kind", CALLS)
def test_stream_accumulates_to_the_same_response(kind: str) -> None:
    made = answer("text", CALLS[kind], thinking="r")
    with client(made).responses.stream(model="m", input="hi", tools=TOOLS) as stream:  # type: ignore[arg-type]
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    strict(final)
    assert seen[0] == "response.created"
    assert seen[-1] == "response.completed"
    body = client(made).responses.create(model="m", input="hi", tools=TOOLS)  # type: ignore[call-overload]
    assert [item.id for item in final.output] == [item.id for item in body.output]
    assert final.output_text == "text"


def test_raw_stream_events_are_all_known_and_valid() -> None:
    made = answer("text", CALLS["function"], CALLS["custom"], CALLS["shell"], thinking="r")
    for event in client(made).responses.create(model="m", input="hi", tools=TOOLS, stream=True):  # type: ignore[call-overload]
        strict(event)


def test_parse_reads_structured_output_and_strict_tools() -> None:
    class Point(pydantic.BaseModel):
        x: int

    tool = {"type": "function", "name": "read", "strict": True, "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}}
    response = client(answer('{"x": 3}', CALLS["function"])).responses.parse(model="m", input="hi", text_format=Point, tools=[tool])  # type: ignore[list-item]
    assert response.output_parsed == Point(x=3)
    assert response.output[1].parsed_arguments == {"p": "a"}  # type: ignore[union-attr]
    with client(answer('{"x": 4}')).responses.stream(model="m", input="hi", text_format=Point) as stream:
        assert stream.get_final_response().output_parsed == Point(x=4)


def test_logprobs_reach_the_client() -> None:
    made = Answer(Message("assistant", "a"), "stop", Usage(1, 1), logprobs=(TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.0))),))
    response = client(made).responses.create(model="m", input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    strict(response)
    content = response.output[0].content[0]  # type: ignore[union-attr]
    assert content.logprobs[0].top_logprobs[1].logprob == -1.0  # type: ignore[union-attr, index]


def test_an_incomplete_response_and_an_incomplete_stream() -> None:
    made = answer("abc", finish="length")
    response = client(made).responses.create(model="m", input="hi", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with client(made).responses.stream(model="m", input="hi", max_output_tokens=16) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_stored_response_is_retrieved_listed_and_deleted() -> None:
    api = client(answer("t", CALLS["function"]))
    made = api.responses.create(model="m", input=[{"role": "user", "content": str(number)} for number in range(3)], tools=TOOLS)  # type: ignore[call-overload]
    assert api.responses.retrieve(made.id).output == made.output
    listed = list(api.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == ["0", "1", "2"]  # type: ignore[union-attr]
    api.responses.delete(made.id)


def test_a_count_of_input_tokens() -> None:
    assert client(answer("t")).responses.input_tokens.count(model="m", input="hi").input_tokens == 42


def test_a_compaction_by_the_endpoint() -> None:
    compacted = client(answer("sum")).responses.compact(model="m", input=[{"role": "user", "content": "u"}])
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]


def test_a_cancel_is_a_bad_request() -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        client(answer("t")).responses.cancel("resp_1")


def test_errors_raise_the_sdks_own_exceptions() -> None:
    with pytest.raises(openai.RateLimitError) as limited:
        client(EngineBusy("slow down", retry_after="7")).responses.create(model="m", input="hi")
    assert limited.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.BadRequestError) as bad:
        client(InvalidRequest("no", param="input")).responses.create(model="m", input="hi")
    assert bad.value.param == "input"
    overflow = ContextOverflow("too long", prompt_tokens=9, limit=4)
    with pytest.raises(openai.BadRequestError) as full:
        client(overflow).responses.create(model="m", input="hi")
    assert full.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError) as streamed:
        list(client(overflow).responses.create(model="m", input="hi", stream=True))
    assert streamed.value.code == "context_length_exceeded"
