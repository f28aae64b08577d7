"""The lines that point each CLI at a session, for people to paste."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import orjson

from polar.errors import ConfigError
from polar.harness import Endpoint, Harness, Options, named, registered

ANY_MODEL = "polar"
ASK_TIMEOUT_S = 5.0
_SESSION_URL = re.compile(r"(https?://[^\s/]+(?:/[^\s/]+)*?/s/([^\s/?#]+))(?:/v1(?:beta)?)?/*")


def session_url(given: str) -> tuple[str, str]:
    """A session's base URL, without the `/v1` or `/v1beta` that some clients want behind it, and its key. Raises `ConfigError`."""
    found = _SESSION_URL.fullmatch(given.strip())
    if found is None:
        raise ConfigError(f"{given!r} is not the base URL of a session: that is http://.../s/KEY, as `polar session new` prints it")
    return found[1], found[2]


def guide(base_url: str, key: str, only: str | None = None, *, context: int | None = None) -> str:
    """Shell lines for every harness (or one), each in the first dialect that it speaks. `context` is the model's length in tokens."""
    chosen = [named(only)] if only else list(registered().values())
    options = Options.within(context)
    blocks = [_block(harness, base_url, key, options) for harness in chosen]
    if context is None:
        blocks.insert(0, f"# The gateway did not say how long the model's context is; {options.context} tokens are assumed below.")
    runnable = only or "pi"
    if named(runnable).package is not None:
        blocks.append(
            f"# Not installed? Polar keeps a copy of its own, with what it needs:\n"
            f"#   polar harness install {runnable}\n"
            f'#   polar harness run {runnable} "WHAT TO DO" --base-url {base_url}'
        )
    return "\n\n".join(blocks)


def _block(harness: Harness, base_url: str, key: str, options: Options) -> str:
    endpoint = Endpoint(base_url=base_url, key=key, dialect=harness.dialects[0], model=ANY_MODEL)
    needs = f" (needs Node.js {harness.needs_node[0]}.{harness.needs_node[1]} or newer)" if harness.needs_node else ""
    return "\n".join([f"# {harness.title}{needs}", *harness.lines(endpoint, options)])


def context_of(base_url: str, key: str) -> int | None:
    """The length in tokens of the model behind a session, as the gateway says; `None` if it can't be asked or does not know.

    `base_url` and `key` are those of `session_url`.
    """
    url = f"{base_url}/v1/models/{ANY_MODEL}"
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:
            card = orjson.loads(answer.read())
    except (urllib.error.URLError, OSError, ValueError):
        return None
    length = card.get("max_model_len") if isinstance(card, dict) else None
    return length if isinstance(length, int) and length > 0 else None
