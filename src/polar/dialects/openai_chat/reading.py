"""Members of a Chat Completions body. What is of another kind is refused with its place (`InvalidRequest`); null is like missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from polar.chat import JsonObject
from polar.dialects.base import as_list, as_object, as_str, bad, json_text


def object_at(body: Mapping[str, Any], key: str, param: str = "") -> JsonObject:
    """`param`: the place of `body`."""
    value = body.get(key)
    return {} if value is None else as_object(value, f"{param}.{key}" if param else key)


def list_at(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    return [] if value is None else as_list(value, key)


def str_at(value: Mapping[str, Any], key: str, param: str) -> str | None:
    text = value.get(key)
    return None if text is None else as_str(text, f"{param}.{key}")


def as_json(value: Any, param: str) -> str:
    """JSON text; a value that cannot be written (nested beyond what JSON writers take) is the caller's mistake."""
    try:
        return json_text(value)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise bad(f"cannot be written as JSON ({error})", param) from error
