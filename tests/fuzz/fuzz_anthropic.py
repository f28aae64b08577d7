"""Anthropic Messages, for the fuzzer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from fuzz_json import Json, Verbatim
from fuzz_talk import PIXEL, Asked, Said, Talk, answer_to
from fuzz_wire import Shot, Wire

from polar.testing.asgi import Answer


class AnthropicWire(Wire):
    name = "anthropic"

    def headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01", "user-agent": "claude-cli/2.0.0 (external, cli)"}

    def shot(self, talk: Talk, rng: random.Random) -> Shot:
        body: dict[str, Any] = {"model": "claude-x", "max_tokens": talk.max_tokens, "stream": talk.stream}
        if talk.system:
            header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.0.{rng.randrange(99)};"}
            blocks = [{"type": "text", "text": talk.system, "cache_control": {"type": "ephemeral"}}]
            body["system"] = rng.choice([talk.system, blocks, [header, *blocks]])
        if talk.tools:
            body["tools"] = [
                {"name": tool.name, "input_schema": tool.schema} | ({} if tool.description is None else {"description": tool.description})
                for tool in talk.tools
            ]
            extra = rng.randrange(6)
            if extra == 0:
                body["tools"].append({"type": "bash_20250124", "name": "bash"})
            elif extra == 1:
                body["tools"].append({"type": "web_search_20250305", "name": "web_search", "max_uses": 5})
            elif extra == 2:
                body["tools"].append({"name": "later", "description": "d", "input_schema": Verbatim(type="object"), "defer_loading": True})
        choices = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}
        if talk.choice is not None:
            body["tool_choice"] = choices.get(talk.choice) or {"type": "tool", "name": talk.choice}
        if talk.thinking is not None:
            body["thinking"] = {"type": "enabled", "budget_tokens": 1024} if talk.thinking else {"type": "disabled"}
        config: dict[str, Any] = {} if talk.effort is None else {"effort": talk.effort}
        if talk.schema is not None:
            config["format"] = {"type": "json_schema", "schema": talk.schema}
        if config:
            body["output_config"] = config
        if talk.temperature is not None:
            body["temperature"] = talk.temperature
        if talk.stop:
            body["stop_sequences"] = talk.stop
        if rng.random() < 0.5:
            body["metadata"] = Verbatim(user_id="user_1_session_2")
        if rng.random() < 0.2:
            body["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        messages: list[Json] = []
        open_ids: list[str] = []
        for turn in talk.turns:
            if isinstance(turn, Said):
                blocks, open_ids = self._said(turn, len(messages), rng)
                messages.append({"role": "assistant", "content": blocks})
            else:
                messages.append({"role": "user", "content": self._asked(turn, open_ids, rng)})
        if rng.random() < 0.1:
            messages.append({"role": "system", "content": f"A reminder. [{talk.canary}]"})
        body["messages"] = messages
        return Shot("/v1/messages" + rng.choice(["", "?beta=true"]), body)

    def _said(self, turn: Said, position: int, rng: random.Random) -> tuple[list[Json], list[str]]:
        blocks: list[Json] = []
        if turn.thinking:
            thinking: dict[str, Any] = {"type": "thinking", "thinking": turn.thinking, "signature": rng.choice(["", "EqQBCkgIBRAB" * 4])}
            blocks.append(rng.choice([thinking, thinking, {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3"}]))
        if turn.text:
            blocks.append({"type": "text", "text": turn.text})
        ids = [f"toolu_01{position:02d}{index:02d}" for index in range(len(turn.calls))]
        for identifier, (name, values) in zip(ids, turn.calls, strict=True):
            blocks.append({"type": "tool_use", "id": identifier, "name": name, "input": values})
        return blocks, ids

    def _asked(self, turn: Asked, ids: list[str], rng: random.Random) -> list[Json]:
        blocks: list[Json] = []
        for identifier, result in zip(ids, turn.results, strict=True):
            block: dict[str, Any] = {"type": "tool_result", "tool_use_id": identifier}
            if result.text or rng.random() < 0.5:
                block["content"] = rng.choice([result.text, [{"type": "text", "text": result.text}]])
            if result.error:
                block["is_error"] = True
            blocks.append(block)
        blocks += [{"type": "text", "text": text} for text in turn.texts]
        blocks += [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}] * turn.images
        if turn.texts and rng.random() < 0.1:
            blocks.append({"type": "document", "title": "notes", "source": {"type": "text", "media_type": "text/plain", "data": "a note"}})
        return blocks

    def respell(self, shot: Shot, rng: random.Random) -> None:
        body = shot.body
        match rng.randrange(9):
            case 0:
                for message in body["messages"]:
                    content = message["content"]
                    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text" and len(content[0]) == 2:
                        message["content"] = content[0]["text"]
            case 1:
                for message in body["messages"]:
                    if isinstance(message["content"], str):
                        message["content"] = [{"type": "text", "text": message["content"]}]
                if isinstance(body.get("system"), str):
                    body["system"] = [{"type": "text", "text": body["system"]}]
            case 2:
                for block in self._blocks(body):
                    if block["type"] == "tool_result":
                        block.setdefault("is_error", rng.choice([None, False]))
                        content = block.get("content")
                        if isinstance(content, str):
                            block["content"] = [{"type": "text", "text": content}]
                        elif content is None:
                            block["content"] = rng.choice([None, "", []])
            case 3:
                for name in ("tools", "stop_sequences"):
                    body.setdefault(name, rng.choice([None, []]))
                for tool in body["tools"] or ():
                    tool.setdefault("type", rng.choice([None, "custom"]))
            case 4:
                names = (
                    "system tool_choice thinking temperature top_p top_k output_config metadata context_management container service_tier"
                )
                for name in names.split():
                    body.setdefault(name, None)
            case 5:
                body.setdefault("tool_choice", {"type": "auto", "disable_parallel_tool_use": rng.choice([True, False, None])})
                body["max_tokens"] = float(body["max_tokens"])
            case 6:
                for at, message in enumerate(list(body["messages"])):
                    content = message["content"]
                    texts = [block["type"] == "text" for block in content] if isinstance(content, list) else []
                    if message["role"] == "user" and len(texts) > 1 and all(texts):
                        halves = [{**message, "content": content[:1]}, {**message, "content": content[1:]}]
                        body["messages"][at : at + 1] = halves
                        break
            case 7:
                for block in self._blocks(body):
                    block["cache_control"] = rng.choice([None, {"type": "ephemeral", "ttl": "1h"}])
            case _:
                body["stream"] = rng.choice([True, False])
                if (body.get("thinking") or {}).get("type") == "enabled":
                    body["thinking"] = {"type": "adaptive"}

    def _blocks(self, body: Json) -> list[Json]:
        return [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]

    def noise(self, shot: Shot, rng: random.Random) -> None:
        answer = next(message for message in reversed(shot.body["messages"]) if message["role"] == "assistant")
        if isinstance(answer["content"], str):
            return
        match rng.randrange(3):
            case 0:
                rest = [block for block in answer["content"] if block["type"] != "thinking"]
                answer["content"] = rest or answer["content"]
            case 1:
                for block in answer["content"]:
                    if block["type"] == "tool_use":
                        block["input"] = Verbatim(sorted(block["input"].items()))
            case _:
                for block in answer["content"][-1:]:
                    if block["type"] == "text" and block["text"].rstrip():
                        block["text"] = block["text"].rstrip()

    def whole(self, answer: Answer) -> Json:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            return answer.json()
        message: Json = None
        events = answer.events()
        assert events[-1]["type"] == "message_stop", events[-1]
        for event in events:
            match event["type"]:
                case "message_start":
                    assert message is None
                    message = event["message"]
                case "content_block_start":
                    assert event["index"] == len(message["content"])
                    message["content"].append({**event["content_block"], "json": ""})
                case "content_block_delta":
                    block, delta = message["content"][event["index"]], event["delta"]
                    match delta["type"]:
                        case "text_delta":
                            block["text"] += delta["text"]
                        case "thinking_delta":
                            block["thinking"] += delta["thinking"]
                        case "signature_delta":
                            block["signature"] += delta["signature"]
                        case "input_json_delta":
                            block["json"] += delta["partial_json"]
                case "content_block_stop":
                    block = message["content"][event["index"]]
                    text = block.pop("json")
                    if block["type"] == "tool_use":
                        block["input"] = json.loads(text or "{}")
                case "message_delta":
                    message |= event["delta"]
        return message

    def number_text(self, whole: Json) -> str:
        assert whole["type"] == "message"
        assert whole["stop_reason"] is not None
        return str(whole["id"])

    def grow(self, shot: Shot, whole: Json, talk: Talk, rng: random.Random) -> Shot:
        shot = shot.copy()
        blocks = [block | ({"input": Verbatim(block["input"])} if "input" in block else {}) for block in whole["content"]]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        said = Said(calls=[(block["name"], block["input"]) for block in calls])
        asked = self._asked(answer_to(rng, said, talk.canary), [block["id"] for block in calls], rng)
        # an answer without a block cannot be sent back: the provider refuses an empty message, so harnesses leave it out
        shot.body["messages"] += [{"role": "assistant", "content": blocks or ""}, {"role": "user", "content": asked}]
        return shot

    def check_error(self, status: int, body: Json) -> None:
        assert body["type"] == "error", body
        assert isinstance(body["error"]["type"], str)
        assert isinstance(body["error"]["message"], str)

    def wrong_paths(self) -> tuple[str, ...]:
        return ("/v1/message", "/v1/messages/batches", "/v1/messages/x", "/v1/complete", "/v1/models/a/b/../..", "/v2/messages", "//")

    def count(self, shot: Shot) -> tuple[Shot, Callable[[Json], int]] | None:
        body = {name: value for name, value in shot.body.items() if name not in ("stream", "max_tokens")}
        return Shot("/v1/messages/count_tokens", body), lambda answer: int(answer["input_tokens"])
