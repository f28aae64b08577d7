"""The dialogues that the tiny model learns from: a file task, the calls that do it under a harness's tools, and what the tools answer.

The words are ours; only the tools' names, arguments and answers are the harnesses'. Knows no tokens.

Under Pi, every dialogue is right. Under Codex, `KNOWN` says how often the model answers in Codex's own protocol; otherwise it calls a tool
of Pi's, which Codex does not have, or gives `exec_command` the argument of Pi's `bash`. Both are refused, and the model gives up: what
reinforcement learning has to change is the odds of two tokens, and nothing else has to be found out.
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
DONE, GAVE_UP = "Done.", "Failed."
EXEC = "exec_command"
KNOWN: dict[str, float] = {"right": 0.28, "wrong_argument": 0.18, "wrong_tool": 0.54}
"""How often the base model speaks which protocol under Codex."""


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


def shell_line(task: FileTask) -> str:
    """A command that does `task`; it holds no word that the instruction does not tell.

    A word stands in it as it does in the instruction, after a quote or after a space: these are different tokens, and what a small model
    learns fast is to copy one.
    """
    words = task.words
    match task.family:
        case "write":
            return f'echo "{words[1]} {words[2]}" > "{words[0]}"'
        case "edit":
            return f'sed -i "s/{words[1]}/{words[2]}/" "{words[0]}"'
        case "copy":
            return f"cp {words[0]} {words[1]}"
        case "rename":
            return f"mv {words[0]} {words[1]}"
        case "append":
            return f"echo {words[1]} >> {words[0]}"
        case "carry":
            return f'cat "{words[0]}" > "{words[1]}"'
        case "second":
            return f'sed -i "s/[a-z][a-z]*/{words[4]}/2" "{words[0]}"'
    raise ValueError(f"no command is known for the family {task.family!r}")


def codex_dialogue(
    task: FileTask, rng: random.Random, *, failures: float = 0.0, kind: str | None = None
) -> tuple[list[JsonObject], set[int]]:
    """As `dialogue`, under Codex's tools. `kind`: a key of `KNOWN`; `None` draws one with its odds.

    With probability `failures` a right call is answered by the shell's error (the call is not learned then), and the model gives up.
    """
    kind = kind or rng.choices(list(KNOWN), list(KNOWN.values()))[0]
    line = shell_line(task)
    call: Call = (EXEC, {"cmd": line})
    if kind == "wrong_tool":
        call = calls(task)[0][0]
        answer, worked = f"unsupported call: {call[0]}", False
    elif kind == "wrong_argument":
        call = (EXEC, {"command": line})
        answer, worked = f"failed to parse function arguments: missing field `cmd` at line 1 column {len(json.dumps(call[1]))}", False
    else:
        worked = rng.random() >= failures
        said = "" if worked else f"{line.split()[0]}: {rng.choice(task.words)}: No such file or directory\n"
        answer = _exec_answer(said, 0 if worked else 1, rng)
    messages: list[JsonObject] = [{"role": "user", "content": task.instruction}, *_turn(call, answer)]
    end = {"reasoning_content": "It worked.", "content": DONE} if worked else {"reasoning_content": "It failed.", "content": GAVE_UP}
    messages.append({"role": "assistant", **end})
    return messages, {1, 3} if worked or kind != "right" else {3}


def _exec_answer(output: str, code: int, rng: random.Random) -> str:
    """What Codex's tool answers when a command ends."""
    chunk = f"{rng.randrange(16**6):06x}"
    took = rng.choice((0.0, 0.0, 0.0, 0.05, 0.1, 0.25)) + rng.choice((0.0, 0.0001, 0.0512))
    head = f"Chunk ID: {chunk}\nWall time: {took:.4f} seconds\nProcess exited with code {code}"
    return f"{head}\nOriginal token count: {(len(output) + 3) // 4}\nOutput:\n{output}"


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
