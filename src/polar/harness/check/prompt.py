"""Reads a Qwen3 prompt back into what the model sees. Knows the chat template's own markers and nothing else.

The scripted model works from the prompt's text alone, as a real one would: whatever the gateway got wrong on the way (a lost
message, a tool that is not listed, a result in the wrong place), it sees.
"""

from __future__ import annotations

import json
import re

from polar.harness.check.scenario import Turn, View

_BLOCK = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TOOLS = re.compile(r"# Tools\n\nYou may call one or more functions.*?<tools>\n(.*)\n</tools>", re.DOTALL)
_RESPONSE = re.compile(r"\A\n?<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def read_prompt(text: str) -> View:
    """The conversation in a rendered prompt; its last, open assistant block is left out."""
    system, tools, turns = "", {}, []
    blocks = _BLOCK.findall(text)
    if blocks and blocks[-1][0] == "assistant" and not text.rstrip("\n").endswith("<|im_end|>"):
        blocks = blocks[:-1]
    for role, body in blocks:
        if role == "system":
            found = _TOOLS.search(body)
            if found is not None:
                for line in found[1].split("\n"):
                    function = json.loads(line)["function"]
                    tools[function["name"]] = function.get("parameters") or {}
                body = body[: found.start()]
            system += body
        elif role == "user":
            rest = body
            while (response := _RESPONSE.match(rest)) is not None:
                turns.append(Turn("tool", response[1]))
                rest = rest[response.end() :]
            if rest.strip():
                turns.append(Turn("user", rest))
        else:
            turns.append(Turn("assistant", body))
    return View(system, tools, turns)
