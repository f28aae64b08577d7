"""Anthropic tool definitions and tool choice. Knows no messages beyond the text that stands for a tool reference.

Three kinds of tools arrive in one list, told apart by `type`:

* *custom* tools (no `type`, or `"custom"`): taken as they are;
* Anthropic's *client* tools (`bash_20250124`, `text_editor_...`, `memory_...`, `computer_...`): the harness executes them, but their
  schema is known to Claude alone, so it is spelled out here for any other model;
* *server* tools (`web_search_...`, `web_fetch_...`, `code_execution_...`, tool search, advisor, toolsets, MCP): only Anthropic's servers
  could execute them. They are withheld from the model, which therefore never calls them; a choice that names one becomes `auto`.
  A type that this file does not know counts as one of these, unless it brings an `input_schema`: then it is as good as custom.

A tool with `defer_loading` is not part of the prompt's head. Where a message later refers to it, its definition stands in that
message's text, as the provider does it, so that loading a tool never changes what the model has read before. If the request offers the
provider's own tool search, which nobody here could run, nothing is deferred.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.chat import JsonObject, Tool, ToolChoice
from polar.dialects.base import as_list, as_object, as_str, bad


@dataclass(slots=True)
class Toolbox:
    """The tools of one request.

    `head` is what the model sees from the start, `deferred` what a message may load, `loaded` what one has loaded,
    `server` the names of the provider's own tools, which are withheld.
    """

    head: dict[str, Tool] = field(default_factory=dict)
    deferred: dict[str, Tool] = field(default_factory=dict)
    loaded: dict[str, Tool] = field(default_factory=dict)
    server: set[str] = field(default_factory=set)

    def reference(self, name: str) -> str:
        """The text that stands for a reference to the tool `name`: its definition if it was deferred."""
        tool = self.deferred.get(name)
        return f"[tool: {name}]" if tool is None else self.define(tool)

    def define(self, tool: Tool) -> str:
        """The text that makes a tool known in the middle of a conversation."""
        self.loaded[tool.name] = tool
        return f"The tool {tool.name} can be called from here on:\n{dump(tool.schema(), 'tools')}"


def parse_tools(value: Any) -> Toolbox:
    """The toolbox of `body["tools"]`; `None` gives an empty one."""
    toolbox = Toolbox()
    if value is None:
        return toolbox
    search = False
    for index, item in enumerate(as_list(value, "tools")):
        path = f"tools.{index}"
        definition = as_object(item, path)
        tool = parse_tool(definition, path)
        if tool is None:
            kind = definition["type"]
            search = search or kind.startswith("tool_search_tool_")
            if isinstance(definition.get("name"), str):
                toolbox.server.add(definition["name"])
            continue
        if tool.name in toolbox.head or tool.name in toolbox.deferred:
            raise bad(f"tool names must be unique, but {tool.name!r} comes twice", f"{path}.name")
        (toolbox.deferred if definition.get("defer_loading") is True else toolbox.head)[tool.name] = tool
    if search:
        toolbox.head |= toolbox.deferred
        toolbox.deferred = {}
    return toolbox


def parse_tool(definition: JsonObject, path: str) -> Tool | None:
    """One tool as the model shall see it; `None` for a tool that only the provider could execute."""
    kind = definition.get("type")
    if kind is not None and kind != "custom":
        parameters = _client_tool(as_str(kind, f"{path}.type"))
        if parameters is not None:
            return Tool(_name(definition, path), _description(definition, path) or _CLIENT_TOOLS[kind.split("_2", 1)[0]], parameters)
        if "input_schema" not in definition:
            if kind == "function":
                raise bad("'function' is another provider's form; a tool here has name, description and input_schema", f"{path}.type")
            return None
    name = _name(definition, path)
    if "input_schema" not in definition:
        raise bad("field required", f"{path}.input_schema")
    return Tool(name, _description(definition, path), schema_object(definition["input_schema"], f"{path}.input_schema"))


def parse_tool_choice(value: Any, toolbox: Toolbox) -> tuple[ToolChoice, bool | None]:
    """The choice and `parallel_tool_calls` (`False` if switched off, else `None`: not said).

    A deferred tool that is named here is moved to the head: without it the choice could not be met.
    """
    if value is None:
        return ToolChoice(), None
    choice = as_object(value, "tool_choice")
    parallel = choice.get("disable_parallel_tool_use")
    if parallel is not None and not isinstance(parallel, bool):
        raise bad("must be true or false", "tool_choice.disable_parallel_tool_use")
    parallel_tool_calls = False if parallel else None
    match choice.get("type"):
        case "auto":
            return ToolChoice("auto"), parallel_tool_calls
        case "none":
            return ToolChoice("none"), parallel_tool_calls
        case "any":
            return ToolChoice("required" if toolbox.head else "auto"), parallel_tool_calls
        case "tool":
            name = as_str(choice.get("name"), "tool_choice.name")
            if name in toolbox.deferred:
                toolbox.head[name] = toolbox.deferred.pop(name)
            if name in toolbox.head:
                return ToolChoice("named", name), parallel_tool_calls
            if name in toolbox.server:
                return ToolChoice("auto"), parallel_tool_calls
            raise bad(f"tool {name!r} is not among the provided tools", "tool_choice.name")
    raise bad("must be 'auto', 'any', 'tool' or 'none'", "tool_choice.type")


def dump(value: Any, param: str) -> str:
    """Compact JSON text of a value that came out of a request. Raises `InvalidRequest` for one nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # deeper than 254 levels, an integer over 64 bits or a lone surrogate: the slow writer takes those
        try:
            return json.dumps(value, separators=(",", ":"))
        except (RecursionError, TypeError, ValueError) as error:
            raise bad(f"cannot be written as JSON: {error}", param) from error


def schema_object(value: Any, param: str) -> JsonObject:
    """A JSON schema, as it came. Raises `InvalidRequest` for one nested too deeply to be written again by whoever needs it later."""
    schema = as_object(value, param)
    try:
        orjson.dumps(schema)
    except orjson.JSONEncodeError as error:
        level: list[Any] = [schema]
        for _ in range(_MAX_DEPTH):
            level = [
                inner for each in level for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            ]
        if level:
            raise bad(f"is nested more than {_MAX_DEPTH} levels deep", param) from error
    return schema


def _name(definition: JsonObject, path: str) -> str:
    name = as_str(definition.get("name"), f"{path}.name")
    if not name:
        raise bad("must not be empty", f"{path}.name")
    return name


def _description(definition: JsonObject, path: str) -> str | None:
    description = definition.get("description")
    return None if description is None else as_str(description, f"{path}.description")


_MAX_DEPTH = 250
_CLIENT_TOOLS = {
    "bash": "Runs a command in a persistent bash session.",
    "text_editor": "Views, creates and edits text files.",
    "memory": "Reads and writes files in the memory directory /memories.",
    "computer": "Uses a computer through screenshots, mouse and keyboard.",
}


def _client_tool(kind: str) -> JsonObject | None:
    """The parameters of one of Anthropic's client tools, `kind` being its name and the date of its version."""
    match kind.split("_2", 1)[0]:
        case "bash":
            return _BASH
        case "text_editor":
            return _editor(legacy=kind <= "text_editor_20250124")
        case "memory":
            return _MEMORY
        case "computer":
            return _COMPUTER
    return None


def _object(properties: JsonObject, required: list[str]) -> JsonObject:
    return {"type": "object", "properties": properties, "required": required}


def _string(description: str) -> JsonObject:
    return {"type": "string", "description": description}


_RANGE: JsonObject = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line to view, from 1; -1 as last means the end of the file.",
}

_BASH = _object(
    {
        "command": _string("The command to run; required unless restart is true."),
        "restart": {"type": "boolean", "description": "Restarts the session instead of running a command."},
    },
    [],
)


def _editor(legacy: bool) -> JsonObject:
    commands = ["view", "create", "str_replace", "insert"]
    inserted = "new_str" if legacy else "insert_text"
    properties: JsonObject = {
        "command": {"type": "string", "enum": [*commands, "undo_edit"] if legacy else commands},
        "path": _string("Absolute path of the file or directory."),
        "view_range": _RANGE,
        "file_text": _string("For create: the whole content of the file."),
        "old_str": _string("For str_replace: the text to replace; it must occur exactly once."),
        "new_str": _string("For str_replace: the text to put in its place."),
        "insert_line": {"type": "integer", "description": "For insert: the line after which to insert; 0 is the top."},
    }
    properties.setdefault(inserted, _string("For insert: the text to insert."))
    return _object(properties, ["command", "path"])


_MEMORY = _object(
    {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        "path": _string("Path below /memories; for all commands but rename."),
        "view_range": _RANGE,
        "file_text": _string("For create: the whole content of the file."),
        "old_str": _string("For str_replace: the text to replace."),
        "new_str": _string("For str_replace: the text to put in its place."),
        "insert_line": {"type": "integer", "description": "For insert: the line after which to insert."},
        "insert_text": _string("For insert: the text to insert."),
        "old_path": _string("For rename: the present path."),
        "new_path": _string("For rename: the new path."),
    },
    ["command"],
)

_POINT: JsonObject = {"type": "array", "items": {"type": "integer"}, "description": "[x, y] in pixels from the top left corner."}

_COMPUTER = _object(
    {
        "action": {
            "type": "string",
            "enum": [
                "screenshot",
                "key",
                "type",
                "mouse_move",
                "left_click",
                "right_click",
                "middle_click",
                "double_click",
                "triple_click",
                "left_click_drag",
                "left_mouse_down",
                "left_mouse_up",
                "scroll",
                "hold_key",
                "wait",
                "cursor_position",
                "zoom",
            ],
        },
        "coordinate": _POINT,
        "start_coordinate": _POINT,
        "text": _string("The text to type, or the key or keys to press."),
        "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
        "scroll_amount": {"type": "integer"},
        "duration": {"type": "number", "description": "For wait and hold_key: seconds."},
        "region": {"type": "array", "items": {"type": "integer"}, "description": "For zoom: [x1, y1, x2, y2]."},
    },
    ["action"],
)
