"""A least-recently-used cache with a cap in bytes. Knows nothing of what it holds; safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Holds values until their sizes add up to more than `capacity` bytes; a capacity of 0 holds nothing. Retired ones go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._retired: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries) + len(self._retired)

    def get(self, key: K) -> V | None:
        with self._lock:
            for entries in (self._entries, self._retired):
                entry = entries.get(key)
                if entry is not None:
                    entries.move_to_end(key)
                    return entry[0]
            return None

    def put(self, key: K, value: V, size: int) -> None:
        """Replaces what `key` had. A value larger than the whole cache is not held."""
        with self._lock:
            self._drop(key)
            if size > self.capacity:
                return
            self._entries[key] = (value, size)
            self.size += size
            while self.size > self.capacity:
                self._drop(next(iter(self._retired or self._entries)))

    def swap(self, key: K, value: V) -> None:
        """Replaces what `key` has, if it has anything, by something of the same size; its place in the order stays."""
        with self._lock:
            for entries in (self._entries, self._retired):
                entry = entries.get(key)
                if entry is not None:
                    entries[key] = (value, entry[1])

    def retire(self, key: K) -> None:
        """Lets `key` go before all that are not retired: it is unlikely to be asked for again."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._retired[key] = entry

    def _drop(self, key: K) -> None:
        for entries in (self._entries, self._retired):
            entry = entries.pop(key, None)
            if entry is not None:
                self.size -= entry[1]
