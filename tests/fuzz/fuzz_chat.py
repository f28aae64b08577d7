"""OpenAI Chat Completions, for the fuzzer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from fuzz_json import Json, Verbatim
from fuzz_talk import PIXEL, Asked, Said, Talk, answer_to
from fuzz_wire import Shot, Wire, respaced, swap

from polar.testing.asgi import Answer


class ChatWire(Wire):
    name = "openai_chat"

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}", "user-agent": "OpenAI/JS 6.1.0"}

    def shot(self, talk: Talk, rng: random.Random) -> Shot:
        body: dict[str, Any] = {"model": "gpt-x", "stream": talk.stream}
        legacy = bool(talk.tools) and rng.random() < 0.08
        if talk.tools:
            functions = [
                {"name": tool.name, "parameters": tool.schema} | ({} if tool.description is None else {"description": tool.description})
                for tool in talk.tools
            ]
            if legacy:
                body["functions"] = functions
            else:
                body["tools"] = [{"type": "function", "function": function} for function in functions]
                if rng.random() < 0.15:
                    body["tools"].append({"type": "custom", "custom": {"name": "patch", "description": "free text"}})
        if talk.choice is not None:
            plain = talk.choice in ("auto", "none", "required")
            if legacy:
                body["function_call"] = talk.choice if talk.choice in ("auto", "none") else {"name": talk.tools[0].name}
            else:
                body["tool_choice"] = talk.choice if plain else {"type": "function", "function": {"name": talk.choice}}
        body[rng.choice(["max_tokens", "max_completion_tokens"])] = talk.max_tokens
        if talk.temperature is not None:
            body["temperature"] = talk.temperature
        if talk.stop:
            body["stop"] = rng.choice([talk.stop, talk.stop[0]])
        if talk.thinking is not None:
            body["chat_template_kwargs"] = Verbatim(enable_thinking=talk.thinking)
        if talk.effort is not None:
            body["reasoning_effort"] = talk.effort
        if talk.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "out", "schema": talk.schema, "strict": True}}
        if rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 2}
        if rng.random() < 0.05:
            body["n"] = 2
        if talk.stream and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        messages: list[Json] = []
        if talk.system:
            messages.append({"role": "system", "content": talk.system})
        open_ids: list[str] = []
        for turn in talk.turns:
            if isinstance(turn, Said):
                message, open_ids = self._said(turn, len(messages), rng)
                messages.append(message)
            else:
                messages += self._asked(turn, open_ids, rng)
        body["messages"] = messages
        return Shot("/v1/chat/completions", body)

    def _said(self, turn: Said, position: int, rng: random.Random) -> tuple[Json, list[str]]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or rng.choice([None, ""])}
        if turn.thinking and rng.random() < 0.7:
            message[rng.choice(["reasoning_content", "reasoning"])] = turn.thinking
        ids = [f"call_{position:02d}{index:02d}" for index in range(len(turn.calls))]
        if ids:
            message["tool_calls"] = [
                {"id": identifier, "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
                for identifier, (name, values) in zip(ids, turn.calls, strict=True)
            ]
        return message, ids

    def _asked(self, turn: Asked, ids: list[str], rng: random.Random) -> list[Json]:
        messages: list[Json] = [
            {"role": "tool", "tool_call_id": identifier, "content": rng.choice([result.text, [{"type": "text", "text": result.text}]])}
            for identifier, result in zip(ids, turn.results, strict=True)
        ]
        if turn.texts or turn.images:
            parts: list[Json] = [{"type": "text", "text": text} for text in turn.texts]
            parts += [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}] * turn.images
            messages.append({"role": "user", "content": turn.texts[0] if len(parts) == 1 else parts})
        return messages

    def respell(self, shot: Shot, rng: random.Random) -> None:
        body = shot.body
        match rng.randrange(9):
            case 0:
                for message in body["messages"]:
                    content = message.get("content")
                    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
                        message["content"] = content[0]["text"]
            case 1:
                for message in body["messages"]:
                    if isinstance(message.get("content"), str):
                        message["content"] = [{"type": "text", "text": message["content"]}]
            case 2:
                for message in body["messages"]:
                    if not message.get("content") and message["role"] == "assistant":
                        message["content"] = rng.choice([None, "", []])
                        if rng.random() < 0.3:
                            del message["content"]
            case 3:
                for message in body["messages"]:
                    if message["role"] in ("system", "developer"):
                        message["role"] = rng.choice(["system", "developer"])
            case 4:
                old, new = rng.sample(["max_tokens", "max_completion_tokens"], 2)
                if old in body and new not in body:
                    swap(body, old, new)
            case 5:
                if isinstance(body.get("stop"), str):
                    body["stop"] = [body["stop"]]
                elif len(body.get("stop") or ()) == 1:
                    body["stop"] = body["stop"][0]
                for tool in body.get("tools") or ():
                    if tool.get("type") == "function" and rng.random() < 0.5:
                        del tool["type"]
            case 6:
                names = (
                    "tools functions tool_choice function_call temperature top_p stop seed logit_bias response_format user metadata store"
                )
                for name in names.split():
                    body.setdefault(name, None)
                for message in body["messages"]:
                    for name in ("name", "refusal", "tool_calls", "function_call", "reasoning_content", "audio"):
                        message.setdefault(name, None)
            case 7:
                for message in body["messages"]:
                    for old, new in (("reasoning_content", "reasoning"), ("reasoning", "reasoning_content")):
                        if message.get(old) and new not in message:
                            swap(message, old, new)
                            break
                    for part in message["content"] if isinstance(message.get("content"), list) else ():
                        if isinstance(part.get("image_url"), dict):
                            part["image_url"] = {"detail": "auto", **part["image_url"]}
            case _:
                body["stream"] = rng.choice([True, False])
                body["stream_options"] = rng.choice([None, {"include_usage": True}, {}])

    def noise(self, shot: Shot, rng: random.Random) -> None:
        answer = next(message for message in reversed(shot.body["messages"]) if message["role"] == "assistant")
        match rng.randrange(4):
            case 0:
                answer.pop("reasoning_content", None)
                answer.pop("reasoning", None)
            case 1:
                for call in answer.get("tool_calls") or ():
                    if "function" in call:
                        call["function"]["arguments"] = respaced(call["function"]["arguments"], rng)
            case 2:
                if isinstance(answer.get("content"), str) and answer["content"].strip():
                    answer["content"] = answer["content"].strip()
            case _:
                for name in ("refusal", "annotations", "audio"):
                    answer.pop(name, None)

    def whole(self, answer: Answer) -> Json:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            return answer.json()
        events = answer.events()
        assert events[-1] == "[DONE]", events[-1]
        choices: dict[int, Json] = {}
        for event in events[:-1]:
            for piece in event["choices"]:
                choice = choices.setdefault(piece["index"], {"message": {"role": "assistant", "content": ""}, "finish_reason": None})
                message, delta = choice["message"], piece["delta"]
                choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
                message["content"] += delta.get("content") or ""
                if delta.get("reasoning_content"):
                    message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
                for part in delta.get("tool_calls") or ():
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append({})
                    self._merge(calls[part["index"]], {key: value for key, value in part.items() if key != "index"})
                if delta.get("function_call"):
                    self._merge(message.setdefault("function_call", {}), delta["function_call"])
        return {"id": events[0]["id"], "choices": [choices[index] for index in sorted(choices)]}

    def _merge(self, into: Json, part: Json) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                self._merge(into.setdefault(key, {}), value)
            elif key in ("arguments", "input"):
                into[key] = into.get(key, "") + value
            else:
                into[key] = value

    def number_text(self, whole: Json) -> str:
        assert all(choice["finish_reason"] for choice in whole["choices"]), whole
        return str(whole["id"])

    def grow(self, shot: Shot, whole: Json, talk: Talk, rng: random.Random) -> Shot:
        shot = shot.copy()
        message = dict(whole["choices"][0]["message"])
        messages = shot.body["messages"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        said = Said(calls=[("", Verbatim())] * len(calls))
        if "function_call" in message:
            messages.append({"role": "function", "name": message["function_call"]["name"], "content": f"fine [{talk.canary}]"})
        messages += self._asked(answer_to(rng, said, talk.canary), [call["id"] for call in calls], rng)
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": f"Go on. [{talk.canary}]"})
        return shot

    def check_error(self, status: int, body: Json) -> None:
        assert isinstance(body["error"]["message"], str), body
        assert isinstance(body["error"]["type"], str)
        assert {"param", "code"} <= body["error"].keys()

    def wrong_paths(self) -> tuple[str, ...]:
        return ("/v1/chat/completion", "/v1/completions", "/v1/embeddings", "/chat", "/v1/chat/completions/x", "/v1/audio/speech", "/")

    def count(self, shot: Shot) -> tuple[Shot, Callable[[Json], int]] | None:
        return None
