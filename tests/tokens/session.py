"""Plays the gateway's and the harness's part around a `TokenPath`, with no HTTP between: what the gateway does, in the gateway's order."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from polar.chat import ChatRequest, Message, Tool, ToolCall
from polar.engines.base import EngineFinish, Generation
from polar.records import Completion, Head, Status
from polar.tokens import pointers
from polar.tokens.history import History
from polar.tokens.path import TokenPath
from polar.tokens.plan import Known, Match, Plan, Reading

SECRET = b"a secret of thirty-two bytes....."
BASH = Tool("bash", "Runs a command", {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})
READ = Tool("read", "Reads a file", {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}})
TOOLS = (BASH, READ)


class Session:
    """One session's turns. `ask` plans, `answer` files what was sampled."""

    def __init__(self, path: TokenPath, secret: bytes = SECRET) -> None:
        self.path = path
        self.secret = secret
        self.history = History()
        self.turns: dict[int, Completion] = {}
        self.next = 0
        self.match = Match()
        self.known: Known | None = None

    def ask(self, *messages: Message, **fields: Any) -> Plan:
        request = ChatRequest("any", tuple(messages), **fields)
        request = self.path.normalise(request, self.secret)
        keys = self.path.keys(request, self.known)
        assert keys == self.path.keys(request)
        self.known = Known(request.messages, keys)
        self.match = self.history.match(keys, request, secret=self.secret)
        parent = None if self.match.parent is None else self.turns[self.match.parent]
        return self.path.assemble(request, keys, self.match, parent)

    def parent(self, plan: Plan) -> Completion | None:
        return None if plan.parent is None else self.turns[plan.parent]

    def answer(
        self,
        plan: Plan,
        sampled: str | list[int],
        *,
        finish: EngineFinish = "stop",
        stop: str | int | None = None,
        status: Status = "complete",
        delivered: bool = True,
        generation: Generation | None = None,
    ) -> Reading:
        ids = self.path.tokenizer.encode(sampled) if isinstance(sampled, str) and self.path.tokenizer is not None else sampled
        generation = generation or made(ids, finish, stop)
        number, self.next = self.next, self.next + 1
        reading = self.path.read(plan, generation, pointers.mint(self.secret, number))
        completion = Completion(
            "s",
            number,
            status,
            "openai_chat",
            plan.mode,
            plan.request.messages,
            reading.message,
            reading.answer.finish,
            parent=plan.parent,
            shared=plan.shared,
            tools=plan.request.tools,
            prompt_ids=plan.prompt_ids if plan.mode == "tokens" else generation.prompt_ids,
            sampled_ids=generation.token_ids,
            root=plan.keys.root,
            turn=reading.turn,
            loose=reading.loose,
            thinking_hash=reading.thinking_hash,
            broken=plan.broken,
        )
        self.turns[number] = completion
        self.history.add(
            Head(number, plan.keys.root, reading.turn, reading.loose, reading.thinking_hash, plan.parent, status, delivered=delivered)
        )
        return reading

    def say(self, plan: Plan, sampled: str | list[int], **how: Any) -> Message:
        return self.answer(plan, sampled, **how).message


def made(ids: list[int] | str, finish: EngineFinish = "stop", stop: str | int | None = None, message: Message | None = None) -> Generation:
    assert not isinstance(ids, str)
    array = np.array(ids, dtype=np.int32)
    return Generation(None, array, np.full(len(array), -0.5, dtype=np.float32), finish, message, stop)


def system(text: str = "You are a coding agent.") -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def result(call: ToolCall, text: str = "ok") -> Message:
    return Message("tool", text, tool_call_id="call_" + call.id)


def echo(message: Message) -> Message:
    """What a harness sends back of an answer: JSON parsed and written again, prefixes on ids, no thinking, text trimmed."""
    calls = tuple(ToolCall("call_" + call.id, call.name, rewritten(call.arguments)) for call in message.tool_calls)
    return replace(message, content=message.text.strip(), thinking=(), tool_calls=calls)


def rewritten(arguments: str) -> str:
    value = json.loads(arguments)
    return json.dumps({key: value[key] for key in reversed(value)}, separators=(",", ":"))


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
