"""The yardstick: a proxy that parses and re-serialises JSON with orjson, translates nothing and records nothing."""

from __future__ import annotations

import argparse

import aiohttp
import orjson
import uvicorn


class PassThrough:
    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.client: aiohttp.ClientSession | None = None

    async def __call__(self, scope, receive, send) -> None:
        if self.client is None:
            self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        chunks = []
        while True:
            event = await receive()
            chunks.append(event.get("body", b""))
            if not event.get("more_body"):
                break
        body = orjson.dumps(orjson.loads(b"".join(chunks)))
        headers = {"content-type": "application/json"}
        async with self.client.post(self.upstream + "/v1/chat/completions", data=body, headers=headers) as answer:
            if answer.content_type == "text/event-stream":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
                rest = b""
                async for data in answer.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    out = [b"data: " + (e[6:] if e[6:] == b"[DONE]" else orjson.dumps(orjson.loads(e[6:]))) + b"\n\n" for e in events]
                    if out:
                        await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
            data = orjson.dumps(orjson.loads(await answer.read()))
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": data})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    uvicorn.run(PassThrough(args.upstream), host="127.0.0.1", port=args.port, log_level="error", access_log=False, lifespan="off")
