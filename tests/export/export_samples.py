"""Sessions to export, in a real store: conversations of a word tokenizer, rendered and bridged as the gateway does it, in miniature."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polar.chat import JsonObject, Message, Thinking, Tool, ToolCall
from polar.records import Completion, Session, SessionKind
from polar.store import Store, open_store
from polar.testing.tokenizer import WordTokenizer

Write = Callable[..., Awaitable[tuple[JsonObject, Path]]]
"""The fixture `write`."""

TOKENIZER = WordTokenizer()
TOOLS = (Tool("shell", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}),)


def render(message: Message) -> str:
    """A message as the prompt has it, in the shape of Qwen3's template."""
    calls = "".join(f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>' for call in message.tool_calls)
    return f"<|im_start|>{message.role}\n{said(message)}{calls}<|im_end|>\n"


def said(message: Message) -> str:
    return (f"<think>{message.reasoning}</think>" if message.reasoning else "") + message.text


def answer_ids(message: Message) -> list[int]:
    """What the model sampled: the answer and the mark of its end."""
    text = render(message).removeprefix("<|im_start|>assistant\n").removesuffix("\n")
    return TOKENIZER.encode(text)


@dataclass
class Talk:
    """A session being made: `say` adds a call whose prompt is everything before it plus `news`."""

    id: str
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = 1.0
    closed: float | None = 2.0
    kind: SessionKind = "train"
    tools: tuple[Tool, ...] = TOOLS
    completions: list[Completion] = field(default_factory=list)

    def say(self, news: Sequence[Message], answer: Message, *, after: int | None = -1, broken: bool = False, **changes: Any) -> Completion:
        """`after` is the index of the call that it continues (default: the last one), `None` for a conversation of its own.
        `broken` renders the history afresh with its thinking gone, as a harness without it would."""
        before = None if after is None or not self.completions else self.completions[after]
        history = () if before is None else (*before.messages, before.answer)
        if before is not None and broken:
            history = tuple(Message(m.role, m.content, (), m.tool_calls, m.tool_call_id) for m in history)
        head = "" if before is not None and not broken else "".join(map(render, history))
        opening = "".join(map(render, news)) + "<|im_start|>assistant\n"
        fresh = TOKENIZER.encode(("\n" if before is not None and not broken else "") + head + opening)
        start: list[int] = [] if before is None or broken or before.ids is None else before.ids.tolist()
        sampled = answer_ids(answer)
        number = len(self.completions)
        values: dict[str, Any] = {
            "parent": None if before is None else before.number,
            "shared": len(history),
            "tools": self.tools,
            "prompt_ids": np.array([*start, *fresh], np.int32),
            "sampled_ids": np.array(sampled, np.int32),
            "logprobs": -np.linspace(0.1, 1, len(sampled), dtype=np.float32),
            "root": hashlib.sha256(self.id.encode()).digest(),
            "turn": hashlib.md5(f"{self.id} {number}".encode()).digest(),
            "model": "words",
            "policy_version": "7",
            "sampling": {"temperature": 1.0},
            "started": float(number),
            "ended": number + 0.5,
            "delivered": True,
        } | changes
        made = Completion(
            self.id,
            number,
            values.pop("status", "complete"),
            values.pop("dialect", "openai_chat"),
            "tokens",
            (*history, *news),
            answer,
            values.pop("finish", "tool_calls" if answer.tool_calls else "stop"),
            **values,
        )
        self.completions.append(made)
        return made

    @property
    def session(self) -> Session:
        return Session(
            self.id, hashlib.sha256(self.id.encode()).digest(), b"secret", self.kind, self.created, self.closed, metadata=self.metadata
        )


def solved(name: str, *, text: str = "", created: float = 1.0, turns: int = 2, **metadata: Any) -> Talk:
    """A session of `turns` calls: some shell commands, then a last word."""
    talk = Talk(name, {"harness": "pi", **metadata}, created)
    news = [Message("system", "You are an agent."), Message("user", f"Do the task {text or metadata.get('task') or name}.")]
    for turn in range(turns - 1):
        call = ToolCall(f"call_{name}_{turn}", "shell", f'{{"command": "step {turn} of {text or name}"}}')
        talk.say(news, Message("assistant", "", (Thinking("I look first."),), (call,)))
        news = [Message("tool", f"result {turn}", tool_call_id=call.id)]
    talk.say(news, Message("assistant", "Done."))
    return talk


async def fill(path: Path, talks: Sequence[Talk]) -> Store:
    """An open store with these sessions; the caller closes it."""
    store = open_store(path)
    for talk in talks:
        await store.create_session(talk.session)
        for completion in talk.completions:
            await store.append([completion])
    return store


def lines(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    """The rows of an export in JSON lines."""
    return [json.loads(line) for file in sorted((folder / "data").glob(f"{split}-*.jsonl")) for line in file.read_text().splitlines()]
