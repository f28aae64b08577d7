"""The official `google-genai` SDK drives a gateway over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_listener import Listener, Shape, all_extend
from gateway_players import PARAMETERS
from google import genai
from google.genai import errors as google_errors
from google.genai import types


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
