"""Parts that the tests of public bug reports share."""

from __future__ import annotations

from typing import Any

from gateway_players import PARAMETERS


async def prompts(gw: Any, client: Any, path: str, *bodies: dict[str, Any]) -> list[str]:
    """The prompts, as text, that these bodies become."""
    seen = len(gw.engine.calls)
    for body in bodies:
        answer = await client.post(path, body)
        assert answer.status == 200, answer.body
    return [call.text for call in gw.engine.calls[seen:]]


def messages(*history: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 50, "messages": list(history), **fields}


def user(text: str = "Go.") -> dict[str, Any]:
    return {"role": "user", "content": text}


ANTHROPIC_TOOL = {"name": "bash", "description": "d", "input_schema": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": PARAMETERS}}
HI = "Hi."
