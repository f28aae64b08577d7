"""A small client that asks a model one question in any of the four dialects. Knows no rubric.

Request and answer forms: https://docs.anthropic.com/en/api/messages, https://platform.openai.com/docs/api-reference/chat,
https://platform.openai.com/docs/api-reference/responses, https://ai.google.dev/api/generate-content.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from polar.chat import JsonObject
from polar.errors import EvaluatorError

Dialect = Literal["anthropic", "openai_chat", "openai_responses", "google"]
KEYS: dict[Dialect, str] = {
    "anthropic": "ANTHROPIC_API_KEY",
    "openai_chat": "OPENAI_API_KEY",
    "openai_responses": "OPENAI_API_KEY",
    "google": "GEMINI_API_KEY",
}
URLS: dict[Dialect, str] = {
    "anthropic": "https://api.anthropic.com",
    "openai_chat": "https://api.openai.com",
    "openai_responses": "https://api.openai.com",
    "google": "https://generativelanguage.googleapis.com",
}
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """Where and how to ask. `base_url` ends before the provider's own path; a `/v1` at its end does no harm."""

    dialect: Dialect
    base_url: str
    model: str
    key: str
    temperature: float | None
    max_tokens: int
    timeout_s: float
    attempts: int


async def ask(asked: Asked, system: str, user: str) -> str:
    """The text of the model's answer. What a model refuses by name and can be asked without is left out, once.

    Raises `EvaluatorError`: after the last attempt for what may pass, at once for what will not."""
    url, headers, body = request(asked, system, user)
    problem = "it was not asked"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=asked.timeout_s)) as client:
        attempt = 0
        while attempt < asked.attempts:
            wait_s = min(LONGEST_WAIT_S, 2.0**attempt) * random.uniform(0.5, 1.0)
            try:
                async with client.post(url, headers=headers, json=body) as response:
                    text = await response.text()
                    if response.status == 200:
                        answer = answer_text(asked.dialect, await response.json(content_type=None))
                        if answer.strip():
                            return answer
                        problem = "its answer has no text"
                    else:
                        problem = f"it answered {response.status}: {text[:300]}"
                        if response.status == 400 and (milder := _milder(body, text)) != body:
                            body = milder
                            continue
                        if response.status not in _PASSING:
                            raise EvaluatorError(f"the judge {asked.model} refused: {problem}")
                        wait_s = _retry_after(response.headers.get("Retry-After")) or wait_s
            except TimeoutError:
                problem = f"no answer in {asked.timeout_s:g} s"
            except (aiohttp.ClientError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            attempt += 1
            if attempt < asked.attempts:
                await asyncio.sleep(wait_s)
    raise EvaluatorError(f"the judge {asked.model} at {asked.base_url} could not be asked ({asked.attempts} attempts): {problem}")


def request(asked: Asked, system: str, user: str) -> tuple[str, dict[str, str], JsonObject]:
    """URL, headers and body of one question."""
    root = asked.base_url.rstrip("/").removesuffix("/v1beta" if asked.dialect == "google" else "/v1")
    more: JsonObject = {} if asked.temperature is None else {"temperature": asked.temperature}
    bearer = {"Authorization": f"Bearer {asked.key}"}
    match asked.dialect:
        case "anthropic":
            body = {"model": asked.model, "system": system, "messages": [{"role": "user", "content": user}], "max_tokens": asked.max_tokens}
            return f"{root}/v1/messages", {"x-api-key": asked.key, "anthropic-version": "2023-06-01"}, {**body, **more}
        case "openai_chat":
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            body = {"model": asked.model, "messages": messages, "max_tokens": asked.max_tokens}
            return f"{root}/v1/chat/completions", bearer, {**body, **more}
        case "openai_responses":
            body = {"model": asked.model, "instructions": system, "input": user, "max_output_tokens": asked.max_tokens, "store": False}
            return f"{root}/v1/responses", bearer, {**body, **more}
        case "google":
            settings = {"maxOutputTokens": asked.max_tokens, **more}
            contents = [{"role": "user", "parts": [{"text": user}]}]
            body = {"systemInstruction": {"parts": [{"text": system}]}, "contents": contents, "generationConfig": settings}
            return f"{root}/v1beta/models/{asked.model}:generateContent", {"x-goog-api-key": asked.key}, body


def _milder(body: JsonObject, refusal: str) -> JsonObject:
    """OpenAI's reasoning models take the limit under its newer name only, and no temperature; Anthropic's newer models no temperature."""
    milder = dict(body)
    if "max_completion_tokens" in refusal and "max_tokens" in body:
        milder["max_completion_tokens"] = milder.pop("max_tokens")
    elif "temperature" in refusal:
        milder.pop("temperature", None)
    return milder


def answer_text(dialect: Dialect, body: Any) -> str:
    """The text of an answer, thinking left out. Raises `ValueError` for a body of another form."""
    try:
        match dialect:
            case "anthropic":
                return "".join(block["text"] for block in body["content"] if block.get("type") == "text")
            case "openai_chat":
                content = body["choices"][0]["message"].get("content") or ""
                return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            case "openai_responses":
                parts = [part for item in body["output"] if item.get("type") == "message" for part in item["content"]]
                return "".join(part["text"] for part in parts if part.get("type") == "output_text")
            case "google":
                parts = body["candidates"][0].get("content", {}).get("parts", [])
                return "".join(part.get("text", "") for part in parts if not part.get("thought"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer of the dialect {dialect}: {type(error).__name__} {error}") from error


def _retry_after(value: str | None) -> float | None:
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(value))) if value else None
    except ValueError:
        return None
