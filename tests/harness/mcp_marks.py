"""A Model Context Protocol server with one tool, over stdio: `python mcp_marks.py LOG`. Every call of the tool is a line in LOG.

`http_app` is the same over streamable HTTP; it wants the header `x-marks: given`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOL = {
    "name": "put_mark",
    "description": "Puts a mark with a text.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def answer(method: str, params: dict[str, object], log: str, given: str | None) -> dict[str, object] | None:
    if method == "initialize":
        return {
            "protocolVersion": params.get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "marks", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with open(log, "a") as file:
            file.write(json.dumps({"arguments": params.get("arguments"), "given": given}) + "\n")
        return {"content": [{"type": "text", "text": "the mark is put"}]}
    return {} if method == "ping" else None


def reply(request: dict[str, Any], log: str, given: str | None) -> dict[str, object] | None:
    """The answer to one message; `None` for a notification."""
    if "id" not in request or "method" not in request:
        return None
    result = answer(request["method"], request.get("params") or {}, log, given)
    body = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
    return {"jsonrpc": "2.0", "id": request["id"], **body}


def http_app(log: str) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def post(request: Request) -> Response:
        said = reply(await request.json(), log, request.headers.get("x-marks"))
        return Response(status_code=202) if said is None else JSONResponse(said)

    return Starlette(routes=[Route("/mcp", post, methods=["POST"])])


if __name__ == "__main__":
    for line in sys.stdin:
        said = reply(json.loads(line), sys.argv[1], os.environ.get("MARKS"))
        if said is not None:
            print(json.dumps(said), flush=True)
