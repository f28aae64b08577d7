"""Durable records: `open_store(url)` gives SQLite for a path or `sqlite:` URL, PostgreSQL for a `postgresql:` one."""
