"""A canned inference server for the benchmarks: vLLM's wire, the same answer every time, next to no CPU of its own.

Reads `--spec FILE` (JSON: model, prompt_ids, token_ids, texts, logprobs) once and answers from bytes made at start. A stream's events
leave one by one, `--pace-ms` apart, as an engine's do; with 0 the whole stream is one write, which no engine makes: a proxy then handles
hundreds of events in one go.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator

import httptools
import uvloop

TURNS = 10
PER_TURN = 600


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0, help="between two events of a stream")
    args = parser.parse_args()
    with open(args.spec) as file:
        spec = json.load(file)
    uvloop.run(serve(Canned(spec), args.port, args.pace_ms / 1000))


class Canned:
    """All answers as bytes. A streamed request picks its tokens per chunk by the model name's suffix (`-c1`, `-c10`)."""

    def __init__(self, spec: dict) -> None:
        self.spec = spec
        ids, texts, logprobs = spec["token_ids"], spec["texts"], spec["logprobs"]
        usage = {
            "prompt_tokens": len(spec["prompt_ids"]),
            "completion_tokens": len(ids),
            "total_tokens": len(ids) + len(spec["prompt_ids"]),
        }
        text = "".join(texts[:-1])
        content = [
            {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, value in zip(texts, logprobs, strict=True)
        ]
        names = [spec["model"], spec["model"] + "-c10"]
        self.models = plain({"object": "list", "data": [{"id": name, "object": "model", "max_model_len": 131072} for name in names]})
        self.version = plain({"version": "0.32.0"})
        self.completion = plain(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": spec["model"],
                "choices": [
                    {
                        "index": 0,
                        "text": text,
                        "token_ids": ids,
                        "prompt_token_ids": None,
                        "finish_reason": "stop",
                        "stop_reason": None,
                        "logprobs": {
                            "tokens": texts,
                            "token_logprobs": logprobs,
                            "top_logprobs": [None] * len(ids),
                            "text_offset": [0] * len(ids),
                        },
                    }
                ],
                "usage": usage,
            }
        )
        self.chats = [
            plain(
                {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": spec["model"],
                    "prompt_token_ids": prompt,
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": text, "reasoning": None, "tool_calls": []},
                            "token_ids": ids,
                            "finish_reason": "stop",
                            "stop_reason": None,
                            "logprobs": {"content": content},
                        }
                    ],
                    "usage": usage,
                }
            )
            for prompt in self._prompts(spec["prompt_ids"], ids)
        ]
        self.streams = {("responses", size): chunked(self._responses(size)) for size in (1, 10)}
        self.streams |= {(kind, size): chunked(self._chunks(kind, size, usage)) for kind in ("completion", "chat") for size in (1, 10)}

    def _chunks(self, kind: str, size: int, usage: dict) -> list[bytes]:
        ids, texts, logprobs = self.spec["token_ids"], self.spec["texts"], self.spec["logprobs"]
        head = {
            "id": "cmpl-1",
            "object": "text_completion" if kind == "completion" else "chat.completion.chunk",
            "created": 1,
            "model": self.spec["model"],
        }
        lines = []
        for at in range(0, len(ids), size):
            part, pieces, values = ids[at : at + size], texts[at : at + size], logprobs[at : at + size]
            last = at + size >= len(ids)
            shown = pieces[:-1] if last else pieces
            choice: dict = {"index": 0, "token_ids": part, "finish_reason": "stop" if last else None, "stop_reason": None}
            if kind == "completion":
                choice |= {
                    "text": "".join(shown),
                    "logprobs": {
                        "tokens": pieces,
                        "token_logprobs": values,
                        "top_logprobs": [None] * len(part),
                        "text_offset": [0] * len(part),
                    },
                }
            else:
                content = [
                    {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                    for piece, value in zip(pieces, values, strict=True)
                ]
                choice |= {
                    "delta": {**({"role": "assistant"} if at == 0 else {}), "content": "".join(shown)},
                    "logprobs": {"content": content},
                }
            lines.append(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
        lines.append(b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n")
        lines.append(b"data: [DONE]\n\n")
        return lines

    @staticmethod
    def _prompts(whole: list[int], answer: list[int]) -> list[list[int]]:
        """The prompt ids of turns 1 to 10, each of which starts with the one before and its answer; the last has the length of `whole`."""
        prompts = [whole[: len(whole) - (TURNS - 1) * (PER_TURN + len(answer))]]
        for turn in range(1, TURNS):
            prompts.append([*prompts[-1], *answer, *whole[turn * PER_TURN : (turn + 1) * PER_TURN]])
        return prompts

    def _responses(self, size: int) -> list[bytes]:
        """vLLM serves this protocol itself, without ids: for proxies that pass it on untranslated."""
        texts = self.spec["texts"][:-1]
        part = {"type": "output_text", "text": "".join(texts), "annotations": []}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        shared = {"id": "resp_1", "object": "response", "created_at": 1, "model": self.spec["model"], "parallel_tool_calls": True}
        shared |= {"tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0}
        usage = {"input_tokens": len(self.spec["prompt_ids"]), "output_tokens": len(texts), "total_tokens": 0}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        events = [
            {"type": "response.created", "response": {**shared, "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": {**item, "status": "in_progress", "content": []}},
            {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
            *(
                {"type": "response.output_text.delta", **at, "delta": "".join(texts[i : i + size]), "logprobs": []}
                for i in range(0, len(texts), size)
            ),
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": {**shared, "status": "completed", "output": [item], "usage": usage}},
        ]
        lines = []
        for number, event in enumerate(events):
            data = json.dumps({**event, "sequence_number": number}).encode()
            lines.append(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
        return lines

    def answer(self, path: str, body: bytes) -> bytes | list[bytes]:
        """A whole answer, or the pieces of a stream."""
        if path == "/v1/models":
            return self.models
        if path == "/version":
            return self.version
        stream = b'"stream":true' in body or b'"stream": true' in body
        if path.endswith("/responses"):
            return self.streams["responses", 10 if b"-c10" in body else 1]
        kind = "completion" if path.endswith("/completions") and not path.endswith("/chat/completions") else "chat"
        if stream:
            return self.streams[kind, 10 if b"-c10" in body[:400] or b"-c10" in body[-4000:] else 1]
        turn = body.count(b'"role":"user"') or body.count(b'"role": "user"')
        return self.completion if kind == "completion" else self.chats[min(max(turn, 1), TURNS) - 1]


def plain(value: dict) -> bytes:
    data = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def chunked(lines: list[bytes]) -> list[bytes]:
    """One piece an event; usage and `[DONE]` come with the last one, as from an engine that has nothing left to compute."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [b"%x\r\n" % len(line) + line + b"\r\n" for line in lines]
    return [head + pieces[0], *pieces[1:-3], b"".join(pieces[-3:]) + b"0\r\n\r\n"]


class Connection(asyncio.Protocol):
    def __init__(self, canned: Canned, pace_s: float) -> None:
        self.canned = canned
        self.pace_s = pace_s
        self.parser = httptools.HttpRequestParser(self)
        self.path = ""
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path = url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self.body)
        self.body = []
        answer = self.canned.answer(self.path, body)
        if isinstance(answer, bytes):
            self.transport.write(answer)
        elif self.pace_s:
            self._next(iter(answer))
        else:
            self.transport.write(b"".join(answer))

    def _next(self, pieces: Iterator[bytes]) -> None:
        piece = next(pieces, None)
        if piece is not None and not self.transport.is_closing():
            self.transport.write(piece)
            asyncio.get_running_loop().call_later(self.pace_s, self._next, pieces)


async def serve(canned: Canned, port: int, pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(canned, pace_s), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    main()
