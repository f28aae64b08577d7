"""The HTTP API of the rollout service: the reference's routes with its JSON, and what it lacks beside them. Knows no table.

Each route is an `Endpoint`, from which the app and its OpenAPI document are made. Errors are `{"error": {"code", "message"}, "detail"}`:
`code` is stable, `detail` (the message again) is where the reference's clients look.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from polar.chat import JsonObject
from polar.errors import ConfigError, RolloutError, StoreError
from polar.jsonline import one_line
from polar.rollout import metrics, reading
from polar.rollout.api_docs import Endpoint, document, page
from polar.rollout.api_inference import Inference, inference_endpoints
from polar.rollout.api_nodes import node_endpoints
from polar.rollout.auth import failure
from polar.rollout.callbacks import redeliver
from polar.rollout.cancel import cancel_session, cancel_task
from polar.rollout.checks import check_task
from polar.rollout.events import PING_S
from polar.rollout.models import TaskRequest, TaskStatus

if TYPE_CHECKING:
    from polar.rollout.service import Service

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no")


class Json(Response):
    """From an object, or from JSON text that is ready."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


def endpoints(service: Service) -> list[Endpoint]:
    """All that the API serves, but for its own description."""
    inference = Inference(service)
    return [
        *_general(service),
        *_tasks(service),
        *_sessions(service),
        *node_endpoints(service, inference),
        *inference_endpoints(inference),
    ]


def application(service: Service) -> Starlette:
    """The ASGI app, without its guard."""
    served = endpoints(service)
    described = document(served)

    async def openapi(request: Request) -> Response:
        return Json(described)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page(described))

    served += [
        Endpoint("GET", "/openapi.json", "This API, as an OpenAPI document", openapi),
        Endpoint("GET", "/docs", "This API, to be read", docs, answer="text/html"),
    ]
    routes = [Route(one.path, answering(one.handler), methods=[one.method]) for one in served]
    return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})


def answering(handler: Handler) -> Handler:
    """Errors of ours, in the API's form."""

    async def wrapped(request: Request) -> Response:
        try:
            if any("\0" in text for text in (request.scope["path"], *request.query_params.values())):  # PostgreSQL's text has none
                raise RolloutError("a NUL stands in the path or the query", code="invalid_request", status=422)
            return await handler(request)
        except RolloutError as error:
            headers = {"retry-after": "5"} if error.status in (429, 503) else {}
            return Json(failure(error), error.status, headers)
        except ConfigError as error:
            return Json(failure(RolloutError(str(error), code="invalid_request", status=422)), 422)
        except StoreError as error:
            full = RolloutError(f"nothing can be made durable: {error.message}", code="store", status=503)
            return Json(failure(full), 503, {"retry-after": "5"})
        except ClientDisconnect:
            return Response(status_code=499)

    return wrapped


async def _unknown(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    word = "no such path" if status == 404 else f"the path takes no {request.method}"
    return Json(failure(RolloutError(f"{request.url.path}: {word}; see /docs", code="no_route", status=status)), status)


def parsed(model: type[M], raw: bytes) -> M:
    """The body as that model. Raises `RolloutError` `invalid_request` (422) with one line for each thing that is wrong."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise RolloutError(wrong(error), code="invalid_request", status=422) from error


def wrong(error: ValidationError) -> str:
    """What is wrong with a body: which field, and why."""
    lines = []
    for problem in error.errors(include_url=False):
        name, why = ".".join(str(part) for part in problem["loc"]), problem["msg"]
        if problem["type"] == "extra_forbidden":
            meant = difflib.get_close_matches(str(problem["loc"][-1]), _NAMES, 1)
            why = "there is no such field" + (f"; is {meant[0]} meant?" if meant else "")
        elif problem["type"] == "missing":
            why = "is missing"
        lines.append(f"{name}: {why}" if name else why)
    return "\n".join(lines)


def _names(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
        return own.union(*(_names(value) for value in schema.values())) if schema else own
    return set().union(*(_names(value) for value in schema)) if isinstance(schema, list) and schema else set()


_NAMES = sorted(_names(TypeAdapter(TaskRequest).json_schema()))


def number(request: Request, name: str, default: int, highest: int) -> int:
    try:
        return min(highest, max(0, int(request.query_params.get(name, default))))
    except ValueError as error:
        raise RolloutError(f"{name} must be a whole number", code="invalid_request", status=422) from error


def flag(request: Request, name: str, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in TRUE + FALSE:
        raise RolloutError(f"{name} must be true or false", code="invalid_request", status=422)
    return value.lower() in TRUE


# --- general ----------------------------------------------------------------------------------------------------------


def _general(service: Service) -> list[Endpoint]:
    database = service.database

    async def health(request: Request) -> Response:
        trouble = "the service is ending" if service.closing else service.trouble
        body = {"status": "ok" if trouble is None else "error", "service": "rollout", "error": trouble}
        return Json(body, 200 if trouble is None else 503)

    async def status(request: Request) -> Response:
        return Json(await database.read(reading.overview))

    async def prometheus(request: Request) -> Response:
        text = metrics.exposition(await database.read(reading.overview), database.trouble)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def events(request: Request) -> Response:
        query = request.query_params
        last = request.headers.get("last-event-id") or query.get("after")
        after = None if last is None else reading.cursor_number(last)
        lines = service.feed.lines(after, query.get("task_id"), query.get("session_id"))
        return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    return [
        Endpoint("GET", "/health", "Whether the service can make anything durable; needs no token", health),
        Endpoint("GET", "/rollout/status", "Tasks, sessions, nodes, retries and deliveries, counted", status),
        Endpoint("GET", "/metrics", "The same for Prometheus", prometheus, answer="text/plain"),
        Endpoint(
            "GET",
            "/events",
            "What happens, as server-sent events; Last-Event-ID resumes, `after=0` begins with the oldest",
            events,
            query={"task_id": "only this task's", "session_id": "only this session's", "after": "as Last-Event-ID"},
            answer="text/event-stream",
        ),
    ]


# --- tasks ------------------------------------------------------------------------------------------------------------


def _tasks(service: Service) -> list[Endpoint]:
    database = service.database

    async def submit(request: Request) -> Response:
        raw = await request.body()
        task = check_task(parsed(TaskRequest, raw))
        name = await service.submit(task, raw, request.headers.get("idempotency-key") or None)
        return Json({"task_id": name, "status": "running"})

    async def show(request: Request) -> Response:
        with_results = flag(request, "results", True)

        def query(connection: Any) -> bytes:
            return reading.task_body(connection, reading.find_task(connection, request.path_params["task_id"]), with_results=with_results)

        return Json(await database.read(query))

    async def cancel(request: Request) -> Response:
        name = request.path_params["task_id"]
        state, ended = await database.write(lambda tx: cancel_task(tx, name))
        return Json({"task_id": name, "status": state, "cancelled_sessions": ended})

    async def again(request: Request) -> Response:
        name = request.path_params["task_id"]
        await database.read(lambda connection: reading.find_task(connection, name))
        return Json({"task_id": name, "due": await database.write(lambda tx: redeliver(tx, name))})

    async def results(request: Request) -> Response:
        name, after = request.path_params["task_id"], number(request, "after", 0, 1 << 31)
        task = await database.read(lambda connection: reading.find_task(connection, name))
        return StreamingResponse(_results(service, task, after), media_type="application/x-ndjson")

    async def listed(request: Request) -> Response:
        query = request.query_params
        try:
            since = None if query.get("since") is None else float(query["since"])
            if since is not None and not math.isfinite(since):
                raise ValueError(since)
        except ValueError as error:
            raise RolloutError("since must be Unix seconds", code="invalid_request", status=422) from error
        limit = number(request, "limit", 100, reading.MAX_PAGE) or 1
        wanted = {"status": query.get("status"), "harness": query.get("harness"), "cursor": query.get("cursor")}
        return Json(await database.read(lambda connection: reading.list_tasks(connection, since=since, limit=limit, **wanted)))

    async def sessions(request: Request) -> Response:
        query, limit = request.query_params, number(request, "limit", 100, reading.MAX_PAGE) or 1

        def read(connection: Any) -> JsonObject:
            task = reading.find_task(connection, request.path_params["task_id"])
            return reading.list_sessions(connection, task, status=query.get("status"), limit=limit, cursor=query.get("cursor"))

        return Json(await database.read(read))

    paging = {"limit": "rows at most (1000)", "cursor": "`next_cursor` of the page before"}
    task = "/rollout/task/{task_id}"
    return [
        Endpoint(
            "POST",
            "/rollout/task/submit",
            "Submit a task. With an Idempotency-Key header the same body gives the same answer; another body is a 409",
            submit,
            body=TaskRequest,
        ),
        Endpoint("GET", task, "A task and its results so far", show, query={"results": "false: without results"}, response=TaskStatus),
        Endpoint("DELETE", task, "Cancel a task: what has not ended ends as cancelled", cancel),
        Endpoint("POST", task + "/cancel", "The same", cancel),
        Endpoint("POST", task + "/redeliver", "Try callbacks again that were given up", again),
        Endpoint(
            "GET",
            task + "/results",
            "Results as they come, one JSON object a line, until the task has ended",
            results,
            query={"after": "leave out the first so many"},
            answer="application/x-ndjson",
        ),
        Endpoint(
            "GET",
            "/tasks",
            "Tasks, newest first",
            listed,
            query={"status": "running, completed or failed", "harness": "of this harness", "since": "Unix seconds", **paging},
        ),
        Endpoint("GET", "/tasks/{task_id}/sessions", "A task's sessions", sessions, query={"status": "in this status", **paging}),
    ]


async def _results(service: Service, task: Any, after: int) -> AsyncIterator[bytes]:
    """Ends with the task: its last session is its last line."""
    said = time.monotonic()
    async for fresh in service.feed.wakes():
        if not fresh or time.monotonic() - said >= PING_S:  # what is new may all be of other tasks
            said = time.monotonic()
            yield b"\n"  # an empty line keeps proxies and readers awake
        while fresh and after < task.total:
            since = after
            rows = await service.database.read(lambda connection: reading.finished_since(connection, task.id, since))  # noqa: B023
            if not rows:
                break
            for row in rows:
                yield one_line(await service.unpacked(row.body)) + b"\n"
            after = rows[-1].finish_number
        if after >= task.total:
            return


# --- sessions ---------------------------------------------------------------------------------------------------------


def _sessions(service: Service) -> list[Endpoint]:
    database = service.database

    async def show(request: Request) -> Response:
        def query(connection: Any) -> JsonObject:
            row = reading.find_session(connection, request.path_params["session_id"])
            return {**reading.session_line(row, row.task_name), "attempts": reading.session_attempts(connection, row.id)}

        return Json(await database.read(query))

    async def result(request: Request) -> Response:
        session_id = request.path_params["session_id"]
        return Json(await database.read(lambda one: reading.result_body(one, reading.find_session(one, session_id))))

    async def cancel(request: Request) -> Response:
        session_id = request.path_params["session_id"]
        return Json({"session_id": session_id, "cancelled": await database.write(lambda tx: cancel_session(tx, session_id))})

    async def artifacts(request: Request) -> Response:
        return await passed_on(request, "artifacts")

    async def artifact(request: Request) -> Response:
        path = request.path_params["path"]
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise RolloutError("an artefact's path has no empty, . or .. parts", code="invalid_path", status=400)
        return await passed_on(request, f"artifacts/{quote(path)}")

    async def logs(request: Request) -> Response:
        return await passed_on(request, "log", follow=flag(request, "follow", False))

    async def passed_on(request: Request, what: str, *, follow: bool = False) -> Response:
        """The node's own answer, as it comes."""
        session_id = request.path_params["session_id"]
        node = await database.read(lambda one: reading.node_of(one, reading.find_session(one, session_id)))
        url = f"{node.url}/sessions/{quote(session_id)}/{what}" + ("?follow=1" if follow else "")
        context = service.remote.get(url, node.token, endless=follow)
        answer = await context.__aenter__()

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.content.iter_any():
                    yield chunk
            finally:
                await context.__aexit__(None, None, None)

        kept = {name: answer.headers[name] for name in ("content-length", "content-disposition") if name in answer.headers}
        if "content-encoding" in answer.headers:  # the client has undone it
            kept.pop("content-length", None)
        return StreamingResponse(body(), media_type=answer.headers.get("content-type"), headers=kept)

    session = "/rollout/sessions/{session_id}"
    return [
        Endpoint("GET", session, "A session and its attempts", show),
        Endpoint("DELETE", session, "Cancel a session", cancel),
        Endpoint("GET", session + "/result", "Its result", result),
        Endpoint("GET", session + "/artifacts", "Its artefacts", artifacts),
        Endpoint("GET", session + "/artifacts/{path:path}", "One of them", artifact, answer="application/octet-stream"),
        Endpoint(
            "GET", session + "/log", "What its harness printed", logs, query={"follow": "true: go on until it ends"}, answer="text/plain"
        ),
    ]
