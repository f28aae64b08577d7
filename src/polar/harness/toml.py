"""Writes TOML as dotted keys, one a line, so that no line depends on a table above it. Knows no harness.

The standard library only reads TOML. Source: https://toml.io/en/v1.0.0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from polar.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested objects as one level of dotted keys. A top-level key may be dotted already; those below it are quoted where they must be."""
    return {name: value for key, inner in settings.items() for name, value in _leaves(key, inner)}


def dumps(settings: Mapping[str, Any]) -> str:
    """A TOML document. `None` values are left out: TOML has none. Raises `ConfigError` for a value that TOML cannot hold."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in dotted(settings).items() if value is not None)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{_key(str(key))}", inner)
    else:
        yield name, value


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items() if item is not None) + "}"
    raise ConfigError(f"a setting of the type {type(value).__name__} cannot be written as TOML: {value!r}"[:200])
