"""JSON text for rows: valid JSON whatever the conversation holds, numpy arrays included. No I/O."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson


def dumps(value: Any) -> bytes:
    """One line of standard JSON. Arrays become lists; float32 goes out as its shortest decimal. Half surrogate pairs, which a harness may
    send and UTF-8 has no form for, are written as escapes.

    Raises `TypeError` for what is not JSON.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=_plain)
    except TypeError:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def loads(text: bytes | str) -> Any:
    """The value of a line that `dumps` or anyone else wrote. Raises `ValueError` (`json.JSONDecodeError`)."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return [float(str(item)) for item in value]
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
