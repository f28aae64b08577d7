"""Durable records: `open_store(url)` gives SQLite for a path or `sqlite:` URL, PostgreSQL for a `postgresql:` one."""

from __future__ import annotations

import os

from polar.store.base import Store
from polar.store.codec import messages_from_json, messages_to_json

__all__ = ["Store", "messages_from_json", "messages_to_json", "open_store"]


def open_store(url_or_path: str | os.PathLike[str], *, cache_bytes: int = 256 << 20, busy_timeout_s: float = 5.0) -> Store:
    """The store at a path, a `sqlite:` URL or a `postgresql:` URL; made where there is none, migrated where it is of an older version.

    `cache_bytes` caps the recent completions held in memory. `busy_timeout_s` is for how long a write waits for a lock that another
    process holds before it fails. Blocks for a moment: call it before the event loop has anything to serve. Raises `ConfigError` for a
    place that cannot be used, a newer schema, or a database of something else.
    """
    from polar.store.sql import SqlStore  # SQLAlchemy takes a while to import

    return SqlStore(url_or_path, cache_bytes=cache_bytes, busy_timeout_s=busy_timeout_s)
