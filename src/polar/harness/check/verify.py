"""Judges a captured session against the laws, from the records alone. Pure: no store, no gateway, no process.

What continues what is decided here anew, by comparing messages, and not taken from the gateway: an answer that its caller echoes with
other whitespace or other JSON spacing is the same answer; anything else that differs is an edit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polar.chat import Message
from polar.harness.base import Harness
from polar.harness.check.plan import Plan
from polar.records import Completion, Mode
from polar.testing import fake_logprob

RenderNew = Callable[[Sequence[Message], bool | None], list[int]]
"""Renders new messages (all after an assistant's end token) and the generation prompt with the model's own template, as ids."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A turn (`call`) that does not extend the one it continues (`parent`): its prompt differs from token `position` on, `lost` of the
    parent's tokens are not reused. `why` is the recorded detail."""

    call: int
    parent: int
    cause: str
    position: int
    lost: int
    why: str


@dataclass(slots=True)
class Findings:
    """`extended`: turns whose prompt is their parent's ids plus new ones. `broken`: turns that should have been and are not."""

    completions: int = 0
    conversations: int = 0
    extended: int = 0
    broken: list[Broken] = field(default_factory=list)
    roles: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def causes(self) -> Counter[str]:
        return Counter(item.cause for item in self.broken)


def judge(completions: Sequence[Completion], harness: Harness, plan: Plan, mode: Mode, bridging: bool, render_new: RenderNew) -> Findings:
    """Everything that can be said of one session's records."""
    found = Findings(completions=len(completions))
    complete = [item for item in completions if item.status == "complete"]
    for item in complete:
        _check_capture(item, mode, found)
        found.roles[harness.tag(item).role] += 1
        if not harness.explains(item):
            found.problems.append(f"call {item.number} is not explained: {harness.name} would deny that it made it")
    after_tool = 0
    for index, item in enumerate(complete):
        parent = expected_parent(item, complete[:index])
        if parent is None:
            found.conversations += 1
            if item.parent is not None and item.broken is None:
                found.problems.append(f"call {item.number} is joined to call {item.parent}, which it does not continue")
            continue
        new = item.messages[len(parent.messages) + 1 :]
        if not extends(item, parent):
            _check_break(item, parent, new, mode, bridging, found)
            continue
        found.extended += 1
        if mode == "tokens" and bridging:
            _check_suffix(item, parent, new, render_new, found)
        if any(message.role == "user" for message in new) and any(m.role == "tool" for m in (*parent.messages, *new)):
            after_tool += 1
    if mode == "tokens" and bridging:
        _check_coverage(complete, plan, after_tool, found)
    _check_roles(plan, found)
    return found


def expected_parent(item: Completion, earlier: Sequence[Completion]) -> Completion | None:
    """The call with the longest history that this one repeats and continues, answer included, from the same root."""
    fitting = [known for known in earlier if known.root == item.root and known.ended <= item.started and _continues(item, known)]
    return max(fitting, key=lambda known: (len(known.messages), known.number), default=None)


def extends(item: Completion, parent: Completion) -> bool:
    """Whether `item.prompt_ids` starts with exactly `parent.prompt_ids + parent.sampled_ids`."""
    before, prompt = parent.ids, item.prompt_ids
    return before is not None and prompt is not None and len(before) <= len(prompt) and bool(np.array_equal(prompt[: len(before)], before))


def _continues(item: Completion, earlier: Completion) -> bool:
    history = (*earlier.messages, earlier.answer)
    if len(item.messages) <= len(history):
        return False
    return all(_same(mine, theirs) for mine, theirs in zip(item.messages, history, strict=False))


def _same(left: Message, right: Message) -> bool:
    if left.role != right.role:
        return False
    if left.role != "assistant":
        return left.content == right.content
    return left.text.strip() == right.text.strip() and _calls(left) == _calls(right)


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, _parsed(call.arguments)) for call in message.tool_calls]


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _check_capture(item: Completion, mode: Mode, found: Findings) -> None:
    where = f"call {item.number}"
    if item.mode != mode and not _forced(item):
        found.problems.append(f"{where} ran in mode {item.mode}")
    if item.prompt_ids is None or item.sampled_ids is None or item.logprobs is None:
        found.problems.append(f"{where} has no ids or no log-probabilities")
        return
    if len(item.logprobs) != len(item.sampled_ids) or not len(item.sampled_ids) or not len(item.prompt_ids):
        found.problems.append(f"{where}: {len(item.sampled_ids)} sampled ids, {len(item.logprobs)} log-probabilities")
        return
    wanted = np.asarray([fake_logprob(int(token), at) for at, token in enumerate(item.sampled_ids)], dtype=np.float32)
    if not np.array_equal(wanted, item.logprobs):
        found.problems.append(f"{where}: log-probabilities are not those of the sampled tokens")


def _forced(item: Completion) -> bool:
    """Whether the caller forces a tool: only the engine can, so such a call goes to it as messages whatever the mode."""
    return item.asked.get("tool_choice") not in (None, "auto", "none")


def _check_break(item: Completion, parent: Completion, new: Sequence[Message], mode: Mode, bridging: bool, found: Findings) -> None:
    if item.broken is None:
        found.problems.append(f"call {item.number} does not extend call {parent.number}, and no cause is named")
        return
    cause = item.broken.cause.value
    found.broken.append(Broken(item.number, parent.number, cause, item.broken.position, item.broken.lost, item.broken.detail))
    refused = any(message.role == "assistant" for message in new)
    if mode == "tokens" and bridging and not refused:
        found.problems.append(f"call {item.number} does not extend call {parent.number}: {cause}")


def _check_suffix(item: Completion, parent: Completion, new: Sequence[Message], render_new: RenderNew, found: Findings) -> None:
    before, prompt = parent.ids, item.prompt_ids
    suffix = prompt[len(before) :].tolist() if before is not None and prompt is not None else None
    wanted = render_new(new, item.asked.get("thinking"))
    if suffix != wanted:
        found.problems.append(f"call {item.number}: what follows call {parent.number} is not the template's rendering of the new messages")


def _check_coverage(complete: Sequence[Completion], plan: Plan, after_tool: int, found: Findings) -> None:
    """The exercise really took place: otherwise every check above could pass on nothing."""
    if not any(len(item.answer.tool_calls) >= 2 for item in complete):
        found.problems.append("no turn with two tool calls in parallel")
    if not any(item.answer.reasoning for item in complete):
        found.problems.append("no thinking was captured")
    if found.extended < 5:
        found.problems.append(f"only {found.extended} turns extend another one; five are wanted")
    if after_tool == 0:
        found.problems.append("no user message after a tool result within a conversation")


def _check_roles(plan: Plan, found: Findings) -> None:
    if plan.sub_agent and found.roles["sub_agent"] < 2:
        found.problems.append(f"{found.roles['sub_agent']} calls are tagged as a sub-agent's; two are wanted")
    if plan.compaction and found.roles["compaction"] < 1:
        found.problems.append("no call is tagged as a compaction")
