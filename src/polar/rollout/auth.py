"""Who may call the service: a bearer token, or a listener of its own on loopback that asks for none (`compat_open`).

The open listener is for programs on this machine that no sandbox shares the network with. A browser's requests are refused there: a web
page could make them without its reader knowing.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from polar.chat import JsonObject
from polar.errors import RolloutError
from polar.rollout.models import EvaluatorSpec
from polar.runtime.spec import RuntimeSpec

FREE = frozenset({"/health"})


class Guard:
    """The app behind a check; `token` `None`: the open listener's."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in FREE:
            refused = self._refusal(Headers(scope=scope))
            if refused is not None:
                await _answer(send, refused)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> RolloutError | None:
        if self._expected is None:
            if "origin" in headers or not _local(headers.get("host", "")):
                return RolloutError("the open listener is for programs on this machine", code="not_local", status=403)
            return None
        if hmac.compare_digest(headers.get("authorization", "").encode("utf-8", "replace"), self._expected):
            return None
        return RolloutError(
            "the rollout service's token is missing or wrong: Authorization: Bearer TOKEN, or POLAR_TOKEN for polar and its client (it is "
            "rollout.token in the service's settings, else in the file rollout.token of its state directory)",
            code="unauthenticated",
            status=401,
        )


def failure(error: RolloutError) -> JsonObject:
    """`detail` is where the reference's clients look."""
    return {"error": {"code": error.code, "message": error.message}, "detail": error.message}


def check_sandbox(runtime: RuntimeSpec | None, evaluator: EvaluatorSpec | None, default: str | None) -> None:
    """While the open listener is on: refuses a task whose sandboxes, its evaluator's own among them, could reach it. `default` is why the
    nodes' default runtime could, if it could. Raises `RolloutError` `shares_host`."""
    why = default
    if runtime is not None:
        if runtime.names_backend:
            why = None
        if runtime.names_backend and runtime.backend == "local":
            why = "the runtime `local` shares the machine's network"
        elif runtime.effective_network == "host":
            why = "`network: host` shares the machine's network"
    for changes in () if evaluator is None else _verifiers(evaluator.config):
        if changes.get("backend") == "local" or changes.get("network") == "host":
            why = "the evaluator's verifier_runtime shares the machine's network"
    if why is not None:
        message = f"{why}, and compat_open has opened this service on loopback without a token: an agent could control it"
        raise RolloutError(message, code="shares_host", status=403)


def _verifiers(config: Any) -> Iterator[JsonObject]:
    """What evaluators, those of a composition too, change of the task's runtime."""
    if isinstance(config, list):
        for one in config:
            yield from _verifiers(one)
    elif isinstance(config, dict):
        for name, value in config.items():
            if name == "verifier_runtime" and isinstance(value, dict):
                yield value
            yield from _verifiers(value)


def _local(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


async def _answer(send: Send, error: RolloutError) -> None:
    body = orjson.dumps(failure(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
