"""Google's generateContent, for the fuzzer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import orjson
from fuzz_json import Json, Verbatim, open_objects
from fuzz_talk import PIXEL, Asked, Said, Talk, answer_to
from fuzz_wire import Shot, Wire, swap

from polar.testing.asgi import Answer


class GoogleWire(Wire):
    name = "google"

    def headers(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key, "x-goog-api-client": "google-genai-sdk/1.30.0 gl-node/v22"}

    def shot(self, talk: Talk, rng: random.Random) -> Shot:
        body: dict[str, Any] = {}
        if talk.system:
            body["systemInstruction"] = {"role": "user", "parts": [{"text": talk.system}]}
        if talk.tools:
            body["tools"] = [{"functionDeclarations": [self._tool(tool, rng) for tool in talk.tools]}]
            if rng.random() < 0.1:
                body["tools"].append({"googleSearch": {}})
        if talk.choice is not None:
            modes = {"auto": "AUTO", "none": "NONE"}
            calling: dict[str, Any] = {"mode": modes.get(talk.choice, "ANY")}
            if talk.choice == talk.tools[0].name:
                calling["allowedFunctionNames"] = [talk.choice]
            body["toolConfig"] = {"functionCallingConfig": calling}
        config: dict[str, Any] = {"maxOutputTokens": talk.max_tokens}
        if talk.temperature is not None:
            config["temperature"] = talk.temperature
        if talk.stop:
            config["stopSequences"] = talk.stop
        if talk.thinking is not None:
            config["thinkingConfig"] = {"thinkingBudget": 1024 if talk.thinking else 0, "includeThoughts": True}
        elif talk.effort is not None:
            config["thinkingConfig"] = {"thinkingLevel": talk.effort.upper(), "includeThoughts": rng.random() < 0.5}
        if talk.schema is not None:
            config |= {"responseMimeType": "application/json", "responseJsonSchema": talk.schema}
        if rng.random() < 0.05:
            config["candidateCount"] = 2
        if rng.random() < 0.1:
            config |= {"responseLogprobs": True, "logprobs": 2}
        body["generationConfig"] = config
        body["safetySettings"] = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]
        contents: list[Json] = []
        names: list[tuple[str, str | None]] = []
        for turn in talk.turns:
            if isinstance(turn, Said):
                parts, names = self._said(turn, len(contents), rng)
                contents.append({"role": "model", "parts": parts})
            else:
                contents.append({"role": "user", "parts": self._asked(turn, names)})
        body["contents"] = contents
        return Shot(self._url(talk.stream, rng), body)

    def _url(self, stream: bool, rng: random.Random) -> str:
        model = rng.choice(["models/gemini-x", "models/org/name:tag", "publishers/google/models/gemini-x", "tunedModels/mine"])
        action = "streamGenerateContent" + rng.choice(["?alt=sse", "?alt=sse", ""]) if stream else "generateContent"
        return f"/{rng.choice(['v1', 'v1beta'])}/{model}:{action}"

    def _tool(self, tool: Any, rng: random.Random) -> Json:
        declaration: dict[str, Any] = {"name": tool.name, "parametersJsonSchema": tool.schema}
        if tool.description is not None:
            declaration["description"] = tool.description
        return declaration

    def _said(self, turn: Said, position: int, rng: random.Random) -> tuple[list[Json], list[tuple[str, str | None]]]:
        parts: list[Json] = []
        if turn.thinking:
            parts.append({"text": turn.thinking, "thought": True} | rng.choice([{}, {"thoughtSignature": "CpwBAdHtim9v" * 4}]))
        if turn.text:
            parts.append({"text": turn.text})
        ids = rng.random() < 0.5
        names: list[tuple[str, str | None]] = []
        for index, (name, values) in enumerate(turn.calls):
            identifier = f"id{position:02d}{index:02d}" if ids else None
            parts.append({"functionCall": {"name": name, "args": values} | ({"id": identifier} if identifier else {})})
            names.append((name, identifier))
        return parts, names

    def _asked(self, turn: Asked, names: list[tuple[str, str | None]]) -> list[Json]:
        parts: list[Json] = []
        for (name, identifier), result in zip(names, turn.results, strict=True):
            response = Verbatim({"error" if result.error else "output": result.text})
            parts.append({"functionResponse": {"name": name, "response": response} | ({"id": identifier} if identifier else {})})
        parts += [{"text": text} for text in turn.texts]
        parts += [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}] * turn.images
        return parts

    def respell(self, shot: Shot, rng: random.Random) -> None:
        body = shot.body
        if not self._plain(body):
            return
        match rng.randrange(7):
            case 0:
                chance = rng.choice([0.3, 1.0])
                for place in list(open_objects(body)):
                    for key in list(place):
                        snake = re.sub(r"[A-Z]", lambda found: "_" + found[0].lower(), key)
                        if rng.random() < chance and snake not in place:
                            swap(place, key, snake)
            case 1:
                for content in body["contents"]:
                    if content.get("role") == "user" and rng.random() < 0.5:
                        del content["role"]
            case 2:
                for content in body["contents"]:
                    if len(content["parts"]) == 1:
                        content["parts"] = content["parts"][0]
                if len(body["contents"]) == 1:
                    body["contents"] = body["contents"][0]
            case 3:
                system = body.get("systemInstruction")
                if isinstance(system, dict):
                    body["systemInstruction"] = rng.choice(
                        [system["parts"][0]["text"], {"parts": system["parts"]}, {"role": "system", "parts": system["parts"]}]
                    )
            case 4:
                for name in ("systemInstruction", "tools", "toolConfig", "cachedContent", "labels", "safetySettings"):
                    body.setdefault(name, None)
                for name in (
                    "temperature",
                    "topP",
                    "topK",
                    "seed",
                    "stopSequences",
                    "responseMimeType",
                    "responseSchema",
                    "mediaResolution",
                ):
                    body["generationConfig"].setdefault(name, None)
            case 5:
                body.setdefault("toolConfig", {"functionCallingConfig": {"mode": "AUTO"}})
                body.setdefault("tools", [])
                body["generationConfig"].setdefault("responseMimeType", "text/plain")
                body["generationConfig"]["maxOutputTokens"] = float(body["generationConfig"]["maxOutputTokens"])
            case _:
                model = shot.url.split("?")[0].rpartition(":")[0].split("/", 2)[2]
                shot.url = f"/{rng.choice(['v1', 'v1beta'])}/{model}:" + rng.choice(
                    ["generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse"]
                )

    def _plain(self, body: Json) -> bool:
        """Whether no other spelling has been put on it yet, so that the next one finds its fields."""
        contents = body.get("contents")
        return (
            "generationConfig" in body
            and isinstance(contents, list)
            and all(isinstance(content.get("parts"), list) for content in contents)
            and not any("_" in key for place in open_objects(body) for key in place)
        )

    def noise(self, shot: Shot, rng: random.Random) -> None:
        if not self._plain(shot.body):
            return
        contents = shot.body["contents"]
        answer = next(content for content in reversed(contents) if content.get("role") == "model")
        match rng.randrange(4):
            case 0:
                answer["parts"] = [part for part in answer["parts"] if not part.get("thought")] or answer["parts"]
            case 1:
                for part in answer["parts"]:
                    part.pop("thoughtSignature", None)
            case 2:
                for part in answer["parts"]:
                    if "functionCall" in part:
                        part["functionCall"]["args"] = Verbatim(sorted(part["functionCall"]["args"].items()))
            case _:
                last = answer["parts"][-1]
                if "text" in last and last["text"].rstrip() and not last.get("thought"):
                    last["text"] = last["text"].rstrip()

    def whole(self, answer: Answer) -> Json:
        if answer.headers["content-type"].startswith("text/event-stream"):
            chunks = answer.events()
        else:
            chunks = answer.json()
            chunks = chunks if isinstance(chunks, list) else [chunks]
        candidates: dict[int, Json] = {}
        for chunk in chunks:
            for piece in chunk["candidates"]:
                candidate = candidates.setdefault(piece["index"], {"parts": [], "finish": None})
                candidate["parts"] += piece["content"].get("parts", [])
                candidate["finish"] = piece.get("finishReason") or candidate["finish"]
        return {"responseId": chunks[0]["responseId"], "candidates": [candidates[index] for index in sorted(candidates)]}

    def number_text(self, whole: Json) -> str:
        assert all(candidate["finish"] for candidate in whole["candidates"]), whole
        return str(whole["responseId"])

    def grow(self, shot: Shot, whole: Json, talk: Talk, rng: random.Random) -> Shot:
        shot = shot.copy()
        parts: list[Json] = orjson.loads(orjson.dumps(whole["candidates"][0]["parts"]))
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        for call in calls:
            call["args"] = Verbatim(call.get("args", {}))
        said = Said(calls=[(call["name"], call["args"]) for call in calls])
        asked = answer_to(rng, said, talk.canary)
        contents = shot.body["contents"] if isinstance(shot.body["contents"], list) else [shot.body["contents"]]
        answered = self._asked(asked, [(call["name"], call.get("id")) for call in calls])
        shot.body["contents"] = [*contents, {"role": "model", "parts": parts}, {"role": "user", "parts": answered}]
        return shot

    def check_error(self, status: int, body: Json) -> None:
        assert body["error"]["code"] == status, body
        assert isinstance(body["error"]["message"], str)
        assert isinstance(body["error"]["status"], str)

    def wrong_paths(self) -> tuple[str, ...]:
        return (
            "/v1beta/models/x:embedContent",
            "/v1beta/cachedContents",
            "/v1beta/files",
            "/v1beta/models/x",
            "/v1beta/:generateContent",
            "/v3/x",
        )

    def count(self, shot: Shot) -> tuple[Shot, Callable[[Json], int]] | None:
        url = re.sub(r":(stream)?[gG]enerateContent.*", ":countTokens", shot.url)
        return Shot(url, {"generateContentRequest": shot.body}), lambda answer: int(answer["totalTokens"])
