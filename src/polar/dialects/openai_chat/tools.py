"""The tools of a Chat Completions body, in the two forms that it has had, and the choice among them."""

from __future__ import annotations

from typing import Any

from polar.chat import JsonObject, Tool, ToolChoice
from polar.dialects.base import as_list, as_object, as_str, bad
from polar.dialects.openai_chat.reading import as_json, list_at, object_at, str_at

CUSTOM_PARAMETERS: JsonObject = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""What the model sees of a freeform (`custom`) tool: one string."""


def parse_tools(body: JsonObject) -> tuple[tuple[Tool, ...], frozenset[str], bool]:
    """The tools, the types of those left out, and whether they came as legacy functions."""
    listed = list_at(body, "tools")
    functions = list_at(body, "functions")
    if functions and listed:
        raise bad("deprecated; use tools or functions, not both", "functions")
    tools: dict[str, Tool] = {}
    dropped: set[str] = set()
    for index, value in enumerate(functions):
        _add(tools, _function(value, f"functions[{index}]"), f"functions[{index}].name")
    for index, value in enumerate(listed):
        param = f"tools[{index}]"
        item = as_object(value, param)
        kind = str_at(item, "type", param) or "function"
        if kind == "function":
            _add(tools, _function(item.get("function"), f"{param}.function"), f"{param}.function.name")
        elif kind == "custom":
            _add(tools, _custom(item.get("custom"), f"{param}.custom"), f"{param}.custom.name")
        else:
            dropped.add(kind)
    return tuple(tools.values()), frozenset(dropped), bool(functions)


def _add(tools: dict[str, Tool], tool: Tool, param: str) -> None:
    if tools.setdefault(tool.name, tool) != tool:
        raise bad(f"two different tools are called {tool.name!r}", param)


def _function(value: Any, param: str) -> Tool:
    function = as_object(value, param)
    name = as_str(function.get("name"), f"{param}.name")
    description = str_at(function, "description", param)
    parameters = function.get("parameters")
    if not parameters and not isinstance(parameters, list | str):
        return Tool(name, description)
    parameters = as_object(parameters, f"{param}.parameters")
    as_json(parameters, f"{param}.parameters")
    return Tool(name, description, parameters)


def _custom(value: Any, param: str) -> Tool:
    custom = as_object(value, param)
    description = str_at(custom, "description", param)
    layout = object_at(custom, "format", param)
    grammar = object_at(layout, "grammar", f"{param}.format") or layout
    definition = str_at(grammar, "definition", f"{param}.format")
    if definition:
        syntax = str_at(grammar, "syntax", f"{param}.format") or "lark"
        description = f"{description or ''}\n\nThe input must follow this {syntax} grammar:\n{definition}".strip()
    return Tool(as_str(custom.get("name"), f"{param}.name"), description, CUSTOM_PARAMETERS, kind="custom")


def parse_tool_choice(body: JsonObject, tools: tuple[Tool, ...], dropped: frozenset[str], legacy: bool) -> ToolChoice:
    key = "function_call" if legacy else "tool_choice"
    value = body.get(key)
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise bad(f"must be auto, none, required or an object that names a tool, not {value!r}", key)
        choice = ToolChoice("auto" if value == "auto" else "none" if value == "none" else "required")
    else:
        choice = _named_choice(as_object(value, key), key, legacy)
    if choice.mode in ("auto", "none") or choice.name in {tool.name for tool in tools} or (tools and choice.mode == "required"):
        return choice
    if dropped:
        return ToolChoice()
    raise bad("is only allowed with tools" if choice.name is None else f"no tool is called {choice.name!r}", key)


def _named_choice(value: JsonObject, key: str, legacy: bool) -> ToolChoice:
    if legacy:
        return ToolChoice("named", as_str(value.get("name"), f"{key}.name"))
    kind = as_str(value.get("type"), f"{key}.type")
    if kind in ("function", "custom"):
        return ToolChoice("named", as_str(as_object(value.get(kind), f"{key}.{kind}").get("name"), f"{key}.{kind}.name"))
    if kind == "allowed_tools":
        allowed = as_object(value.get(kind), f"{key}.{kind}")
        mode = as_str(allowed.get("mode"), f"{key}.{kind}.mode")
        names = [_allowed_name(item, f"{key}.{kind}.tools") for item in as_list(allowed.get("tools"), f"{key}.{kind}.tools")]
        if mode not in ("auto", "required"):
            raise bad(f"must be auto or required, not {mode!r}", f"{key}.{kind}.mode")
        if mode == "auto":
            return ToolChoice()
        return ToolChoice("named", names[0]) if len(names) == 1 else ToolChoice("required")
    return ToolChoice("named", kind)


def _allowed_name(value: Any, param: str) -> str:
    item = as_object(value, param)
    kind = as_str(item.get("type"), f"{param}.type")
    inner = item.get(kind)
    return as_str(as_object(inner, param).get("name"), f"{param}.name") if inner is not None else kind
