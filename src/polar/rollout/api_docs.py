"""The API's description of itself: an OpenAPI document from the endpoints and their models, and a page made from that. No script, and
nothing from elsewhere: it reads where there is no internet."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from polar import __version__
from polar.chat import JsonObject

REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `query` has each parameter's meaning; `answer` is the media type of a 200."""

    method: str
    path: str
    summary: str
    handler: Callable[[Request], Awaitable[Response]]
    body: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    answer: str = "application/json"


def document(endpoints: Sequence[Endpoint]) -> JsonObject:
    """OpenAPI 3.1."""
    models: dict[type[BaseModel], None] = {model: None for one in endpoints for model in (one.body, one.response) if model is not None}
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    paths: dict[str, JsonObject] = {}
    for one in endpoints:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path)
    failure = {
        "type": "object",
        "properties": {
            "error": {"type": "object", "properties": {"code": {"type": "string"}, "message": {"type": "string"}}},
            "detail": {"type": "string"},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polar rollout service", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas.get("$defs", {}), "Failure": failure},
        },
    }


def _operation(one: Endpoint, path: str) -> JsonObject:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"\{(\w+)\}", path)
    ] + [{"name": name, "in": "query", "description": why, "schema": {"type": "string"}} for name, why in one.query.items()]
    schema = {"$ref": REFERENCE.format(model=one.response.__name__)} if one.response else {}
    operation: JsonObject = {
        "summary": one.summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "As asked", "content": {one.answer: {"schema": schema}}},
            "default": {"description": "Refused", "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="Failure")}}}},
        },
    }
    if one.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": {"$ref": REFERENCE.format(model=one.body.__name__)}}}}
    if one.path == "/health":
        operation["security"] = []
    return operation


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.1rem;margin-top:2rem}code{font:0.9em ui-monospace,monospace}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #d8dee4}a{color:#0a58ca}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}a{color:#6cb6ff}}"""


def page(described: Mapping[str, Any]) -> str:
    """The document as a page."""
    rows, parts = [], []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            query = "".join(
                f"<br><code>?{_safe(one['name'])}</code> {_safe(one['description'])}"
                for one in operation["parameters"]
                if one["in"] == "query"
            )
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            takes = f"<br>takes {_type(body)}" if body else ""
            rows.append(
                f"<tr><td><code>{method.upper()}</code></td><td><code>{_safe(path)}</code></td>"
                f"<td>{_safe(operation['summary'])}{query}{takes}</td></tr>"
            )
    for name, schema in sorted(described["components"]["schemas"].items()):
        fields = "".join(
            f"<tr><td><code>{_safe(key)}</code></td><td>{_type(value)}</td><td>{_default(value)}</td></tr>"
            for key, value in schema.get("properties", {}).items()
        )
        about = _safe(schema.get("description", ""))
        parts.append(f'<h2 id="{_safe(name)}">{_safe(name)}</h2><p>{about}</p><table>{fields}</table>')
    title = _safe(described["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title} {_safe(described['info']['version'])}</h1>"
        f"<p>Every call carries <code>Authorization: Bearer TOKEN</code>. "
        f'The same as a document: <a href="openapi.json">openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table>{''.join(parts)}</html>"
    )


def _safe(text: object) -> str:
    return html.escape(str(text))


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = _safe(str(schema["$ref"]).rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return _safe(", ".join(map(str, schema["enum"])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return _safe(schema.get("const", schema.get("type", "anything")))


def _default(schema: Mapping[str, Any]) -> str:
    return f"default {_safe(schema['default'])}" if "default" in schema else ""
