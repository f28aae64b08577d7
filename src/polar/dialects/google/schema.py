"""Google's `Schema` (the OpenAPI subset of `parameters` and `responseSchema`) as JSON Schema.

Types become lower case, `nullable` becomes a second type, counts written as strings become integers, snake_case keywords
become camelCase, all at every depth; `propertyOrdering` is dropped. What is data rather than schema (`enum`, `default`,
`example`, ...) and every unknown keyword pass through untouched, in their order.
Source: https://ai.google.dev/api/caching#Schema.
"""

from __future__ import annotations

from typing import Any

from polar.chat import JsonObject
from polar.dialects.base import as_list, as_object, as_str, bad

MAX_DEPTH = 100
"""Nesting beyond this is refused, here and in schemas that are taken verbatim."""

_CAMEL = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "prefix_items": "prefixItems",
    "additional_properties": "additionalProperties",
    "property_ordering": "propertyOrdering",
}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_SCHEMAS = {"items", "not", "additionalProperties"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_MAPS = {"properties", "patternProperties", "$defs", "defs", "definitions"}


def json_schema(value: Any, param: str, depth: int = 0) -> JsonObject:
    """The JSON Schema of a Google schema. Raises `InvalidRequest` where a known keyword has a wrong type."""
    if depth > MAX_DEPTH:
        raise bad(f"is nested more than {MAX_DEPTH} levels deep", param)
    source = as_object(value, param)
    result: JsonObject = {}
    for key, item in source.items():
        name = _CAMEL.get(key, key)
        where = f"{param}.{key}"
        if name in ("nullable", "propertyOrdering") or (name in _SCHEMAS | _LISTS | _MAPS and item is None):
            continue
        if name == "type":
            if kind := _type(item, where):
                result[name] = kind
        elif name in _COUNTS:
            result[name] = int(item) if isinstance(item, str) and item.isascii() and item.isdecimal() and len(item) < 19 else item
        elif name in _SCHEMAS:
            result[name] = item if isinstance(item, bool) else json_schema(item, where, depth + 1)
        elif name in _LISTS:
            result[name] = [json_schema(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(as_list(item, where))]
        elif name in _MAPS:
            result[name] = {each: json_schema(inner, f"{where}.{each}", depth + 1) for each, inner in as_object(item, where).items()}
        else:
            check_depth(item, where)
            result[name] = item
    return _nullable(result) if source.get("nullable") is True else result


def check_depth(value: Any, param: str) -> None:
    """Refuses what no JSON writer would take."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _children(each)]
        if not level:
            return
    raise bad(f"is nested more than {MAX_DEPTH} levels deep", param)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _type(value: Any, param: str) -> str | list[str] | None:
    if isinstance(value, list):
        return [as_str(each, param).lower() for each in value]
    name = as_str(value, param)
    return None if name == "TYPE_UNSPECIFIED" else name.lower()


def _nullable(schema: JsonObject) -> JsonObject:
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    elif isinstance(kind, list) and "null" not in kind:
        schema["type"] = [*kind, "null"]
    elif kind is None and isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema
