"""What the store's tests store: arbitrary forests (hypothesis), and an agent's session as real ones look."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from polar.chat import Image, Message, Text, Thinking, Tool, ToolCall
from polar.records import Break, Cause, Completion, Session

# --- equality, bit by bit ------------------------------------------------------------------------------------------


def same(a: Completion, b: Completion) -> bool:
    """Whether two completions are equal in every field, arrays by their bytes (NaN payloads included), JSON by its text."""
    return all(_same_value(getattr(a, f.name), getattr(b, f.name)) for f in fields(Completion))


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict | float):
        return type(a) is type(b) and json.dumps(a) == json.dumps(b)
    if a and isinstance(a, tuple) and isinstance(a[0], Tool):
        return bool(b) and [_tool_text(tool) for tool in a] == [_tool_text(tool) for tool in b]
    return bool(a == b)


def _tool_text(tool: Tool) -> str:
    return json.dumps([getattr(tool, f.name) for f in fields(Tool)])


def differences(a: Completion, b: Completion) -> list[str]:
    """The names of the fields that differ, for a failing test's message."""
    return [f.name for f in fields(Completion) if not _same_value(getattr(a, f.name), getattr(b, f.name))]


# --- arbitrary forests -----------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates and NUL included
long_texts = st.sampled_from(["", "x" * 5000, "\ud83d" + "y" * 4200])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
contents = texts | long_texts | st.lists(texts.map(Text) | st.builds(Image, texts, st.none() | texts), max_size=3).map(tuple)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=contents,
    thinking=st.lists(st.builds(Thinking, texts, st.none() | texts, st.booleans()), max_size=2).map(tuple),
    tool_calls=st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
    name=st.none() | texts,
    refs=st.lists(texts, max_size=2).map(tuple),
)
tools = st.builds(
    Tool,
    name=texts,
    description=st.none() | texts,
    parameters=json_objects,
    kind=st.sampled_from(["function", "custom", "shell"]),
    namespace=st.none() | texts,
    wire_name=st.none() | texts,
)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(lambda values: np.array(values, dtype=np.int32))
odd_floats = [0x7FC00000, 0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 0x00000001]  # NaNs with payloads, -0, inf, a denormal
floats = st.lists(st.sampled_from(odd_floats) | st.integers(0, 2**32 - 1), max_size=6).map(
    lambda bits: np.array(bits, dtype=np.uint32).view(np.float32)
)
breaks = st.builds(
    Break,
    cause=st.sampled_from(Cause),
    parent=st.integers(0, 9),
    position=st.integers(0, 2**40),
    lost=st.integers(0, 2**40),
    detail=texts,
)


@st.composite
def forests(draw: st.DrawFn) -> list[Completion]:
    """Completions of session `s` with any parents: extended, edited, rewritten, missing, or with ids that come and go."""
    made: list[Completion] = []
    numbers = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=6)))
    for number in numbers:
        base = draw(st.none() | st.sampled_from(made)) if made else None
        parent = base.number if base is not None else draw(st.none() | st.integers(0, 20))
        history = () if base is None else (*base.messages, base.answer)
        kept = draw(st.lists(st.sampled_from(history), max_size=5)) if history else []
        if draw(st.booleans()):
            kept = list(history)
        before = np.empty(0, dtype=np.int32) if base is None or base.ids is None else base.ids
        cut = draw(st.integers(0, len(before)))
        prompt = np.concatenate([before[: cut if draw(st.booleans()) else None], draw(ids)]).astype(np.int32)
        if draw(st.integers(0, 5)) == 0:  # long enough for blocks and for a reference
            prompt = np.concatenate([prompt, np.arange(draw(st.integers(1000, 3000)), dtype=np.int32)])
        made.append(
            Completion(
                session="s",
                number=number,
                status=draw(st.sampled_from(["complete", "aborted"])),
                dialect=draw(st.sampled_from(["anthropic", "google"])),
                mode=draw(st.sampled_from(["tokens", "messages"])),
                messages=(*kept, *draw(st.lists(messages, max_size=3))),
                answer=draw(messages),
                finish=draw(st.sampled_from(["stop", "length"])),
                parent=parent,
                shared=draw(st.integers(0, 9)),
                choice=draw(st.integers(0, 3)),
                tools=base.tools if base is not None and draw(st.booleans()) else tuple(draw(st.lists(tools, max_size=2))),
                prompt_ids=draw(st.none() | st.just(prompt)),
                sampled_ids=draw(st.none() | ids),
                logprobs=draw(st.none() | floats),
                root=draw(st.binary(max_size=32)),
                turn=draw(st.binary(max_size=16)),
                loose=draw(st.binary(max_size=16)),
                thinking_hash=draw(st.binary(max_size=8)),
                request_digest=draw(st.binary(max_size=32)),
                model_requested=draw(texts),
                model=draw(texts),
                policy_version=draw(st.none() | texts),
                sampling=draw(json_objects),
                asked=base.asked if base is not None and draw(st.booleans()) else draw(json_objects),
                stop_sequence=draw(st.none() | texts),
                cached_tokens=draw(st.integers(0, 2**40)),
                thinking_tokens=draw(st.integers(0, 9)),
                routed_experts=draw(st.sampled_from([None, "AAECAw=="])),
                broken=draw(st.none() | breaks),
                tags=frozenset(draw(st.lists(texts, max_size=2))),
                untrainable=draw(st.none() | texts),
                provenance=base.provenance if base is not None and draw(st.booleans()) else draw(json_objects),
                hints=draw(json_objects),
                stored=draw(st.booleans()),
                options=draw(json_objects),
                started=draw(st.floats(allow_nan=False)),
                ended=draw(st.floats(allow_nan=False)),
                delivered=draw(st.booleans()),
            )
        )
    return made


# --- an agent's session ------------------------------------------------------------------------------------------------


def session(name: str = "s", **changes: Any) -> Session:
    return replace(Session(name, hashlib.sha256(name.encode()).digest(), b"secret", created=1.0), **changes)


@dataclass
class Words:
    """A vocabulary of 30,000 words of some four letters, used by Zipf's law: less repetitive than code or prose, so harder to compress."""

    seed: int

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        letters = random.Random(7)
        self.words = ["".join(letters.choices("etaoinshrdlucmfwypvbgkjqxz", k=letters.randint(2, 5))) + " " for _ in range(30_000)]
        rank = np.arange(1, 30_001, dtype=np.float64)
        self.cumulative = np.cumsum(1 / rank) / np.sum(1 / rank)

    def ids(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        picked = np.minimum(np.searchsorted(self.cumulative, self.rng.random(count)), 29_999)
        return (picked * 5).astype(np.int32)  # over a vocabulary of 150,000 ids

    def text(self, ids: np.ndarray[Any, np.dtype[np.int32]]) -> str:
        return "".join(self.words[i // 5] for i in ids.tolist())


def agent_session(*, turns: int = 100, total: int = 60_000, name: str = "s", seed: int = 1, sampled_share: float = 0.4) -> list[Completion]:
    """A main conversation of `turns` calls that grows to `total` tokens: a system prompt of 8,000 tokens (if there is room), then
    thinking, a tool call and its result, each turn extending the one before by ids. What the harness echoes is not the sampled
    message: its thinking is signed and its call has an id.
    """
    words = Words(seed)
    head = min(8_000, total // 4)
    system = words.ids(head)
    tool_list = tuple(
        Tool(f"tool_{i}", words.text(words.ids(60)), {"type": "object", "properties": {"path": {"type": "string"}}}) for i in range(15)
    )
    provenance = {"engine": "vllm", "version": "0.32.0", "tokenizer": "ab" * 32, "template": "cd" * 32, "renderer": "qwen3"}
    per_turn = (total - head) // turns
    prompt = np.concatenate([system, words.ids(40)])
    history: tuple[Message, ...] = (Message("system", words.text(system)), Message("user", words.text(prompt[len(system) :])))
    made: list[Completion] = []
    for number in range(turns):
        sampled = words.ids(max(8, int(per_turn * sampled_share)))
        cut = len(sampled) // 2
        thought, said = words.text(sampled[:cut]), words.text(sampled[cut:])
        arguments = json.dumps({"command": said})
        answer = Message("assistant", "", (Thinking(thought),), (ToolCall("", "tool_1", arguments),))
        logprobs = np.where(words.rng.random(len(sampled)) < 0.6, -1e-4, -1.0) * words.rng.exponential(1.0, len(sampled))
        made.append(
            Completion(
                name, number, "complete", "anthropic", "tokens", history, answer, "tool_calls",
                parent=number - 1 if number else None, shared=len(made[-1].messages) + 1 if made else 0, tools=tool_list,
                prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs.astype(np.float32),
                root=hashlib.sha256(name.encode()).digest(), turn=hashlib.md5(f"t{number}".encode()).digest(),
                loose=hashlib.md5(f"l{number}".encode()).digest(), request_digest=hashlib.sha256(str(number).encode()).digest(),
                model_requested="claude-sonnet", model="qwen3", policy_version="3", provenance=provenance,
                sampling={"max_tokens": 8192 - number, "temperature": 1.0, "top_p": 1.0}, asked={"max_tokens": 32000, "stream": True},
                hints={"path": "/v1/messages", "user_agent": "harness/1.0"}, started=1e9 + number, ended=1e9 + number + 0.5,
            )
        )  # fmt: skip
        result = words.ids(max(4, per_turn - len(sampled)))
        echo = Message("assistant", "", (Thinking(thought, f"sig{number}"),), (ToolCall(f"toolu_{number}", "tool_1", arguments),))
        history = (*history, echo, Message("tool", words.text(result), tool_call_id=f"toolu_{number}"))
        prompt = np.concatenate([prompt, sampled, result]).astype(np.int32)
    return made


def raw_json(completion: Completion) -> int:
    """Bytes of this call's request and response as JSON, the response as vLLM gives it with ids and log-probabilities."""
    request = {
        "model": completion.model,
        "messages": [
            {"role": m.role, "content": m.text, "reasoning": m.reasoning, "tool_calls": [[c.id, c.name, c.arguments] for c in m.tool_calls]}
            for m in completion.messages
        ],
        "tools": [tool.schema() for tool in completion.tools],
        "logprobs": True,
        "return_token_ids": True,
    }
    assert completion.prompt_ids is not None
    assert completion.sampled_ids is not None
    assert completion.logprobs is not None
    response = {
        "prompt_token_ids": completion.prompt_ids.tolist(),
        "choices": [
            {
                "message": {"content": completion.answer.reasoning, "tool_calls": [c.arguments for c in completion.answer.tool_calls]},
                "token_ids": completion.sampled_ids.tolist(),
                "logprobs": {
                    "content": [
                        {"token": "word ", "logprob": value, "bytes": [119, 111, 114, 100, 32], "top_logprobs": []}
                        for value in completion.logprobs.tolist()
                    ]
                },
            }
        ],
    }
    return len(json.dumps(request, separators=(",", ":"))) + len(json.dumps(response, separators=(",", ":")))
