"""Plays held-out tasks with the model as a harness would, tools and all, in a few lines of PyTorch: the number that the training is for.

The tools are small stand-ins with the answers of Pi's and Codex's; the true measure is the real CLI (`polar demo`).
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from data import Harness, prefix_ids, random_day, random_paths, renderer
from transformers import DynamicCache, Qwen3ForCausalLM

from polar.tasks.files import FileTask, instances

MAX_TURNS, MAX_TOKENS = 5, 96


def run_tool(name: str, arguments: dict[str, Any], folder: Path) -> str:
    """What Pi's tool answers; raises `KeyError`, `TypeError` or `OSError` where the call is wrong."""
    if name == "write":
        (folder / arguments["path"]).write_text(arguments["content"])
        return f"Successfully wrote to {arguments['path']}"
    if name == "read":
        return (folder / arguments["path"]).read_text() or "(no tool output)"
    if name == "edit":
        path = folder / arguments["path"]
        text = path.read_text()
        for change in arguments["edits"]:
            if text.count(change["oldText"]) != 1:
                return f"Could not find the exact text in {arguments['path']}."
            text = text.replace(change["oldText"], change["newText"])
        path.write_text(text)
        return f"Successfully replaced {len(arguments['edits'])} block(s) in {arguments['path']}."
    if name == "bash":
        done = subprocess.run(["bash", "-c", arguments["command"]], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
        text = (done.stdout + done.stderr).strip("\n")
        return text + f"\n\n\nCommand exited with code {done.returncode}" if done.returncode else text or "(no output)"
    raise KeyError(f"Tool {name} not found")


def run_codex_tool(name: str, arguments: dict[str, Any], folder: Path) -> str:
    """What Codex's tool answers; never raises."""
    if name != "exec_command":
        return f"unsupported call: {name}"
    if not isinstance(arguments.get("cmd"), str):
        return f"failed to parse function arguments: missing field `cmd` at line 1 column {len(json.dumps(arguments))}"
    done = subprocess.run(["bash", "-c", arguments["cmd"]], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    text = done.stdout + done.stderr
    head = f"Chunk ID: 5ca1ab\nWall time: 0.0000 seconds\nProcess exited with code {done.returncode}"
    return f"{head}\nOriginal token count: {(len(text) + 3) // 4}\nOutput:\n{text}"


TOOLS = {"pi": run_tool, "codex": run_codex_tool}


def passed(task: FileTask, folder: Path) -> bool:
    found = {path.name: path.read_text().rstrip("\n") for path in folder.iterdir()}
    return found == dict(task.expected)


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM, cache: DynamicCache, ids: list[int], stop: int, temperature: float, draw: torch.Generator
) -> list[int]:
    """Samples one answer after `ids`; `cache` holds what came before and grows."""
    sampled: list[int] = []
    feed = torch.tensor([ids])
    while len(sampled) < MAX_TOKENS:
        logits = model(input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        token = int(logits.argmax()) if temperature == 0 else int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw))
        sampled.append(token)
        feed = torch.tensor([[token]])
        if token == stop:
            model(input_ids=feed, past_key_values=cache, use_cache=True)
            break
    return sampled


def play(
    model: Qwen3ForCausalLM,
    tokenizer: Any,
    name: str,
    task: FileTask,
    start: DynamicCache,
    temperature: float,
    draw: torch.Generator,
    log: bool,
) -> bool:
    """One session under the tools of the harness `name`; `start` holds its prompt and is left as it was."""
    render = renderer(tokenizer)
    stop = render.get_stop_token_ids()[0]
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(start.layers):
        cache.update(layer.keys, layer.values, index)
    opening = render.render([{"role": "user", "content": task.instruction}], add_generation_prompt=True)
    history, feed = list(opening.token_ids), list(opening.token_ids)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for path, text in task.files.items():
            (folder / path).write_text(text)
        for _ in range(MAX_TURNS):
            sampled = generate(model, cache, feed, stop, temperature, draw)
            if log:
                print(repr(tokenizer.decode(sampled)))
            answer = render.parse_response(sampled, tools=None)
            if not answer.tool_calls or sampled[-1] != stop:
                break
            replies = []
            for call in answer.tool_calls:
                try:
                    arguments = call.arguments if isinstance(call.arguments, dict) else json.loads(call.arguments or "")
                    replies.append(TOOLS[name](call.name or "", arguments, folder))
                except (KeyError, TypeError, AttributeError, ValueError, OSError, subprocess.SubprocessError) as error:
                    replies.append(str(error))
            bridged = render.bridge_to_next_turn(history, sampled, [{"role": "tool", "content": reply} for reply in replies])
            if bridged is None:
                break
            feed = list(bridged.token_ids[len(history) + len(sampled) :])
            history = list(bridged.token_ids)
        return passed(task, folder)


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: Any, harness: Harness, family: str, *, count: int, temperature: float, seed: int, log: bool = False
) -> float:
    """The share of `count` held-out instances of `family` that the model does."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    ids = prefix_ids(renderer(tokenizer), harness, *random_paths(rng), random_day(rng))
    start = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.model(input_ids=torch.tensor([ids]), past_key_values=start, use_cache=True)
    stream = instances(seed, held_out=True, families=(family,))
    return sum(play(model, tokenizer, harness.name, next(stream), start, temperature, draw, log) for _ in range(count)) / count
