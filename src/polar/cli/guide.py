"""The lines that point each CLI at a session, for people to paste."""

from __future__ import annotations

from polar.harness import Endpoint, named, registered

ANY_MODEL = "polar"


def guide(base_url: str, key: str, only: str | None = None) -> str:
    """Shell lines for every harness (or one), each in the first dialect that it speaks."""
    chosen = [named(only)] if only else list(registered().values())
    blocks = []
    for harness in chosen:
        endpoint = Endpoint(base_url=base_url, key=key, dialect=harness.dialects[0], model=ANY_MODEL)
        blocks.append("\n".join([f"# {harness.title}", *harness.lines(endpoint)]))
    return "\n\n".join(blocks)
