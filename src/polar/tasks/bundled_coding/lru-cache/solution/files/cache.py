from collections import OrderedDict

_ABSENT = object()


class LRUCache:
    def __init__(self, capacity):
        self._items = OrderedDict()
        self._counts = {"hits": 0, "misses": 0, "evictions": 0}
        self.resize(capacity)

    def get(self, key, default=None):
        value = self._items.get(key, _ABSENT)
        if value is _ABSENT:
            self._counts["misses"] += 1
            return default
        self._counts["hits"] += 1
        self._items.move_to_end(key)
        return value

    def put(self, key, value):
        self._items[key] = value
        self._items.move_to_end(key)
        removed = self._trim()
        return removed[0] if removed else None

    def peek(self, key, default=None):
        return self._items.get(key, default)

    def delete(self, key):
        return self._items.pop(key, _ABSENT) is not _ABSENT

    def resize(self, capacity):
        if capacity < 1:
            raise ValueError(f"the capacity must be positive, not {capacity}")
        self._capacity = capacity
        return self._trim()

    def _trim(self):
        removed = []
        while len(self._items) > self._capacity:
            removed.append(self._items.popitem(last=False))
        self._counts["evictions"] += len(removed)
        return removed

    def __len__(self):
        return len(self._items)

    def __contains__(self, key):
        return key in self._items

    def keys(self):
        return list(reversed(self._items))

    def stats(self):
        return dict(self._counts)
