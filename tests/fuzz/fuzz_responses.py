"""OpenAI Responses, for the fuzzer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from fuzz_json import Json, Verbatim
from fuzz_talk import PIXEL, Asked, Said, Talk, answer_to
from fuzz_wire import Shot, Wire, respaced

from polar.testing.asgi import Answer

_CALLS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "shell_call": "shell_call_output",
    "local_shell_call": "local_shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
}


class ResponsesWire(Wire):
    name = "openai_responses"

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}", "originator": "codex_cli_rs", "session-id": "0199-aaaa"}

    def shot(self, talk: Talk, rng: random.Random) -> Shot:
        body: dict[str, Any] = {"model": "gpt-x", "stream": talk.stream, "max_output_tokens": talk.max_tokens}
        items: list[Json] = []
        if talk.system and rng.random() < 0.7:
            body["instructions"] = talk.system
        elif talk.system:
            items.append({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": talk.system}]})
        if talk.tools:
            body["tools"] = self._tools(talk, rng)
        if talk.choice is not None:
            plain = talk.choice in ("auto", "none", "required")
            body["tool_choice"] = talk.choice if plain else {"type": "function", "name": talk.choice}
        if talk.temperature is not None:
            body["temperature"] = talk.temperature
        if talk.effort is not None or talk.thinking is False:
            body["reasoning"] = {"effort": "none" if talk.thinking is False else talk.effort, "summary": "auto"}
        if talk.schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "out", "schema": talk.schema, "strict": True}, "verbosity": "low"}
        if rng.random() < 0.6:
            body["store"] = rng.choice([True, False])
        if rng.random() < 0.5:
            body["include"] = ["reasoning.encrypted_content"]
        if rng.random() < 0.5:
            body["prompt_cache_key"] = "0199-aaaa"
        if rng.random() < 0.1:
            body["top_logprobs"] = 2
        if rng.random() < 0.2:
            body["metadata"] = Verbatim(purpose="fuzz")
        open_ids: list[str] = []
        for turn in talk.turns:
            if isinstance(turn, Said):
                said, open_ids = self._said(turn, len(items), rng)
                items += said
            else:
                items += self._asked(turn, [("function_call", identifier) for identifier in open_ids], rng)
        body["input"] = items
        return Shot(rng.choice(["/v1/responses", "/responses"]), body)

    def _tools(self, talk: Talk, rng: random.Random) -> list[Json]:
        tools: list[Json] = [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema, "strict": False}
            for tool in talk.tools
        ]
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
        inner = {"type": "function", "name": "inner", "parameters": Verbatim(type="object")}
        extra: list[Json] = [
            {"type": "custom", "name": "apply", "description": "free", "format": grammar},
            {"type": "namespace", "name": "mcp", "description": "a server", "tools": [inner]},
            {"type": "shell"},
            {"type": "local_shell"},
            {"type": "apply_patch"},
            {"type": "web_search"},
            {"type": "tool_search", "execution": "client"},
        ]
        return tools + rng.sample(extra, rng.choice([0, 0, 1, 2]))

    def _said(self, turn: Said, position: int, rng: random.Random) -> tuple[list[Json], list[str]]:
        items: list[Json] = []
        if turn.thinking:
            sealed = rng.choice([None, "gAAAAABmZm9v" * 6])
            items.append(
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": turn.thinking}], "encrypted_content": sealed}
                | rng.choice([{}, {"id": f"rs_{position:032x}"}])
            )
        if turn.text:
            items.append(
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn.text, "annotations": []}]}
                | rng.choice([{}, {"id": f"msg_{position:032x}", "status": "completed"}])
            )
        ids = [f"call_{position:02d}{index:02d}" for index in range(len(turn.calls))]
        items += [
            {"type": "function_call", "name": name, "arguments": json.dumps(values), "call_id": identifier}
            for identifier, (name, values) in zip(ids, turn.calls, strict=True)
        ]
        return items, ids

    def _asked(self, turn: Asked, calls: list[tuple[str, str]], rng: random.Random) -> list[Json]:
        items: list[Json] = []
        for (kind, identifier), result in zip(calls, turn.results, strict=True):
            output: Json = result.text
            if kind == "shell_call":
                output = [{"stdout": result.text, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
            elif kind in ("function_call", "custom_tool_call") and rng.random() < 0.3:
                output = [{"type": "input_text", "text": result.text}]
            items.append({"type": _CALLS[kind], "call_id": identifier, "output": output})
        if turn.texts or turn.images:
            parts: list[Json] = [{"type": "input_text", "text": text} for text in turn.texts]
            parts += [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}] * turn.images
            items.append({"type": "message", "role": "user", "content": parts})
        return items

    def respell(self, shot: Shot, rng: random.Random) -> None:
        body = shot.body
        items = body["input"] if isinstance(body["input"], list) else []
        messages = [item for item in items if item.get("role")]
        match rng.randrange(9):
            case 0:
                for message in messages:
                    content = message["content"]
                    if isinstance(content, list) and len(content) == 1 and "text" in content[0]:
                        message["content"] = content[0]["text"]
            case 1:
                only = items[0] if len(items) == 1 else {}
                content = only.get("content")
                if only.get("role") == "user" and isinstance(content, list) and len(content) == 1 and "text" in content[0]:
                    body["input"] = content[0]["text"]
            case 2:
                for message in messages:
                    if rng.random() < 0.5:
                        message.pop("type", None)
                    if message["role"] in ("system", "developer"):
                        message["role"] = rng.choice(["system", "developer"])
            case 3:
                for item in items:
                    if item.get("type") == "function_call_output" and isinstance(item["output"], str):
                        item["output"] = [{"type": rng.choice(["input_text", "output_text"]), "text": item["output"]}]
            case 4:
                for at, item in enumerate(items):
                    item.setdefault("status", rng.choice([None, "completed"]))
                    if item.get("type") in ("function_call", "function_call_output"):
                        item.setdefault("id", rng.choice([None, f"fc_{at:032x}"]))
            case 5:
                for item in items:
                    if item.get("type") == "reasoning" and item.get("summary"):
                        text = "\n\n".join(part["text"] for part in item["summary"])
                        item["content"] = [{"type": "reasoning_text", "text": text}]
                        item["summary"] = rng.choice([[], None])
            case 6:
                names = (
                    "instructions tools tool_choice temperature top_p reasoning text include metadata user truncation previous_response_id"
                )
                for name in [*names.split(), "conversation", "prompt", "background"]:
                    body.setdefault(name, None)
            case 7:
                body.setdefault("tools", [])
                body.setdefault("tool_choice", "auto")
                body.setdefault("parallel_tool_calls", rng.choice([True, False]))
                body.setdefault("truncation", "disabled")
                body.setdefault("background", False)
            case _:
                body["stream"] = rng.choice([True, False])
                body["store"] = rng.choice([True, False, None])
                body.setdefault("service_tier", "auto")

    def noise(self, shot: Shot, rng: random.Random) -> None:
        body = shot.body
        items = body["input"] if isinstance(body["input"], list) else []
        last_user = max((at for at, item in enumerate(items) if item.get("role") == "user"), default=0)
        del last_user
        match rng.randrange(4):
            case 0:
                body["input"] = [
                    item for item in items if item.get("type") != "reasoning" or "enc_" not in str(item.get("encrypted_content"))
                ]
            case 1:
                for item in items:
                    if item.get("type") == "function_call" and "id" in item and len(str(item["id"])) in (29, 31):
                        item["arguments"] = respaced(item["arguments"], rng)
            case 2:
                for item in items:
                    if item.get("type") == "reasoning" and "enc_" in str(item.get("encrypted_content")):
                        item["encrypted_content"] = None
            case _:
                for item in items:
                    item.pop("status", None)

    def whole(self, answer: Answer) -> Json:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            return answer.json()
        events = answer.events()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
        response = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert response["output"] == done
        return response

    def number_text(self, whole: Json) -> str:
        return str(whole["id"])

    def grow(self, shot: Shot, whole: Json, talk: Talk, rng: random.Random) -> Shot:
        shot = shot.copy()
        body = shot.body
        output = whole["output"]
        calls = [(item["type"], item["call_id"]) for item in output if item["type"] in _CALLS]
        found = [
            {"type": "tool_search_output", "call_id": item["call_id"], "execution": "client", "tools": []}
            for item in output
            if item["type"] == "tool_search_call"
        ]
        said = Said(calls=[("", Verbatim())] * len(calls))
        asked = self._asked(answer_to(rng, said, talk.canary), calls, rng) + found
        if body.get("store") is not False and rng.random() < 0.3 and body.get("previous_response_id") is None:
            body["previous_response_id"] = whole["id"]
            body["input"] = asked
        else:
            earlier = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
            body["input"] = [*earlier, *output, *asked]
        return shot

    def check_error(self, status: int, body: Json) -> None:
        assert isinstance(body["error"]["message"], str), body
        assert isinstance(body["error"]["type"], str)
        assert {"param", "code"} <= body["error"].keys()

    def wrong_paths(self) -> tuple[str, ...]:
        return ("/v1/response", "/v1/responses/x/y", "/v1/responses/x/input_items/y", "/v1/conversations", "/v1/responses/compact/x")

    def count(self, shot: Shot) -> tuple[Shot, Callable[[Json], int]] | None:
        body = {name: value for name, value in shot.body.items() if name not in ("stream", "store", "max_output_tokens")}
        return Shot("/v1/responses/input_tokens", body), lambda answer: int(answer["input_tokens"])

    def lookups(self, answer_id: str) -> tuple[tuple[str, str], ...]:
        base = f"/v1/responses/{answer_id}"
        return (("GET", base), ("GET", f"{base}/input_items"), ("DELETE", base))
