"""JSON text for rows: valid JSON whatever the conversation holds, numpy arrays included. No I/O."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from polar.jsonline import one_line


def dumps(value: Any) -> bytes:
    """One line of standard JSON. Arrays become lists; float32 goes out as its shortest decimal. Half surrogate pairs, which a harness may
    send and UTF-8 has no form for, are written as escapes.

    Raises `TypeError` for what is not JSON.
    """
    try:
        return one_line(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain))
    except TypeError:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def loads(text: bytes | str) -> Any:
    """The value of a line that `dumps` or anyone else wrote. Raises `ValueError` (`json.JSONDecodeError`)."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def well_formed(value: Any) -> Any:
    """The same value where every JSON reader takes it; else with what some refuse replaced: half surrogate pairs by U+FFFD, integers past
    64 bits by floats (or their digits), what is deeper than `_DEEPEST` or no JSON by its text."""
    try:
        orjson.dumps(value)
    except TypeError:
        return _well_formed(value, 0)
    return value


_DEEPEST = 100


def _well_formed(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return int(value)
        return float(value) if abs(value) < 1 << 1000 else hex(value)
    if depth >= _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {_well_formed(str(key), depth): _well_formed(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_well_formed(one, depth + 1) for one in value]
    return _well_formed(str(value), depth)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return [float(str(item)) for item in value]
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
