"""The rollout service's client for programs with an event loop. `polar.rollout.client` has the other, and says how both behave."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError, RolloutError
from polar.folders import state_dir
from polar.rollout.checks import is_http_url, is_loopback
from polar.rollout.models import Event, SessionResult, TaskRequest, TaskResult, TaskStatus

DEFAULT_URL = "http://127.0.0.1:8080"
PAUSES_S = (0.2, 5.0)
STREAM_SILENCE_S = 60.0
"""A stream that says nothing for so long, not even a ping, is opened anew."""


def service_url(given: str | None = None) -> str:
    """As given, else `POLAR_URL`, else the default port of this machine."""
    return (given or os.environ.get("POLAR_URL") or DEFAULT_URL).rstrip("/")


def service_token(given: str | None = None) -> str | None:
    """As given, else `POLAR_TOKEN`, else what the service of this user keeps in the state directory, if it does."""
    if given or os.environ.get("POLAR_TOKEN"):
        return given or os.environ["POLAR_TOKEN"]
    try:
        return (state_dir() / "rollout.token").read_text().strip()
    except OSError:
        return None


class _Bearer(httpx.Auth):
    """The token that was given, else the one that is found. A service that starts for the first time makes its token then: where a found
    one is refused, it is looked for again."""

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._token = service_token(given)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        used = self._token
        answer = yield self._signed(request)
        if answer.status_code == 401 and self._given is None:
            self._token = service_token()
            if self._token != used:
                yield self._signed(request)

    def _signed(self, request: httpx.Request) -> httpx.Request:
        if self._token:
            request.headers["authorization"] = f"Bearer {self._token}"
        return request


class AsyncClient:
    """`url`, `token`: see `service_url`, `service_token`. `patience_s`: how long a service that does not answer is waited for. Raises
    `ConfigError` for what is no URL."""

    def __init__(self, url: str | None = None, token: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 60.0) -> None:
        self.url = service_url(url)
        if not is_http_url(self.url):
            raise ConfigError(f"{self.url!r} is no URL of a rollout service; write it as {DEFAULT_URL}")
        self.patience_s = patience_s
        self._http = httpx.AsyncClient(base_url=self.url, auth=_Bearer(token), timeout=timeout_s, trust_env=not is_loopback(self.url))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    # --- tasks ---

    async def submit(self, task: TaskRequest | Mapping[str, Any], *, idempotency_key: str | None = None) -> str:
        """Returns the task's id. Repeating it after a failure is safe: it carries an idempotency key, made here if none is given."""
        body = task.model_dump_json(exclude_unset=True).encode() if isinstance(task, TaskRequest) else orjson.dumps(dict(task))
        headers = {"content-type": "application/json", "idempotency-key": idempotency_key or uuid.uuid4().hex}
        answer = await self._call("POST", "/rollout/task/submit", content=body, headers=headers)
        return str(answer["task_id"])

    async def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        return TaskStatus.model_validate(await self._call("GET", _task(task_id), params={"results": str(results).lower()}))

    async def tasks(
        self, *, status: str | None = None, harness: str | None = None, since: float | None = None
    ) -> AsyncIterator[JsonObject]:
        """All tasks, newest first, page by page."""
        params = {key: value for key, value in {"status": status, "harness": harness, "since": since}.items() if value is not None}
        async for row in self._pages("/tasks", params, "tasks"):
            yield row

    async def sessions(self, task_id: str, *, status: str | None = None) -> AsyncIterator[JsonObject]:
        """A task's sessions, without their trajectories."""
        params = {} if status is None else {"status": status}
        async for row in self._pages(f"/tasks/{quote(task_id)}/sessions", params, "sessions"):
            yield row

    async def wait(self, *task_ids: str, timeout_s: float | None = None) -> list[TaskStatus]:
        """All of them, ended, in this order. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            async for _ in self._ended(task_ids):
                pass
        return [await self.task(task_id) for task_id in task_ids]

    async def groups(self, task_ids: Iterable[str]) -> AsyncIterator[TaskResult]:
        """Each task's results as it ends, the first to end first."""
        async for task_id in self._ended(tuple(task_ids)):
            status = await self.task(task_id)
            yield TaskResult(task_id=task_id, status=status.status, results=status.results, result_paths=status.result_paths)

    async def results(self, task_id: str, *, after: int = 0) -> AsyncIterator[SessionResult]:
        """A task's results as its sessions end, but for the first `after` of them."""
        seen = after
        total = (await self.task(task_id, results=False)).total_sessions

        def opening() -> tuple[str, dict[str, str], dict[str, str]]:
            return f"{_task(task_id)}/results", {"after": str(seen)}, {}

        if seen >= total:
            return
        async for line in self._lines(opening):
            if line:
                seen += 1
                yield SessionResult.model_validate_json(line)
            if seen >= total:
                return

    async def cancel(self, task_id: str) -> JsonObject:
        return await self._call("DELETE", _task(task_id))

    async def redeliver(self, task_id: str) -> JsonObject:
        """Callbacks of the task that were given up are tried again."""
        return await self._call("POST", _task(task_id) + "/redeliver")

    # --- sessions ---

    async def session(self, session_id: str) -> JsonObject:
        return await self._call("GET", _session(session_id))

    async def result(self, session_id: str) -> SessionResult:
        return SessionResult.model_validate(await self._call("GET", _session(session_id) + "/result"))

    async def cancel_session(self, session_id: str) -> bool:
        """Whether it was open."""
        return bool((await self._call("DELETE", _session(session_id)))["cancelled"])

    async def artifacts(self, session_id: str) -> list[JsonObject]:
        """`path` and `size` of each file that the session left."""
        files: list[JsonObject] = (await self._call("GET", _session(session_id) + "/artifacts"))["files"]
        return files

    async def artifact(self, session_id: str, path: str) -> AsyncIterator[bytes]:
        """One of them, in pieces."""
        async with self._opened(f"{_session(session_id)}/artifacts/{quote(path)}") as answer:
            async for piece in answer.aiter_bytes():
                yield piece

    async def log(self, session_id: str, *, follow: bool = False) -> AsyncIterator[str]:
        """What its harness printed; with `follow` until it ends."""
        async with self._opened(_session(session_id) + "/log", {"follow": str(follow).lower()}, endless=follow) as answer:
            async for text in answer.aiter_text():
                yield text

    # --- the whole ---

    async def status(self) -> JsonObject:
        return await self._call("GET", "/rollout/status")

    async def nodes(self) -> list[JsonObject]:
        nodes: list[JsonObject] = (await self._call("GET", "/nodes"))["nodes"]
        return nodes

    async def events(self, *, task_id: str | None = None, session_id: str | None = None, after: int | None = None) -> AsyncIterator[Event]:
        """What happens, from now on or after that number. Goes on over restarts, without gaps or repetition."""
        async for event in self._events(task_id=task_id, session_id=session_id, after=after):
            if event is not None:
                yield event

    # --- how ---

    async def _ended(self, task_ids: tuple[str, ...]) -> AsyncIterator[str]:
        """Their ids as they end. Each is asked for once a stream of events stands, so that no end is missed in between."""
        pending = dict.fromkeys(task_ids)
        if not pending:
            return
        async for event in self._events():
            if event is None:
                asked = list(pending)
            elif event.type == "task.finished" and event.task_id in pending:
                asked = [event.task_id]
            else:
                continue
            for task_id in asked:
                if (await self.task(task_id, results=False)).status != "running":
                    del pending[task_id]
                    yield task_id
            if not pending:
                return

    async def _events(
        self, *, task_id: str | None = None, session_id: str | None = None, after: int | None = None
    ) -> AsyncIterator[Event | None]:
        """Events; `None` each time that a stream stands."""
        last = after
        filters = {key: value for key, value in {"task_id": task_id, "session_id": session_id}.items() if value is not None}

        def opening() -> tuple[str, dict[str, str], dict[str, str]]:
            return "/events", filters, {} if last is None else {"last-event-id": str(last)}

        async for line in self._lines(opening):
            if line.startswith(": polar"):
                yield None
            elif line.startswith("data:") and '"seq"' in line:
                event = Event.model_validate_json(line[5:])
                last = event.seq
                yield event

    async def _lines(self, opening: Callable[[], tuple[str, dict[str, str], dict[str, str]]]) -> AsyncIterator[str]:
        """Lines of a stream that is opened again whenever it breaks or the service ends it; the caller knows when it has all."""
        since, pause_s = time.monotonic(), PAUSES_S[0]
        while True:
            path, params, headers = opening()
            try:
                async with self._opened(path, params, headers, endless=True) as answer:
                    async for line in _lines_of(answer):
                        since, pause_s = time.monotonic(), PAUSES_S[0]
                        yield line
                why = "the service ended the stream"
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            except RolloutError as error:
                if error.status not in (0, 502, 503, 504):
                    raise
                why = error.message
            if time.monotonic() - since > self.patience_s:
                raise RolloutError(f"the rollout service at {self.url} does not answer: {why}", code="unreachable", status=0)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _opened(
        self, path: str, params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None, *, endless: bool = False
    ) -> _Opened:
        timeout = httpx.Timeout(self._http.timeout.connect, read=STREAM_SILENCE_S if endless else self._http.timeout.read)
        return _Opened(self._http, self._http.build_request("GET", path, params=params, headers=headers, timeout=timeout))

    async def _pages(self, path: str, params: Mapping[str, Any], name: str) -> AsyncIterator[JsonObject]:
        cursor: str | None = None
        while True:
            page = await self._call("GET", path, params={**params, **({} if cursor is None else {"cursor": cursor})})
            for row in page[name]:
                yield row
            cursor = page["next_cursor"]
            if cursor is None:
                return

    async def _call(self, method: str, path: str, **options: Any) -> JsonObject:
        """A call that may be made again: all of ours may."""
        ends, pause_s = time.monotonic() + self.patience_s, PAUSES_S[0]
        while True:
            try:
                answer = await self._http.request(method, path, **options)
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
                message = f"the rollout service at {self.url} does not answer: {why}; is it running (polar serve)?"
                failure = RolloutError(message, code="unreachable", status=0)
            else:
                if answer.status_code < 400:
                    body: JsonObject = orjson.loads(answer.content)
                    return body
                failure = _failure(answer.status_code, answer.content)
                if answer.status_code not in (429, 502, 503, 504) or failure.code in ("node_unreachable", "too_many_sessions"):
                    raise failure
            if time.monotonic() + pause_s > ends:
                raise failure
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSES_S[1])


class _Opened:
    """A streamed answer; raises `RolloutError` on entry for a refusal."""

    def __init__(self, http: httpx.AsyncClient, request: httpx.Request) -> None:
        self._http = http
        self._request = request
        self._answer: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        self._answer = answer = await self._http.send(self._request, stream=True)
        if answer.status_code >= 400:
            try:
                raise _failure(answer.status_code, await answer.aread())
            finally:
                await answer.aclose()
        return answer

    async def __aexit__(self, *ended: object) -> None:
        if self._answer is not None:
            await self._answer.aclose()


async def _lines_of(answer: httpx.Response) -> AsyncIterator[str]:
    """What ends with a newline, and nothing else: httpx's own lines end at U+2028 as well, amid a result."""
    held: list[bytes] = []
    async for piece in answer.aiter_bytes():
        *ended, rest = piece.split(b"\n")
        for line in ended:
            yield b"".join((*held, line)).decode()
            held.clear()
        held.append(rest)


def _task(task_id: str) -> str:
    return f"/rollout/task/{quote(task_id)}"


def _session(session_id: str) -> str:
    return f"/rollout/sessions/{quote(session_id)}"


def _failure(status: int, raw: bytes) -> RolloutError:
    try:
        error = orjson.loads(raw)["error"]
        return RolloutError(str(error["message"]), code=str(error["code"]), status=status)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        shown = raw[:200].decode("utf-8", "replace")
        return RolloutError(f"{status}: {shown}", code="http", status=status)
