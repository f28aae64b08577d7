"""The dialogues that the tiny model learns from: a file task, the calls that do it under Pi's tools, and what the tools answer.

The words are ours; only the tools' names, arguments and answers are Pi's. Knows no tokens.
"""

from __future__ import annotations

import json
import random
from typing import Any

from polar.tasks.files import FileTask

JsonObject = dict[str, Any]
Call = tuple[str, JsonObject]

FAILURES: tuple[str, ...] = (
    "ENOENT: no such file or directory, access '{cwd}/{name}'",
    "Could not find the exact text in {name}. The old text must match exactly including all whitespace and newlines.",
    "cat: {name}: No such file or directory\n\n\nCommand exited with code 1",
)
DONE = "Done."


def calls(task: FileTask) -> list[tuple[Call, str]]:
    """The calls that do `task`, each with the answer that Pi's tool gives when it works."""
    words = task.words
    if task.family == "write":
        name = words[0]
        return [(("write", {"path": name, "content": task.expected[name]}), f"Successfully wrote to {name}")]
    if task.family == "edit":
        name, before, after = words[:3]
        arguments = {"path": name, "edits": [{"oldText": before, "newText": after}]}
        return [(("edit", arguments), f"Successfully replaced 1 block(s) in {name}.")]
    if task.family == "copy":
        return [(("bash", {"command": f"cp {words[0]} {words[1]}"}), "(no output)")]
    if task.family == "rename":
        return [(("bash", {"command": f"mv {words[0]} {words[1]}"}), "(no output)")]
    if task.family == "append":
        return [(("bash", {"command": f"echo {words[1]} >> {words[0]}"}), "(no output)")]
    if task.family == "carry":
        source, target = words[:2]
        text = task.files[source]
        return [
            (("read", {"path": source}), text),
            (("write", {"path": target, "content": text}), f"Successfully wrote to {target}"),
        ]
    if task.family == "second":
        name, _, second, _, after = words
        arguments = {"path": name, "edits": [{"oldText": second, "newText": after}]}
        return [(("read", {"path": name}), task.files[name]), (("edit", arguments), f"Successfully replaced 1 block(s) in {name}.")]
    raise ValueError(f"no calls are known for the family {task.family!r}")


def dialogue(task: FileTask, rng: random.Random, *, failures: float = 0.0) -> tuple[list[JsonObject], set[int]]:
    """Messages in Chat Completions form, from the user's on, and the indices of the assistant messages to learn.

    With probability `failures` a first call goes wrong (it is not learned) and the right one follows its error.
    """
    messages: list[JsonObject] = [{"role": "user", "content": task.instruction}]
    learned: set[int] = set()
    steps = calls(task)
    if rng.random() < failures:
        wrong_name = rng.choice(task.words)
        error = rng.choice(FAILURES).format(cwd=f"/tmp/{rng.choice(task.words)}", name=wrong_name)
        messages += _turn(("read", {"path": wrong_name}), error)
    for call, answer in steps:
        learned.add(len(messages))
        messages += _turn(call, answer)
    learned.add(len(messages))
    messages.append({"role": "assistant", "reasoning_content": "It worked.", "content": DONE})
    return messages, learned


def _turn(call: Call, answer: str) -> list[JsonObject]:
    name, arguments = call
    function = {"name": name, "arguments": arguments}
    return [
        {
            "role": "assistant",
            "reasoning_content": f"Use {name}.",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": answer},
    ]


def text_of(messages: list[JsonObject]) -> str:
    """A dialogue's text, for the tokenizer."""
    lines = []
    for message in messages:
        lines.append(f"{message['role']}\n{message['content']}")
        if message.get("reasoning_content"):
            lines.append(f"\n{message['reasoning_content']}\n\n\n")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            lines.append('\n{"name": "' + function["name"] + '", "arguments": ' + json.dumps(function["arguments"]) + "}\n")
    return "".join(lines)
