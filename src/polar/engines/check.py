"""Is what this engine returns fit for training? Asked at start, answered with reasons.

Three questions. Do sampled ids and log-probabilities come, and line up? Do the log-probabilities belong to the distribution that
was sampled from (law 1)? And, in mode `tokens`: does the engine's own template render a prompt to the same ids as our
renderer? Knows no HTTP and no session; the token path is duck-typed as `Path`.

How the second question is answered, without knowing the model: at temperature 0.5 the log-odds between two tokens are twice
those at temperature 1, if temperature is in the log-probabilities at all; with `top_p` 0.05 all but the likeliest token lose
their probability, if truncation is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from polar.chat import JsonObject, Message, Sampling, Thinking, Tool, ToolCall, ToolChoice
from polar.engines.arrays import FLOOR
from polar.engines.base import Engine, Generation, Ids, MessagesRequest, TokensRequest

Logprobs = Literal["processed", "temperature", "raw", "unknown"]
FAR = 0.1
"""Log-odds at temperature 1 below this tell nothing."""


class Path(Protocol):
    """What is needed of a token path."""

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None) -> Ids: ...

    def decode(self, ids: Any) -> str: ...


@dataclass(slots=True)
class Report:
    """`logprobs`: `processed` (of the distribution sampled from), `temperature` (tempered, not truncated: SGLang's), `raw` (of the model's
    own distribution: vLLM's default), `unknown`. `prompts_differ` says where renderer and engine part, in mode `tokens` only."""

    trainable: bool
    problems: list[str] = field(default_factory=list)
    logprobs: Logprobs = "unknown"
    prompts_differ: str | None = None
    facts: JsonObject = field(default_factory=dict)

    def untrainable(self, sampling: Mapping[str, Any]) -> str | None:
        """Why log-probabilities sampled with these parameters (as recorded; unset means neutral) can't be trained; `None` if they can."""
        if self.logprobs == "processed":
            return None
        tempered = sampling.get("temperature", 1.0) != 1.0
        truncated = (
            sampling.get("top_p", 1.0) != 1.0
            or sampling.get("top_k", 0) not in (-1, 0)
            or bool(sampling.get("min_p"))
            or bool(sampling.get("presence_penalty"))
            or bool(sampling.get("frequency_penalty"))
            or sampling.get("repetition_penalty", 1.0) != 1.0
            or bool(sampling.get("logit_bias"))
        )
        if truncated or (tempered and self.logprobs != "temperature"):
            return f"the engine's log-probabilities ({self.logprobs}) are not those of the distribution sampled from at {dict(sampling)}"
        return None


NEUTRAL = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, max_tokens=8
)
_READ = Tool("read_file", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
_RUN = Tool(
    "run",
    "Runs a command.\nReturns its output.",
    {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}},
)
_USER = Message("user", "Name a colour, an animal or a number.")


def prompt_probes() -> list[tuple[str, list[Message], list[Tool], bool | None]]:
    """(what it probes, messages, tools, thinking): conversations on which renderer and template must agree.

    Thinking stands only after the last user message, where every template keeps it.
    """
    system = Message("system", "You are a careful assistant.\n\nBe brief.")
    answer = Message("assistant", "It is done.")
    calls = (ToolCall("c1", "read_file", '{"path": "a b.txt"}'), ToolCall("c2", "run", '{"command": "ls \\"x\\"", "timeout": 5}'))
    called = Message("assistant", "I look.", (Thinking("Two things at once."),), calls)
    results = [Message("tool", "first\nline", tool_call_id="c1"), Message("tool", "", tool_call_id="c2")]
    return [
        ("a user message", [_USER], [], None),
        ("a system message", [system, _USER], [], None),
        ("text of other scripts and odd spaces", [Message("user", "  naïve 日本語 🙂\t<tag>&amp;\n\n")], [], None),
        ("history", [system, _USER, answer, Message("user", "Again.")], [], None),
        ("tools", [system, _USER], [_READ, _RUN], None),
        ("tools without a system message", [_USER], [_READ], None),
        ("parallel tool calls and results", [system, _USER, called, *results], [_READ, _RUN], None),
        ("thinking on", [_USER], [], True),
        ("thinking off", [_USER], [], False),
    ]


async def check(engine: Engine, path: Path | None, model: str) -> Report:
    """Checks mode `tokens` with `path`, mode `messages` without. Raises the engine's errors: one that is down has not been checked."""
    report = Report(trainable=False)
    if path is None and not engine.returns_tokens:
        report.problems.append(f"engine kind {engine.name} returns no ids with chat completions")
        return report
    asker = _Asker(engine, path, model)
    await _check_sampled(asker, report)
    if not report.problems:
        await _check_distribution(asker, report)
    if path is not None:
        await _check_prompts(engine, path, report)
    report.trainable = not report.problems
    return report


async def check_tools(engine: Engine, path: Path, tools: Sequence[Tool]) -> str | None:
    """Where renderer and engine part on this tool set; `None` if they agree or the engine can't tell."""
    return await _difference(engine, path, "these tools", [Message("system", "You are an agent."), _USER], tools, None)


class _Asker:
    """Asks the same question in either mode."""

    def __init__(self, engine: Engine, path: Path | None, model: str) -> None:
        self.engine = engine
        self.path = path
        self.model = model

    async def ask(self, prompt: str, sampling: Sampling, top: int) -> tuple[Generation, Ids | None]:
        """(generation, the ids that were sent as its prompt)."""
        messages = [Message("user", prompt)]
        if self.path is None:
            request = MessagesRequest(self.model, messages, (), ToolChoice(), sampling, top_logprobs=top)
            return (await self.engine.chat(request))[0], None
        ids = self.path.render_ids(messages, [], None)
        tokens = TokensRequest(self.model, ids, sampling, top_logprobs=top, return_prompt_ids=True)
        return (await self.engine.generate(tokens))[0], ids


async def _check_sampled(asker: _Asker, report: Report) -> None:
    generation, sent = await asker.ask(_USER.text, NEUTRAL, 0)
    if generation.untrainable is not None:
        report.problems.append(generation.untrainable)
        return
    assert generation.token_ids is not None
    report.facts["sampled"] = len(generation.token_ids)
    if generation.logprobs is None or bool(np.isnan(generation.logprobs).any()):
        report.problems.append("log-probabilities of sampled tokens are missing")
    elif len(generation.logprobs) and float(generation.logprobs.max()) > 1e-3:
        report.problems.append(f"a log-probability is positive: {float(generation.logprobs.max()):g}")
    if generation.completion_tokens != len(generation.token_ids):
        report.problems.append(f"{len(generation.token_ids)} ids came, {generation.completion_tokens} tokens are counted")
    if sent is not None and generation.prompt_ids is not None and not np.array_equal(sent, generation.prompt_ids):
        report.problems.append("the engine changed the prompt ids that it was sent")
    if sent is not None and generation.prompt_tokens not in (0, len(sent)):
        report.problems.append(f"{len(sent)} prompt ids were sent, the engine counts {generation.prompt_tokens}")


async def _check_distribution(asker: _Asker, report: Report) -> None:
    """Sets `report.logprobs`. What stays unknown is no problem at temperature 1 without truncation."""
    tempered: bool | None = None
    truncated: bool | None = None
    for prompt in (_USER.text, "Invent a name.", "Write one random word.", "x"):
        plain, _ = await asker.ask(prompt, NEUTRAL, 5)
        if tempered is None:
            half, _ = await asker.ask(prompt, replace(NEUTRAL, temperature=0.5), 5)
            tempered = _tempered(plain, half)
        if truncated is None:
            narrow, _ = await asker.ask(prompt, replace(NEUTRAL, top_p=0.05), 5)
            truncated = _truncated(plain, narrow)
        if tempered is not None and truncated is not None:
            break
    report.facts["temperature_in_logprobs"] = tempered
    report.facts["truncation_in_logprobs"] = truncated
    if tempered and truncated:
        report.logprobs = "processed"
    elif tempered:
        report.logprobs = "temperature"
    elif tempered is False:
        report.logprobs = "raw"


def _shared(first: Generation, second: Generation) -> Iterator[tuple[dict[int | str, float], dict[int | str, float]]]:
    """The alternatives of both at every position that has the same context in both."""
    if first.top is None or second.top is None or first.token_ids is None or second.token_ids is None:
        return
    for at, (one, two) in enumerate(zip(first.top, second.top, strict=False)):
        yield dict(one), dict(two)
        if at >= len(first.token_ids) or at >= len(second.token_ids) or first.token_ids[at] != second.token_ids[at]:
            return


def _tempered(plain: Generation, half: Generation) -> bool | None:
    for one, two in _shared(plain, half):
        names = [name for name in one if name in two and min(one[name], two[name]) > FLOOR]
        pairs = [(one[a] - one[b], two[a] - two[b]) for at, a in enumerate(names) for b in names[at + 1 :]]
        pairs = [pair for pair in pairs if abs(pair[0]) > FAR]
        if pairs:
            at_one, at_half = max(pairs, key=lambda pair: abs(pair[0]))
            return abs(at_half - 2 * at_one) < abs(at_half - at_one)
    return None


def _truncated(plain: Generation, narrow: Generation) -> bool | None:
    for one, two in _shared(plain, narrow):
        best = max(one, key=lambda name: one[name], default=None)
        if best is None or len(one) < 2 or one[best] > -FAR / 2:
            continue
        return all(value <= FLOOR for name, value in two.items() if name != best)
    return None


async def _check_prompts(engine: Engine, path: Path, report: Report) -> None:
    compared = 0
    for what, messages, tools, thinking in prompt_probes():
        theirs = await engine.tokenize(messages, tools, thinking=thinking)
        if theirs is None:
            report.facts["prompts"] = "the engine has no way to tell how it renders a prompt"
            return
        compared += 1
        difference = describe_difference(path, what, path.render_ids(messages, tools, thinking), theirs)
        if difference is not None:
            report.prompts_differ = difference
            report.problems.append(difference)
            return
    report.facts["prompts_compared"] = compared


async def _difference(
    engine: Engine, path: Path, what: str, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None
) -> str | None:
    theirs = await engine.tokenize(messages, tools, thinking=thinking)
    return None if theirs is None else describe_difference(path, what, path.render_ids(messages, tools, thinking), theirs)


def describe_difference(path: Path, what: str, ours: Ids, theirs: Ids) -> str | None:
    """Where two renderings of a prompt part, with the text around it; `None` if they are equal."""
    if np.array_equal(ours, theirs):
        return None
    shorter = min(len(ours), len(theirs))
    unequal = np.nonzero(ours[:shorter] != theirs[:shorter])[0]
    at = int(unequal[0]) if len(unequal) else shorter
    before = path.decode(ours[max(0, at - 12) : at])
    mine, other = path.decode(ours[at : at + 12]), path.decode(theirs[at : at + 12])
    return f"renderer and engine differ on {what} at token {at}: after {before!r} the renderer has {mine!r}, the engine {other!r}"
