"""Tools of a request: the fields `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dynamo.application.openai.generation_body import check_size
from dynamo.core.errors import InvalidRequest, Unsupported, nearest_name_hint
from dynamo.core.text import CallMode

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")


def check_tools(
    tools: Sequence[Any] | None, choice: str | dict[str, Any] | None
) -> tuple[tuple[str, ...] | None, CallMode]:
    """Check both fields. Returns the names of the tools that may be called, None for all of them,
    and whether calls are forced. Raises `InvalidRequest` and `Unsupported`."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("only with tools", field="tool_choice")
        return None, "free"
    check_size("tools", len(tools), MAX_TOOLS)
    names: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = _function_name(tool, f"tools[{index}]")
        if name in names:
            raise InvalidRequest(
                f"{name!r} is the name of an earlier tool, too",
                hint="give each tool a name of its own",
                field=f"tools[{index}].function.name",
            )
        names[name] = index
    callable_names, mode = _read_choice(choice, tuple(names))
    if mode == "free" and any(tool["function"].get("strict") is True for tool in tools):
        mode = "strict"
    return callable_names, mode


def names_one_function(choice: str | dict[str, Any] | None) -> bool:
    """Return whether a `tool_choice` names the function to call."""
    return isinstance(choice, dict) and choice.get("type") == "function"


def _function_name(tool: Any, field: str) -> str:
    if not isinstance(tool, dict):
        raise InvalidRequest("expected an object", field=field)
    kind = tool.get("type", "function")
    if kind != "function":
        raise Unsupported(
            f"tools of type {str(kind)[:64]!r} are not supported",
            hint="send tools of type function",
            field=f"{field}.type",
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise InvalidRequest("expected an object with a name", field=f"{field}.function")
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:144]!r} is not a valid tool name",
            hint="1 to 128 letters, digits and _ . -",
            field=f"{field}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest("expected a JSON schema", field=f"{field}.function.parameters")
    return name


def _read_choice(
    choice: str | dict[str, Any] | None, names: tuple[str, ...]
) -> tuple[tuple[str, ...] | None, CallMode]:
    if choice is None or choice == "auto":
        return None, "free"
    if choice == "none":
        return (), "free"
    if choice == "required":
        return None, "required"
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return (_choice_name(choice, names),), "named"
    if kind == "allowed_tools" and isinstance(choice, dict):
        allowed = choice.get("allowed_tools")
        fields = allowed if isinstance(allowed, dict) else choice
        mode, tools = fields.get("mode", "auto"), fields.get("tools")
        tools = tools if isinstance(tools, list) else ()
        check_size("tool_choice.tools", len(tools), MAX_TOOLS)
        allowed_names = tuple(_choice_name(tool, names) for tool in tools)
        if mode not in ("auto", "required") or (mode == "required" and not allowed_names):
            raise InvalidRequest(
                "expected mode auto or required, and tools",
                field="tool_choice.allowed_tools",
                param="tool_choice",
            )
        return allowed_names, "required" if mode == "required" else "free"
    raise InvalidRequest(
        "expected auto, none, required, or an object of type function or allowed_tools",
        field="tool_choice",
    )


def _choice_name(choice: Any, names: Sequence[str]) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("a function needs a name", field="tool_choice")
    if name not in names:
        raise InvalidRequest(
            f"{name[:64]!r} is not among the tools",
            hint=nearest_name_hint(name, names),
            field="tool_choice",
        )
    return name
