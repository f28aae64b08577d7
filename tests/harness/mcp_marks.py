"""A Model Context Protocol server with one tool, over stdio: `python mcp_marks.py LOG`. Every call of the tool is a line in LOG."""

from __future__ import annotations

import json
import os
import sys

TOOL = {
    "name": "put_mark",
    "description": "Puts a mark with a text.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def answer(method: str, params: dict[str, object]) -> dict[str, object] | None:
    if method == "initialize":
        return {
            "protocolVersion": params.get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "marks", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with open(sys.argv[1], "a") as log:
            log.write(json.dumps({"arguments": params.get("arguments"), "env": os.environ.get("MARKS")}) + "\n")
        return {"content": [{"type": "text", "text": "the mark is put"}]}
    return {} if method == "ping" else None


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request and "method" in request:
        result = answer(request["method"], request.get("params") or {})
        body = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}), flush=True)
