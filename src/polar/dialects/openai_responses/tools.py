"""Tools of a Responses request: what the model sees of them.

The model sees functions only. Whatever else a client declares is flattened to one:

* a tool of a namespace is `namespace__name`;
* a custom (freeform) tool takes one required string, `input`; its grammar goes into the description;
* `shell`, `local_shell`, `apply_patch` and a client-executed `tool_search` take what their call items hold;
* hosted tools (web search, MCP, ...) and unknown types are left out: nobody here could run them.

How calls of these are written and read back is in `calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from polar.chat import JsonObject, Tool, ToolChoice
from polar.dialects.base import as_list, as_object, as_str, bad


def json_of(value: Any, param: str) -> str:
    """Compact JSON text of untrusted JSON; what orjson refuses (nested too deep, an integer past 64 bits) is a bad request."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise bad(str(error), param) from error


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _object(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


def _strings(description: str) -> JsonObject:
    return {"type": "array", "items": {"type": "string"}, "description": description}


_BUILT_IN: Mapping[str, Tool] = {
    "local_shell": Tool(
        name="local_shell",
        description="Runs a command on the user's machine and returns its output.",
        parameters=_object(
            {
                "command": _strings("The command and its arguments"),
                "timeout_ms": {"type": "integer", "description": "Milliseconds after which the command is stopped"},
                "working_directory": {"type": "string", "description": "Where to run it"},
            },
            "command",
        ),
        kind="local_shell",
    ),
    "shell": Tool(
        name="shell",
        description="Runs shell commands and returns the output of each.",
        parameters=_object(
            {
                "commands": _strings("The commands to run"),
                "timeout_ms": {"type": "integer", "description": "Milliseconds after which the commands are stopped"},
                "max_output_length": {"type": "integer", "description": "The most characters of output to return"},
            },
            "commands",
        ),
        kind="shell",
    ),
    "apply_patch": Tool(
        name="apply_patch",
        description="Creates, updates or deletes one file.",
        parameters=_object(
            {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string", "description": "The file"},
                "diff": {"type": "string", "description": "The changes as a V4A diff; left out for a deletion"},
            },
            "type",
            "path",
        ),
        kind="apply_patch",
    ),
}
_TOOL_SEARCH = Tool(
    name="tool_search",
    description="Searches for further tools. Those found can be called from then on.",
    parameters=_object({"query": {"type": "string"}}, "query"),
    kind="tool_search",
)


@dataclass(slots=True)
class Toolset:
    """The tools of one request by flat name. `visible` are shown to the model; `loaded` can be called, but were shown elsewhere
    (in the output of a tool search) or not yet."""

    visible: dict[str, Tool] = field(default_factory=dict)
    loaded: dict[str, Tool] = field(default_factory=dict)

    def declare(self, declarations: Any, param: str) -> None:
        """Adds a `tools` list. Raises `InvalidRequest` where two different tools would share a flat name."""
        items = as_list(declarations, param)
        json_of(items, param)
        read = [_read(as_object(item, f"{param}[{index}]"), f"{param}[{index}]") for index, item in enumerate(items)]
        searchable = any(tool.kind == "tool_search" for tools in read for tool, _ in tools) or any(
            tool.kind == "tool_search" for tool in self.visible.values()
        )
        for index, tools in enumerate(read):
            for tool, deferred in tools:
                self._add(self.loaded if deferred and searchable else self.visible, tool, f"{param}[{index}]")

    def load(self, declarations: Any, param: str) -> list[Tool]:
        """Adds the tools that a search found, and returns them."""
        items = as_list(declarations, param)
        found = [tool for index, item in enumerate(items) for tool, _ in _read(as_object(item, f"{param}[{index}]"), f"{param}[{index}]")]
        for tool in found:
            if tool.name not in self.visible:
                self._add(self.loaded, tool, param)
        return found

    def _add(self, into: dict[str, Tool], tool: Tool, param: str) -> None:
        known = self.visible.get(tool.name) or self.loaded.get(tool.name)
        if known is not None and _identity(known) != _identity(tool):
            raise bad(f"two different tools have the name {tool.name!r}; rename one of them", param)
        into[tool.name] = tool

    def wire(self) -> JsonObject:
        """`loaded` as JSON, for the encoder."""
        return {name: {"kind": t.kind, "namespace": t.namespace, "wire_name": t.wire_name} for name, t in self.loaded.items()}


def _identity(tool: Tool) -> tuple[str, str | None, str | None]:
    return tool.kind, tool.namespace, tool.wire_name


def _read(item: JsonObject, param: str, namespace: str | None = None) -> list[tuple[Tool, bool]]:
    """The tools of one declaration, each with whether it is deferred; none for a hosted or unknown type."""
    kind = as_str(item.get("type", "function"), f"{param}.type")
    if kind in ("function", "custom"):
        name = as_str(item.get("name"), f"{param}.name")
        if not name:
            raise bad("must not be empty", f"{param}.name")
        description = item.get("description")
        if description is not None:
            as_str(description, f"{param}.description")
        tool = Tool(flat_name(namespace, name), description, namespace=namespace, wire_name=name if namespace else None)
        if kind == "function":
            parameters = item.get("parameters")
            if parameters is not None:
                tool = replace(tool, parameters=as_object(parameters, f"{param}.parameters"))
        else:
            tool = _custom(tool, item, param)
        return [(tool, item.get("defer_loading") is True)]
    if kind == "namespace" and namespace is None:
        return _namespace(item, param)
    if kind in _BUILT_IN:
        return [(_BUILT_IN[kind], False)]
    if kind == "tool_search" and item.get("execution") == "client":
        tool = _TOOL_SEARCH
        if item.get("description") is not None:
            tool = replace(tool, description=as_str(item["description"], f"{param}.description"))
        if item.get("parameters") is not None:
            tool = replace(tool, parameters=as_object(item["parameters"], f"{param}.parameters"))
        return [(tool, False)]
    return []


def _namespace(item: JsonObject, param: str) -> list[tuple[Tool, bool]]:
    """A namespace's own description is told once, before that of its first tool."""
    name = as_str(item.get("name"), f"{param}.name")
    members = as_list(item.get("tools", []), f"{param}.tools")
    found = [
        pair
        for index, member in enumerate(members)
        for pair in _read(as_object(member, f"{param}.tools[{index}]"), f"{param}.tools[{index}]", name)
    ]
    about = item.get("description")
    if found and about:
        as_str(about, f"{param}.description")
        first, deferred = found[0]
        found[0] = (replace(first, description=f"{about}\n\n{first.description}" if first.description else about), deferred)
    return found


def _custom(tool: Tool, item: JsonObject, param: str) -> Tool:
    description = tool.description
    if item.get("format") is not None:
        form = as_object(item["format"], f"{param}.format")
        nested = form.get("grammar")
        grammar: JsonObject = nested if isinstance(nested, dict) else form
        definition = grammar.get("definition") if form.get("type") == "grammar" else None
        if isinstance(definition, str):
            told = f"The input must match this {grammar.get('syntax') or ''} grammar:\n{definition}".replace("  ", " ", 1)
            description = f"{description}\n\n{told}" if description else told
    parameters = _object({"input": {"type": "string"}}, "input")
    return replace(tool, description=description, parameters=parameters, kind="custom")


def read_choice(value: Any, tools: Mapping[str, Tool]) -> ToolChoice:
    """`tool_choice` in all its forms. One that names a tool which was left out (a hosted one, say) is `auto`."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise bad(f"must be auto, none, required or an object, not {value!r}", "tool_choice")
        return ToolChoice() if value == "required" and not tools else ToolChoice(value)  # type: ignore[arg-type]
    choice = as_object(value, "tool_choice")
    kind = as_str(choice.get("type"), "tool_choice.type")
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    if kind in ("function", "custom"):
        name = as_str(choice.get("name"), "tool_choice.name")
        namespace = choice.get("namespace")
        name = flat_name(namespace, name) if isinstance(namespace, str) else name
        if name not in tools:
            raise bad(f"there is no tool {name!r} in tools", "tool_choice.name")
        return ToolChoice("named", name)
    return ToolChoice("named", kind) if kind in tools and tools[kind].kind == kind else ToolChoice()


def _allowed(choice: JsonObject, tools: Mapping[str, Tool]) -> ToolChoice:
    """The set itself is a hint that keeps the tools (and so the prompt) as they are; a single tool that must be called is named."""
    mode = as_str(choice.get("mode", "auto"), "tool_choice.mode")
    allowed = as_list(choice.get("tools", []), "tool_choice.tools")
    if mode != "required":
        return ToolChoice()
    names = {
        flat_name(item.get("namespace"), str(item.get("name") or item.get("type")))
        for item in (as_object(item, f"tool_choice.tools[{index}]") for index, item in enumerate(allowed))
    } & tools.keys()
    if not names:
        return ToolChoice()
    return ToolChoice("named", names.pop()) if len(names) == 1 else ToolChoice("required")
