"""What the scripted model says: a coding task in seven steps that any CLI with a shell tool can be led through.

Knows no tokens, no wire and no particular CLI. `decide` is a pure function of what the model sees, so that retries, side
calls, sub-agents running beside the main loop and a compaction in the middle need no state of ours. Progress is read from the tool
results (`step-3-done`), which a summary repeats; that keeps a compaction from sending the script back to its start.

    step 1  one shell call, text before it                    alpha.txt
    step 2  two shell calls in parallel                       beta-1.txt, beta-2.txt
    step 3  a sub-agent that makes one shell call, where the CLI has one (else a shell call)   delta.txt
    step 4  a shell call with a long output (`Abilities.listings`)
    step 5  another one, which drives the conversation over its limit: compaction
    step 6  a shell call                                      gamma.txt
            the engine refuses one call, which cuts the run right after a tool result (`Abilities.cut`), or the model stops
            early, and the CLI itself asks it to go on (`nudge`)
    step 7  a user message has come after a tool result       omega.txt
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polar.chat import JsonObject

PART_ONE = "POLAR-PART-ONE"
PART_TWO = "POLAR-PART-TWO"
SUB = "POLAR-SUB-TASK"
CUT = "polar check: this call is refused on purpose"
NUDGE = "Next, I will do the last step."
DONE = "The exercise is finished."

PROMPT_ONE = f"{PART_ONE}: do the exercise in this folder, one step after the other, and say so when it is finished."
PROMPT_TWO = f"{PART_TWO}: now do the last step of the exercise as well."
SUB_PROMPT = f"{SUB}: write the file delta.txt and report."

ALPHA = 'Grüße aus 東京: "naïve café" \\ 🚀'
FILES: Mapping[str, str] = {
    "alpha.txt": ALPHA + "\n",
    "beta-1.txt": "beta 1\n",
    "beta-2.txt": "beta 2\n",
    "delta.txt": "delta\n",
    "gamma.txt": "gamma\n",
    "omega.txt": "omega\n",
}
"""What must be on disk when the run is over."""

LISTING_LINES = 400

_SHELLS = ("exec_command", "run_shell_command", "Bash", "bash", "shell")
_AGENTS = ("spawn_agent", "invoke_agent", "Agent", "agent", "task")
_WAITS = ("wait_agent",)
_COMPACTIONS = (
    "context checkpoint compaction",
    "respond with text only",
    "<state_snapshot>",
    "context summarization assistant",
    "context summarization agent",
)
_NEXT_SPEAKER = "who should logically speak next"
_STEP = re.compile(r"step-(\d)-done")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the model sees it; an assistant's text holds its calls as well, as they were sampled."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class View:
    """A prompt, read back: `tools` maps a name to its parameters' schema."""

    system: str
    tools: Mapping[str, JsonObject]
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class Say:
    """The model's answer; `error` instead makes the engine refuse the call (HTTP 400)."""

    thinking: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this run is meant to exercise; switched off where a CLI has no such thing."""

    sub_agent: bool = True
    cut: bool = True
    """Refuse the call after step 6. Without it the model stops there with a text that asks to be nudged."""
    listings: tuple[int, ...] = (4, 5)
    """The steps (of 4, 5 and 7) that print a long listing."""
    submit: str | None = None
    """A shell command that ends the run, where a plain answer does not."""


EVERYTHING = Abilities()


def decide(view: View, abilities: Abilities = EVERYTHING) -> Say:
    """The answer to a prompt."""
    if _is_compaction(view):
        return _summary(view)
    if view.turns and _NEXT_SPEAKER in view.turns[-1].text:
        last = next((turn.text for turn in reversed(view.turns) if turn.role == "assistant"), "")
        return Say(text=json.dumps({"reasoning": "by its last words", "next_speaker": "model" if NUDGE in last else "user"}))
    shell = tool_named(view.tools, _SHELLS)
    if shell is None:
        return Say(text="Polar check")
    last_user = next((turn.text for turn in reversed(view.turns) if turn.role == "user" and _has_marker(turn.text)), "")
    if SUB in last_user and PART_ONE not in last_user:
        return _sub_agent(view, shell)
    return _main(view, shell, abilities)


def _main(view: View, shell: str, abilities: Abilities) -> Say:
    done = progress(view)
    agent = tool_named(view.tools, _AGENTS) if abilities.sub_agent else None
    second_part = _second_part(view)
    if done == 0:
        return Say(
            "The user wants an exercise.\nStep 1 first.", "I will start with step 1.\n", (_run(view, shell, _write(1, "alpha.txt", ALPHA)),)
        )
    if done == 1:
        calls = tuple(_run(view, shell, _write(2, f"beta-{number}.txt", f"beta {number}")) for number in (1, 2))
        return Say("Two files that do not depend on each other: both at once.", "  \n", calls)
    if done == 2:
        return _step_three(view, shell, agent)
    if done in (3, 4):
        command = _mark(done + 1) + (_listing(done + 1) if done + 1 in abilities.listings else "")
        return Say("A long listing may come next.", "", (_run(view, shell, command),))
    if done == 5:
        return Say("Step 6.", "Now step 6.", (_run(view, shell, _write(6, "gamma.txt", "gamma")),))
    if done == 6 and not second_part:
        return Say(error=CUT) if abilities.cut else Say("All steps but one are done.", f" \n{NUDGE} \n")
    if done == 6:
        command = _write(7, "omega.txt", "omega") + (_listing(7) if 7 in abilities.listings else "")
        return Say("One more step was asked for.", "", (_run(view, shell, command),))
    if abilities.submit is not None:
        return Say("Nothing is left to do.", f"\n {DONE}\n", (_run(view, shell, abilities.submit),))
    return Say("Nothing is left to do.", f"\n {DONE}\n")


def _second_part(view: View) -> bool:
    """Whether a person or the CLI has asked to go on, after the sixth step."""
    at = max((index for index, turn in enumerate(view.turns) if turn.role == "tool" and _marker(6) in turn.text), default=len(view.turns))
    return any(turn.role == "user" and (index > at or PART_TWO in turn.text) for index, turn in enumerate(view.turns))


def _step_three(view: View, shell: str, agent: str | None) -> Say:
    if agent is None:
        return Say("No sub-agents here.", "", (_run(view, shell, _write(3, "delta.txt", "delta")),))
    asked = [turn.text for turn in view.turns if turn.role == "assistant" and SUB in turn.text]
    if not asked:
        return Say("A sub-agent can do step 3.", "I hand step 3 to a sub-agent.", (_delegate(view, agent),))
    wait = tool_named(view.tools, _WAITS)
    if wait is None:
        return Say("It runs in the background.", "I wait for the sub-agent's report.")
    waits = sum(wait in turn.text for turn in view.turns if turn.role == "assistant")
    if waits > 5:
        return Say("No report.", "The sub-agent never reported.")
    ids = re.findall(r'"(?:agent_id|task_name)"\s*:\s*"([^"]+)"', "\n".join(turn.text for turn in view.turns if turn.role == "tool"))
    return Say("Wait for it.", "", (Call(wait, _fill(view.tools[wait], {"targets": ids, "timeout_ms": 20_000})),))


def _sub_agent(view: View, shell: str) -> Say:
    start = max(index for index, turn in enumerate(view.turns) if turn.role == "user" and SUB in turn.text)
    results = [turn.text for turn in view.turns[start:] if turn.role == "tool"]
    report = f"The sub-agent is done: {_marker(3)}."
    if not any("sub-done" in text for text in results):
        command = "printf '%s\\n' 'delta' > delta.txt && printf 'sub-%s\\n' done"
        return Say("I am the sub-agent.", "", (_run(view, shell, command),))
    complete = tool_named(view.tools, ("complete_task",))
    if complete is not None and not any(turn.role == "assistant" and "complete_task" in turn.text for turn in view.turns[start:]):
        return Say("Report.", "", (Call(complete, _fill(view.tools[complete], {"result": {"response": report}})),))
    return Say("Report.", report)


def _summary(view: View) -> Say:
    seen = view.system + "".join(turn.text for turn in view.turns)
    task = SUB if SUB in seen and PART_ONE not in seen else PART_ONE
    body = f"{_marker(progress(view))}. The exercise of {task} goes on with the next step."
    text = f"<analysis>\nProgress so far.\n</analysis>\n<summary>\n{body}\n</summary>"
    if "<state_snapshot>" in view.system + "".join(turn.text for turn in view.turns[-1:]):
        text = f"<state_snapshot>\n{body}\n</state_snapshot>"
    return Say("I have to sum up.", text)


def progress(view: View) -> int:
    """The last step that is known to be done, 0 to 7."""
    return max((int(number) for turn in view.turns if turn.role != "system" for number in _STEP.findall(turn.text)), default=0)


def tool_named(tools: Mapping[str, JsonObject], names: Sequence[str]) -> str | None:
    """The first tool with one of these names, a namespace before it allowed."""
    for name in names:
        for tool in tools:
            if tool == name or re.search(rf"(?:__|[.:/]){re.escape(name)}$", tool):
                return tool
    return None


def _has_marker(text: str) -> bool:
    return PART_ONE in text or PART_TWO in text or SUB in text


def _is_compaction(view: View) -> bool:
    last = view.turns[-1] if view.turns else Turn("user", "")
    heads = view.system[:400].lower(), last.text.lower() if last.role == "user" else ""
    return any(pattern in head for head in heads for pattern in _COMPACTIONS)


def _marker(step: int) -> str:
    return f"step-{step}-done"


def _mark(step: int) -> str:
    """A command that prints the marker without containing it."""
    return f"printf 'step-%d-done\\n' {step}"


def _write(step: int, name: str, content: str) -> str:
    return f"printf '%s\\n' '{content}' > {name} && {_mark(step)}"


def _listing(step: int) -> str:
    return f" && seq -f 'line %g of the long listing of step {step}' 1 {LISTING_LINES}"


def _run(view: View, shell: str, command: str) -> Call:
    schema = view.tools[shell]
    key = "cmd" if "cmd" in schema.get("properties", {}) else "command"
    return Call(shell, _fill(schema, {key: command}, extra={"description": "Run a step of the exercise"}))


def _delegate(view: View, agent: str) -> Call:
    properties = view.tools[agent].get("properties", {})
    given: JsonObject = {}
    for key in ("prompt", "message", "objective", "task"):
        if key in properties:
            given[key] = SUB_PROMPT
            break
    extra: JsonObject = {
        "description": "Write delta.txt",
        "subagent_type": "general-purpose",
        "agent_name": "generalist",
        "task_name": "delta",
    }
    kind = properties.get("subagent_type", {})
    if agent == "task":
        extra["subagent_type"] = "general"
    if isinstance(kind, dict) and kind.get("enum"):
        extra["subagent_type"] = kind["enum"][0]
    return Call(agent, _fill(view.tools[agent], given, extra=extra))


def _fill(schema: JsonObject, given: JsonObject, *, extra: JsonObject | None = None) -> JsonObject:
    """`given`, then `extra` where the schema knows the key, then any required key that is still missing."""
    properties = schema.get("properties", {})
    arguments = {key: value for key, value in given.items() if key in properties or not properties}
    arguments |= {key: value for key, value in (extra or {}).items() if key in properties}
    for key in schema.get("required", ()):
        arguments.setdefault(key, _default(properties.get(key, {})))
    return arguments


def _default(schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type") if isinstance(schema, dict) else None
    defaults: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    return defaults.get(kind, "polar check") if isinstance(kind, str) else "polar check"
