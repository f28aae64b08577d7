"""The durable store of sessions and completions, as an interface. Knows no trainer, no provider and no engine.

Law 4: when `append` returns, the completion has been synced to disk. Writers are batched (group commit), so concurrent appends share a
sync. A failure raises `StoreError` and leaves nothing half written; `healthy` turns false until a write succeeds again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from polar.records import Completion, Head, Session


class Store(ABC):
    """All methods are safe to call concurrently from one event loop."""

    @property
    @abstractmethod
    def healthy(self) -> str | None:
        """`None` while all is well, else what is wrong, for `/health`."""

    @abstractmethod
    async def create_session(self, session: Session) -> None:
        """Durable when it returns. Raises `ValueError` if the id or the key exists."""

    @abstractmethod
    async def session(self, session_id: str) -> Session | None: ...

    @abstractmethod
    async def session_by_key(self, key_hash: bytes) -> Session | None: ...

    @abstractmethod
    async def sessions(self, *, limit: int = 100, before: float | None = None, open_only: bool = False) -> list[Session]:
        """Newest first; `before` is the `created` of the last row of the page before."""

    @abstractmethod
    async def close_session(self, session_id: str, at: float) -> bool:
        """Ends a session and its key. False if there is none, or it was closed already."""

    @abstractmethod
    async def append(self, completions: Sequence[Completion]) -> None:
        """Writes the completions of one call (more than one with `n` > 1), all or none, and syncs."""

    @abstractmethod
    async def completion(self, session_id: str, number: int) -> Completion | None:
        """Rebuilds one completion in full from its chain of parents; byte for byte what was appended."""

    @abstractmethod
    def completions(self, session_id: str) -> AsyncIterator[Completion]:
        """All of a session in order of number, each in full, in memory bounded by the largest branch."""

    @abstractmethod
    async def heads(self, session_id: str) -> list[Head]:
        """The heads of all of a session's completions, in order of number."""

    @abstractmethod
    async def mark_delivered(self, session_id: str, number: int) -> None:
        """Notes that the client took the whole answer. Best effort: may be lost in a crash."""

    @abstractmethod
    async def forget_response(self, session_id: str, number: int) -> bool:
        """Makes a stored response irretrievable by its id (`stored` becomes false); the capture stays. False if it was not stored."""

    @abstractmethod
    async def aclose(self) -> None:
        """Waits for pending writes and closes."""
