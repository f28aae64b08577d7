"""The rollout service's client: `AsyncClient`, and `Client` for programs without an event loop.

    with Client() as polar:
        polar.submit({"task_id": "sum", "instruction": "...", "num_samples": 8, "agent": {"harness": "pi"}})
        for group in polar.groups(["sum"]):
            print(group.task_id, [one.reward for one in group.results])

The service may restart at any time: calls are repeated for `patience_s`, streams resume where they were. Refusals raise `RolloutError`
with the service's code; so does a service that cannot be reached (`unreachable`, status 0).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from polar.chat import JsonObject
from polar.rollout.client_async import AsyncClient, service_token, service_url
from polar.rollout.models import Event, SessionResult, TaskRequest, TaskResult, TaskStatus

__all__ = ["AsyncClient", "Client", "service_token", "service_url"]

T = TypeVar("T")


class Client:
    """As `AsyncClient`, for programs without an event loop: it has one of its own, in a thread. Methods that are async iterators there
    are plain iterators here."""

    def __init__(self, url: str | None = None, token: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 60.0) -> None:
        self._client = AsyncClient(url, token, timeout_s=timeout_s, patience_s=patience_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polar-client", daemon=True)
        self._thread.start()
        self.url = self._client.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def submit(self, task: TaskRequest | Mapping[str, Any], *, idempotency_key: str | None = None) -> str:
        return self._run(self._client.submit(task, idempotency_key=idempotency_key))

    def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        return self._run(self._client.task(task_id, results=results))

    def tasks(self, *, status: str | None = None, harness: str | None = None, since: float | None = None) -> Iterator[JsonObject]:
        return self._iterate(self._client.tasks(status=status, harness=harness, since=since))

    def sessions(self, task_id: str, *, status: str | None = None) -> Iterator[JsonObject]:
        return self._iterate(self._client.sessions(task_id, status=status))

    def wait(self, *task_ids: str, timeout_s: float | None = None) -> list[TaskStatus]:
        return self._run(self._client.wait(*task_ids, timeout_s=timeout_s))

    def groups(self, task_ids: Iterable[str]) -> Iterator[TaskResult]:
        return self._iterate(self._client.groups(task_ids))

    def results(self, task_id: str, *, after: int = 0) -> Iterator[SessionResult]:
        return self._iterate(self._client.results(task_id, after=after))

    def cancel(self, task_id: str) -> JsonObject:
        return self._run(self._client.cancel(task_id))

    def redeliver(self, task_id: str) -> JsonObject:
        return self._run(self._client.redeliver(task_id))

    def session(self, session_id: str) -> JsonObject:
        return self._run(self._client.session(session_id))

    def result(self, session_id: str) -> SessionResult:
        return self._run(self._client.result(session_id))

    def cancel_session(self, session_id: str) -> bool:
        return self._run(self._client.cancel_session(session_id))

    def artifacts(self, session_id: str) -> list[JsonObject]:
        return self._run(self._client.artifacts(session_id))

    def artifact(self, session_id: str, path: str) -> Iterator[bytes]:
        return self._iterate(self._client.artifact(session_id, path))

    def log(self, session_id: str, *, follow: bool = False) -> Iterator[str]:
        return self._iterate(self._client.log(session_id, follow=follow))

    def status(self) -> JsonObject:
        return self._run(self._client.status())

    def nodes(self) -> list[JsonObject]:
        return self._run(self._client.nodes())

    def events(self, *, task_id: str | None = None, session_id: str | None = None, after: int | None = None) -> Iterator[Event]:
        return self._iterate(self._client.events(task_id=task_id, session_id=session_id, after=after))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """A Ctrl-C while it waits cancels the call."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, found: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> tuple[T, ...]:
            try:
                return (await anext(found),)
            except StopAsyncIteration:
                return ()

        async def ended() -> None:
            if hasattr(found, "aclose"):
                await found.aclose()

        try:
            while one := self._run(following()):
                yield one[0]
        finally:
            if not self._loop.is_closed():
                self._run(ended())
