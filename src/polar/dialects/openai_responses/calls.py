"""Tool calls as Responses items: how each kind is written, and read back.

Invariant: `arguments_of(call_item(call))` is `call.arguments` again, up to JSON formatting. A call whose arguments don't fit
the item type of its tool goes out as a plain `function_call`; a custom tool must get its own item type (a client takes no
other), so there the arguments become the input as they stand, and the call id starts with `RAW_CALL`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from polar.chat import JsonObject, Tool, ToolCall, ToolKind
from polar.dialects.base import as_object, as_str
from polar.dialects.openai_responses.tools import flat_name, json_of

CALL = "call_"
RAW_CALL = "call_raw_"

ITEM_OF_KIND: Mapping[ToolKind, str] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "shell": "shell_call",
    "local_shell": "local_shell_call",
    "apply_patch": "apply_patch_call",
    "tool_search": "tool_search_call",
}
ID_PREFIX: Mapping[str, str] = {
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "shell_call": "sh_",
    "local_shell_call": "lsh_",
    "apply_patch_call": "apc_",
    "tool_search_call": "tsc_",
}
_LOCAL_SHELL_KEYS = ("command", "timeout_ms", "working_directory", "user", "env")
_SHELL_KEYS = ("commands", "timeout_ms", "max_output_length")
_PATCH_KEYS = ("type", "path", "diff")


def find_tool(name: str, tools: Iterable[Tool], loaded: Mapping[str, Any]) -> Tool | None:
    """The tool with the flat name `name`, among those shown and those loaded (in the form of `Toolset.wire`)."""
    for tool in tools:
        if tool.name == name:
            return tool
    wire = loaded.get(name)
    return None if wire is None else Tool(name, kind=wire["kind"], namespace=wire["namespace"], wire_name=wire["wire_name"])


def call_item(call: ToolCall, tool: Tool | None, item_ref: str, call_id: str | None = None) -> JsonObject:
    """The finished output item of a call. `item_ref` ends its item id; `call.id` (bare) ends its call id, unless `call_id` is given."""
    kind: ToolKind = "function" if tool is None else tool.kind
    bare = call.id or item_ref
    if kind == "custom":
        text = _freeform(call.arguments)
        own = (RAW_CALL if text is None else CALL) + bare
        item = _item("custom_tool_call", item_ref, "completed", call_id or own)
        item |= {"name": _wire_name(call, tool), "input": call.arguments if text is None else text}
        return _with_namespace(item, tool)
    call_id = call_id or CALL + bare
    values = _parsed(call.arguments)
    if kind == "tool_search":
        arguments = values if isinstance(values, dict) and _sendable(values) else call.arguments
        return _item("tool_search_call", item_ref, "completed", call_id) | {"execution": "client", "arguments": arguments}
    if kind != "function" and isinstance(values, dict) and _sendable(values):
        item = _item(ITEM_OF_KIND[kind], item_ref, "completed", call_id) | _BODIES[kind](values)
        if _fits(kind, values) and _parsed(arguments_of(item, "")) == values:
            return item
    status = "completed" if isinstance(values, dict) or not call.arguments else "incomplete"
    item = _item("function_call", item_ref, status, call_id)
    item |= {"name": _wire_name(call, tool), "arguments": call.arguments}
    return _with_namespace(item, tool)


def _item(kind: str, item_ref: str, status: str, call_id: str) -> JsonObject:
    return {"id": ID_PREFIX[kind] + item_ref, "type": kind, "status": status, "call_id": call_id}


def _wire_name(call: ToolCall, tool: Tool | None) -> str:
    return call.name if tool is None else tool.wire_name or tool.name


def _with_namespace(item: JsonObject, tool: Tool | None) -> JsonObject:
    return item if tool is None or tool.namespace is None else item | {"namespace": tool.namespace}


def _parsed(arguments: str) -> Any:
    """The parsed arguments; `None` if they are no JSON."""
    try:
        return json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _sendable(value: Any) -> bool:
    """Whether a value parsed by `json` can stand in an event (no lone surrogate, no integer past 64 bits)."""
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def _freeform(arguments: str) -> str | None:
    values = _parsed(arguments)
    if isinstance(values, dict) and values.keys() == {"input"} and isinstance(values["input"], str) and _sendable(values):
        return str(values["input"])
    return None


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _fits(kind: ToolKind, values: JsonObject) -> bool:
    """Whether the arguments have the types that the kind's call item promises to clients."""
    if kind == "shell":
        return _is_strings(values.get("commands")) and _is_count(values.get("timeout_ms")) and _is_count(values.get("max_output_length"))
    if kind == "local_shell":
        texts = (values.get("working_directory"), values.get("user"), *_env(values).values())
        return (
            _is_strings(values.get("command"))
            and _is_count(values.get("timeout_ms"))
            and all(isinstance(text, str | None) for text in texts)
        )
    wants_diff = values.get("type") in ("create_file", "update_file")
    return (
        (wants_diff or values.get("type") == "delete_file")
        and isinstance(values.get("path"), str)
        and (isinstance(values.get("diff"), str) if wants_diff else "diff" not in values)
    )


def _env(values: JsonObject) -> JsonObject:
    env = values.get("env")
    return env if isinstance(env, dict) else {}


def _local_shell_body(values: JsonObject) -> JsonObject:
    rest = {key: values[key] for key in ("timeout_ms", "working_directory", "user") if key in values}
    return {"action": {"type": "exec", "command": values.get("command"), "env": _env(values), **rest}}


def _shell_body(values: JsonObject) -> JsonObject:
    return {"action": {key: values.get(key) for key in _SHELL_KEYS}}


def _patch_body(values: JsonObject) -> JsonObject:
    return {"operation": {key: values[key] for key in _PATCH_KEYS if key in values}}


_BODIES = {"local_shell": _local_shell_body, "shell": _shell_body, "apply_patch": _patch_body}


def arguments_of(item: JsonObject, param: str) -> str:
    """The arguments, as JSON text, of a call item of any type in `ID_PREFIX`."""
    kind = item["type"]
    if kind == "function_call":
        arguments = item.get("arguments")
        if isinstance(arguments, dict):  # some clients send what they parsed
            return json_of(arguments, f"{param}.arguments")
        return "{}" if arguments is None else as_str(arguments, f"{param}.arguments")
    if kind == "custom_tool_call":
        text = as_str(item.get("input", ""), f"{param}.input")
        raw = isinstance(item.get("call_id"), str) and item["call_id"].startswith(RAW_CALL)
        return text if raw else json_of({"input": text}, f"{param}.input")
    if kind == "tool_search_call":
        arguments = item.get("arguments")
        return arguments if isinstance(arguments, str) else json_of({} if arguments is None else arguments, f"{param}.arguments")
    if kind == "apply_patch_call":
        return _picked(item, "operation", _PATCH_KEYS, param)
    return _picked(item, "action", _SHELL_KEYS if kind == "shell_call" else _LOCAL_SHELL_KEYS, param)


def _picked(item: JsonObject, key: str, names: tuple[str, ...], param: str) -> str:
    values = as_object(item.get(key), f"{param}.{key}")
    kept = {name: values[name] for name in names if values.get(name) is not None and not (name == "env" and values[name] == {})}
    return json_of(kept, f"{param}.{key}")


def name_of(item: JsonObject, param: str) -> str:
    """The flat name of the tool that a call item calls."""
    kind = item["type"]
    if kind in ("function_call", "custom_tool_call"):
        namespace = item.get("namespace")
        if namespace is not None:
            as_str(namespace, f"{param}.namespace")
        return flat_name(namespace, as_str(item.get("name"), f"{param}.name"))
    return str(kind).removesuffix("_call")
