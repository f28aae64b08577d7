"""Plays a harness in each dialect: keeps its history as that provider's clients do, sends it, reads what comes, streamed or not."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polar.testing.asgi import Answer, AsgiClient, Exchange

JsonObject = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SYSTEM = "You are a coding agent."
TEXT = "Hello."
THINKING = "<think>\nLet me see.\n</think>\n\n"


def call_text(arguments: str = '{"command": "ls"}', name: str = "bash") -> str:
    """A tool call as Qwen3 samples one."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def until(happened: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits for what has no event of its own."""
    async with asyncio.timeout(timeout_s):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass(slots=True)
class Turn:
    """What a client understood of one answer. `calls` are (id, name, arguments as parsed JSON)."""

    answer: Answer
    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    stop: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    id: str = ""


class Player(ABC):
    """One conversation. `tools` are offered unless `False`."""

    name: ClassVar[str]
    stops: ClassVar[dict[str, str]]
    """This dialect's words for `stop`, `length`, `tool_calls`."""
    ping: ClassVar[bytes] = b": ping\n\n"
    count_path: ClassVar[str | None] = None
    terminal: ClassVar[tuple[bytes, ...]]
    """What only a finished answer's stream or body holds."""

    def __init__(self, *, tools: bool = True, system: str | None = SYSTEM) -> None:
        self.tools = tools
        self.system = system
        self.history: list[Any] = []
        self.extra: JsonObject = {}

    @abstractmethod
    def path(self, stream: bool) -> str: ...

    @abstractmethod
    def body(self, stream: bool) -> JsonObject: ...

    @abstractmethod
    def user(self, text: str) -> Player: ...

    @abstractmethod
    def results(self, turn: Turn, *texts: str) -> Player:
        """The results of the turn's calls, in order."""

    @abstractmethod
    def read(self, answer: Answer, stream: bool) -> Turn:
        """Reads an answer and puts it into the history as this provider's clients do."""

    @abstractmethod
    def error(self, answer: Answer) -> tuple[str, str]:
        """(type or status word, message) of an error body, which must have the provider's shape."""

    def pings(self, answer: Answer) -> int:
        return answer.body.count(self.ping)

    async def send(self, client: AsgiClient, stream: bool = False, **how: Any) -> Answer:
        return await client.post(self.path(stream), self.body(stream), **how)

    def start(self, client: AsgiClient, stream: bool = False) -> Exchange:
        """Sends without waiting for the answer."""
        return client.start("POST", self.path(stream), self.body(stream))

    async def turn(self, client: AsgiClient, stream: bool = False) -> Turn:
        answer = await self.send(client, stream)
        assert answer.status == 200, answer.body
        return self.read(answer, stream)


class Anthropic(Player):
    name = "anthropic"
    stops: ClassVar = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    ping = b"event: ping\n"
    count_path = "/v1/messages/count_tokens"
    terminal = (b"message_stop", b'stop_reason":"', b'"text":"')

    def path(self, stream: bool) -> str:
        return "/v1/messages?beta=true"

    def body(self, stream: bool) -> JsonObject:
        body: JsonObject = {"model": "m", "max_tokens": 2000, "messages": self.history, **self.extra}
        if self.system:
            body["system"] = [{"type": "text", "text": self.system}]
        if self.tools:
            body["tools"] = [{"name": "bash", "description": "Runs a command", "input_schema": PARAMETERS}]
        return body | ({"stream": True} if stream else {})

    def user(self, text: str) -> Player:
        self.history.append({"role": "user", "content": text})
        return self

    def results(self, turn: Turn, *texts: str) -> Player:
        blocks = [{"type": "tool_result", "tool_use_id": call[0], "content": text} for call, text in zip(turn.calls, texts, strict=True)]
        self.history.append({"role": "user", "content": blocks})
        return self

    def read(self, answer: Answer, stream: bool) -> Turn:
        message = self._assembled(answer) if stream else answer.json()
        turn = Turn(answer, stop=message["stop_reason"], id=message["id"])
        for block in message["content"]:
            if block["type"] == "text":
                turn.text += block["text"]
            elif block["type"] == "thinking":
                turn.thinking += block["thinking"]
            elif block["type"] == "tool_use":
                turn.calls.append((block["id"], block["name"], block["input"]))
        usage = message["usage"]
        turn.prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        turn.completion_tokens = usage["output_tokens"]
        self.history.append({"role": "assistant", "content": message["content"]})
        return turn

    @staticmethod
    def _assembled(answer: Answer) -> JsonObject:
        message: JsonObject = {}
        partial: dict[int, str] = {}
        for event in answer.events():
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    message["content"].append(event["content_block"])
                case "content_block_delta":
                    block, delta = message["content"][event["index"]], event["delta"]
                    if delta["type"] == "input_json_delta":
                        partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
                    else:
                        key = delta["type"].removesuffix("_delta")
                        block[key] = block.get(key, "") + delta[key]
                case "content_block_stop":
                    if event["index"] in partial:
                        message["content"][event["index"]]["input"] = json.loads(partial[event["index"]])
                case "message_delta":
                    message.update(event["delta"])
                    message["usage"].update(event["usage"])
        return message

    def error(self, answer: Answer) -> tuple[str, str]:
        body = answer.json()
        assert body["type"] == "error"
        return body["error"]["type"], body["error"]["message"]


class Chat(Player):
    name = "openai_chat"
    stops: ClassVar = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}
    terminal = (b"[DONE]", b'finish_reason":"')

    def path(self, stream: bool) -> str:
        return "/v1/chat/completions"

    def body(self, stream: bool) -> JsonObject:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: JsonObject = {"model": "m", "messages": [*system, *self.history], **self.extra}
        if self.tools:
            function = {"name": "bash", "description": "Runs a command", "parameters": PARAMETERS}
            body["tools"] = [{"type": "function", "function": function}]
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    def user(self, text: str) -> Player:
        self.history.append({"role": "user", "content": text})
        return self

    def results(self, turn: Turn, *texts: str) -> Player:
        for call, text in zip(turn.calls, texts, strict=True):
            self.history.append({"role": "tool", "tool_call_id": call[0], "content": text})
        return self

    def read(self, answer: Answer, stream: bool) -> Turn:
        turn = Turn(answer)
        message: JsonObject = {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": ""}
        if stream:
            usage: JsonObject = {}
            for event in answer.events():
                if event == "[DONE]":
                    continue
                turn.id = event["id"]
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    delta = choice["delta"]
                    message["content"] += delta.get("content") or ""
                    message["reasoning_content"] += delta.get("reasoning_content") or ""
                    for call in delta.get("tool_calls") or []:
                        if call["index"] == len(message["tool_calls"]):
                            function = {"name": call["function"]["name"], "arguments": ""}
                            message["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
                    turn.stop = choice["finish_reason"] or turn.stop
        else:
            body = answer.json()
            choice, usage, turn.id = body["choices"][0], body["usage"], body["id"]
            turn.stop = choice["finish_reason"]
            for key in message:
                message[key] = choice["message"].get(key) or message[key]
        turn.text, turn.thinking = message["content"], message["reasoning_content"]
        for call in message["tool_calls"]:
            turn.calls.append((call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])))
        turn.prompt_tokens, turn.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        self.history.append({key: value for key, value in message.items() if value})
        return turn

    def error(self, answer: Answer) -> tuple[str, str]:
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        return error["type"], error["message"]


class Responses(Player):
    name = "openai_responses"
    stops: ClassVar = {"stop": "completed", "length": "incomplete", "tool_calls": "completed"}
    count_path = "/v1/responses/input_tokens"
    terminal = (b"response.completed", b'"output_text"', b"response.incomplete")

    def path(self, stream: bool) -> str:
        return "/v1/responses"

    def body(self, stream: bool) -> JsonObject:
        body: JsonObject = {"model": "m", "input": self.history, "store": False, **self.extra}
        if self.system:
            body["instructions"] = self.system
        if self.tools:
            body["tools"] = [{"type": "function", "name": "bash", "description": "Runs a command", "parameters": PARAMETERS}]
        return body | ({"stream": True} if stream else {})

    def user(self, text: str) -> Player:
        self.history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
        return self

    def results(self, turn: Turn, *texts: str) -> Player:
        for call, text in zip(turn.calls, texts, strict=True):
            self.history.append({"type": "function_call_output", "call_id": call[0], "output": text})
        return self

    def read(self, answer: Answer, stream: bool) -> Turn:
        response = answer.events()[-1]["response"] if stream else answer.json()
        turn = Turn(answer, stop=response["status"], id=response["id"])
        for item in response["output"]:
            if item["type"] == "message":
                turn.text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                turn.thinking += "".join(part["text"] for part in item["summary"])
            elif item["type"] == "function_call":
                turn.calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
        turn.prompt_tokens, turn.completion_tokens = response["usage"]["input_tokens"], response["usage"]["output_tokens"]
        self.history.extend(response["output"])
        return turn

    def error(self, answer: Answer) -> tuple[str, str]:
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        return error["type"], error["message"]


class Google(Player):
    name = "google"
    ping = b"\n"
    stops: ClassVar = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
    count_path = "/v1beta/models/m:countTokens"
    terminal = (b"finishReason",)

    def path(self, stream: bool) -> str:
        return "/v1beta/models/m:" + ("streamGenerateContent?alt=sse" if stream else "generateContent")

    def body(self, stream: bool) -> JsonObject:
        config = {"thinkingConfig": {"includeThoughts": True}, "maxOutputTokens": 2000}
        body: JsonObject = {"contents": self.history, "generationConfig": config, **self.extra}
        if self.system:
            body["systemInstruction"] = {"parts": [{"text": self.system}]}
        if self.tools:
            declaration = {"name": "bash", "description": "Runs a command", "parametersJsonSchema": PARAMETERS}
            body["tools"] = [{"functionDeclarations": [declaration]}]
        return body

    def user(self, text: str) -> Player:
        self.history.append({"role": "user", "parts": [{"text": text}]})
        return self

    def results(self, turn: Turn, *texts: str) -> Player:
        parts = [
            {"functionResponse": {"id": call[0], "name": call[1], "response": {"output": text}}}
            for call, text in zip(turn.calls, texts, strict=True)
        ]
        self.history.append({"role": "user", "parts": parts})
        return self

    def pings(self, answer: Answer) -> int:
        return len(answer.body) - len(answer.body.lstrip(self.ping))

    def read(self, answer: Answer, stream: bool) -> Turn:
        chunks = answer.events() if stream else [answer.json()]
        turn = Turn(answer, id=chunks[-1]["responseId"])
        parts: list[JsonObject] = []
        for chunk in chunks:
            candidate = chunk["candidates"][0]
            turn.stop = candidate.get("finishReason", turn.stop)
            parts.extend(candidate.get("content", {}).get("parts", []))
        for part in parts:
            if "functionCall" in part:
                call = part["functionCall"]
                turn.calls.append((call.get("id", ""), call["name"], call["args"]))
            elif part.get("thought"):
                turn.thinking += part["text"]
            else:
                turn.text += part.get("text", "")
        usage = chunks[-1]["usageMetadata"]
        turn.prompt_tokens = usage["promptTokenCount"]
        turn.completion_tokens = usage["totalTokenCount"] - usage["promptTokenCount"]
        self.history.append({"role": "model", "parts": parts})
        return turn

    def error(self, answer: Answer) -> tuple[str, str]:
        body = answer.json()
        error = (body[0] if isinstance(body, list) else body)["error"]
        assert error["code"] == answer.status
        return error["status"], error["message"]


PLAYERS: tuple[type[Player], ...] = (Anthropic, Chat, Responses, Google)
NAMES = [player.name for player in PLAYERS]
