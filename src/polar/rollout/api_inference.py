"""Pause, resume and policy version of all nodes in one call each, with the routes that every node's gateway has: what a trainer calls
around an update of the engines' weights.

What was last ordered is remembered, and told to nodes that register or return later, before they are given work: a node that was started
during an update waits with the others, and none records an old version. One with an engine that was not among those which the version
was said of records none, until the next update has reached that engine: its weights may be any. (The service remembers it as long as its
process lives; a trainer says it again with each update.) Knows no engine: trainers talk to those themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import aiohttp
import orjson
from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import Response

from polar.chat import JsonObject
from polar.errors import RolloutError
from polar.rollout.api_docs import Endpoint
from polar.rollout.tables import nodes

if TYPE_CHECKING:
    from polar.rollout.service import Service

GREETING_S = 5.0
ANSWER_S = 60.0
"""Beyond a pause's own time: an interrupted call has to leave its engine."""

STATUS, PAUSE, RESUME = (f"/admin/inference/{word}" for word in ("status", "pause", "resume"))
POLICY = "/admin/policy"


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    url: str
    token: str | None


@dataclass(frozen=True, slots=True)
class _Answer:
    """`status` 0: the node could not be reached; `said` tells why."""

    status: int
    said: JsonObject


class Inference:
    """What holds for all nodes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.paused = False
        self.policy_version: str | int | None = None
        self._versioned: set[str] = set()
        """URLs of the engines that `policy_version` was said of."""
        self._orders = 0
        self._heard: dict[str, int] = {}
        """By node, how many orders it has heard, or is hearing now."""

    async def pause(self, query: dict[str, str], timeout_s: float) -> Response:
        self._order(paused=True)
        return await self._everywhere("POST", f"{PAUSE}?{urlencode(query)}", timeout_s=timeout_s + ANSWER_S)

    async def resume(self) -> Response:
        self._order(paused=False)
        return await self._everywhere("POST", RESUME)

    async def set_policy(self, version: str | int) -> Response:
        self._order(version=version)
        answer = await self._everywhere("POST", POLICY, {"policy_version": version})
        self._versioned = _urls(orjson.loads(answer.body)["engines"])
        return answer

    async def status(self) -> Response:
        return await self._everywhere("GET", STATUS)

    def _order(self, *, paused: bool | None = None, version: str | int | None = None) -> None:
        self._orders += 1
        self.paused = self.paused if paused is None else paused
        self.policy_version = self.policy_version if version is None else version

    async def greet(self, node_id: str, url: str | None = None, token: str | None = None) -> None:
        """Brings a node up to date that has not heard the last order. `url` and `token`: of one that is just registering. Raises
        `RolloutError` `node_unreachable`: it is to try again."""
        if self._heard.get(node_id, 0) == self._orders:
            return
        node = await self._find(node_id) if url is None else _Node(node_id, url.rstrip("/"), token)
        if node is None:
            return
        orders = self._orders
        if self.policy_version is not None:
            status = await self._greet_with(node, STATUS, method="GET")
            if _urls(status.said.get("engines") or []) <= self._versioned:
                await self._greet_with(node, POLICY, {"policy_version": self.policy_version})
        await self._greet_with(node, f"{PAUSE}?timeout_seconds=0" if self.paused else RESUME)
        self._heard[node_id] = orders

    def forget(self, node_id: str) -> None:
        """It has a new process, which has heard nothing, or did not do what it heard."""
        self._heard[node_id] = 0

    async def _greet_with(self, node: _Node, path: str, body: JsonObject | None = None, *, method: str = "POST") -> _Answer:
        answer = await self._ask(node, method, path, body, GREETING_S)
        if answer.status == 0:
            raise RolloutError(f"the node's control API cannot be reached: {answer.said['error']}", code="node_unreachable", status=503)
        return answer

    async def _find(self, node_id: str) -> _Node | None:
        found = await self._service.database.read(_up)
        return next((node for node in found if node.id == node_id), None)

    async def _everywhere(self, method: str, path: str, body: JsonObject | None = None, *, timeout_s: float = ANSWER_S) -> Response:
        """200: every node that is not lost did it; 504: one of them was not drained in time; 503: one did not answer, or refused."""
        from polar.rollout.api import Json

        asked = await self._service.database.read(_up)
        if method == "POST":
            self._heard.update({node.id: self._orders for node in asked})
        answers = await asyncio.gather(*(self._ask(node, method, path, body, timeout_s) for node in asked))
        by_node = {node.id: answer for node, answer in zip(asked, answers, strict=True)}
        done = {node_id: answer for node_id, answer in by_node.items() if answer.status in (200, 504)}
        for node_id in by_node.keys() - done.keys():
            self.forget(node_id)
        reports = [answer.said for answer in done.values()]
        merged: JsonObject = {
            "paused": self.paused and all(report.get("paused") for report in reports),
            "policy_version": None if self.policy_version is None else str(self.policy_version),
            "engines": _engines(reports),
            "nodes": {node_id: answer.said for node_id, answer in by_node.items()},
        }
        for name in ("inflight", "waiting", "interrupted"):
            merged[name] = sum(int(report.get(name) or 0) for report in reports)
        if len(done) < len(by_node):
            failed = "; ".join(f"node {node_id}: {answer.said['error']}" for node_id, answer in by_node.items() if node_id not in done)
            merged["error"] = {"code": "node_unreachable", "message": failed}
            return Json(merged, 503)
        return Json(merged, 504 if any(answer.status == 504 for answer in done.values()) else 200)

    async def _ask(self, node: _Node, method: str, path: str, body: JsonObject | None, timeout_s: float) -> _Answer:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {node.token}"} if node.token else {})}
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=GREETING_S)
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._service.remote.http.request(method, node.url + path, data=data, headers=headers, timeout=timeout) as answer:
                said: Any = orjson.loads(await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            return _Answer(0, {"error": str(error) or type(error).__name__})
        except orjson.JSONDecodeError:
            said = {}
        if answer.status in (200, 504) and isinstance(said, dict):
            return _Answer(answer.status, said)
        words = said.get("error") if isinstance(said, dict) else None
        why = words.get("message") if isinstance(words, dict) else words
        return _Answer(answer.status, {"error": f"{answer.status}: {why or 'no reason given'}"})


def _up(connection: Connection) -> list[_Node]:
    rows = connection.execute(select(nodes.c.id, nodes.c.url, nodes.c.token).where(nodes.c.state != "lost").order_by(nodes.c.id))
    return [_Node(row.id, row.url.rstrip("/"), row.token) for row in rows]


def _engines(reports: list[JsonObject]) -> list[JsonObject]:
    """Each served model once, with the URLs of all nodes' engines of it."""
    found: dict[tuple[Any, ...], JsonObject] = {}
    for report in reports:
        for one in report.get("engines") or ():
            key = (one.get("name"), one.get("model"), one.get("kind"), one.get("trained"))
            known = found.setdefault(key, {**one, "urls": []})
            known["urls"] += [url for url in one.get("urls") or () if url not in known["urls"]]
    return list(found.values())


def _urls(engines: list[JsonObject]) -> set[str]:
    return {url for one in engines if one.get("trained", True) for url in one.get("urls") or ()}


def inference_endpoints(inference: Inference) -> list[Endpoint]:
    async def status(request: Request) -> Response:
        return await inference.status()

    async def pause(request: Request) -> Response:
        query = request.query_params
        try:
            timeout_s = float(query.get("timeout_seconds", "300"))
        except ValueError as error:
            raise RolloutError("timeout_seconds must be a number of seconds", code="invalid_request", status=422) from error
        if not 0 <= timeout_s < float("inf"):
            raise RolloutError("timeout_seconds must be a number of seconds, 0 or more", code="invalid_request", status=422)
        interrupt = query.get("interrupt", "false")
        if interrupt not in ("true", "false"):
            raise RolloutError("interrupt must be true or false", code="invalid_request", status=422)
        return await inference.pause({"timeout_seconds": f"{timeout_s:g}", "interrupt": interrupt}, timeout_s)

    async def resume(request: Request) -> Response:
        return await inference.resume()

    async def policy(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body() or b"{}")
        except orjson.JSONDecodeError as error:
            raise RolloutError(f"Invalid JSON: {error}", code="invalid_request", status=422) from error
        version = body.get("policy_version") if isinstance(body, dict) else None
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise RolloutError("policy_version must be a string or an integer", code="invalid_request", status=422)
        return await inference.set_policy(version)

    def endpoint(method: str, path: str, summary: str, handler: Callable[[Request], Awaitable[Response]], **query: str) -> Endpoint:
        return Endpoint(method, path, summary, handler, query=query)

    return [
        endpoint("GET", STATUS, "What is in the engines of all nodes, and which engines there are", status),
        endpoint(
            "POST",
            PAUSE,
            "Hold the model calls of all nodes; 504: some are still in an engine",
            pause,
            timeout_seconds="how long those in flight are waited for (300)",
            interrupt="true: then they are ended, and begin anew after the pause",
        ),
        endpoint("POST", RESUME, "Let the model calls of all nodes go on", resume),
        endpoint("POST", POLICY, "The version that completions are recorded with from now on", policy),
    ]
