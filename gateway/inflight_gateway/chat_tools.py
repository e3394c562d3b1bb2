"""The tools of a chat: which ones can be called, whether one must be, and the resulting constraint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight_client import tool_calls
from inflight_gateway.errors import APIError, invalid
from inflight_gateway.tool_parsers import ToolParser, new_parser

__all__ = ["ToolPlan", "plan_tools"]

_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True)
class ToolPlan:
    """How a request uses tools.

    Attributes:
        described: the tools, for the chat template or a message.
        schemas: JSON Schemas of the arguments, by name.
        format: the format of the model's calls.
        required: whether the answer must be a call.
        callable: the functions that can be called, by name.
        mode: auto, required, or the name of the function that must be called.
        parallel: whether several calls are allowed.
    """

    described: list[Any]
    schemas: Mapping[str, Any]
    format: str
    callable: Mapping[str, Mapping[str, Any]]
    mode: str
    parallel: bool

    @property
    def required(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode != "auto"

    def constraint(self) -> dict[str, Any] | None:
        """The constraint on the answer, as keys of `structured_outputs`; None: no constraint.

        A call that must be made is constrained: the name is one of a tool, and the arguments validate.  Where the model
        decides whether to call, its calls are its own, except that there is at most one without `parallel`, that only
        the tools of `allowed_tools` are called, and that arguments of tools with `strict` validate.

        Raises:
            APIError: the format cannot write a name.
        """
        if self.required:
            return self.calls()
        strict = any(function.get("strict") for function in self.callable.values())
        if self.parallel and not strict and len(self.callable) == len(self.schemas):
            return None
        return self._keys("auto")

    def calls(self) -> dict[str, Any]:
        """As `constraint`, for an answer that consists of calls."""
        return self._keys(self.mode if self.required else "required")

    def _keys(self, choice: str) -> dict[str, Any]:
        tools = [
            {"name": name, "parameters": function.get("parameters")}
            if self.required or function.get("strict")
            else {"name": name, "parameters": _ANY_ARGUMENTS}
            for name, function in self.callable.items()
        ]
        try:
            return tool_calls(tools, self.format, choice, self.parallel)  # type: ignore[arg-type]
        except ValueError as error:
            raise invalid(f"tools: {error}", "tools") from None

    def parser(self) -> ToolParser:
        """A parser for one answer."""
        return new_parser(self.format, self.schemas)


def plan_tools(tools: Any, choice: Any, parallel: bool | None, format: str) -> ToolPlan | None:
    """The plan of a request; None if no tool can be called: then the model gets no tools.

    Args:
        tools, choice, parallel: `tools`, `tool_choice` and `parallel_tool_calls` of the request.
        format: the format of the model's calls.

    Raises:
        APIError: they are not of OpenAI's form.
    """
    functions = _functions(tools)
    mode, allowed = _choice(choice, functions)
    if not functions or mode == "none":
        return None
    return ToolPlan(
        described=list(tools),
        schemas={name: function.get("parameters") for name, function in functions.items()},
        format=format,
        callable={name: functions[name] for name in allowed},
        mode=mode,
        parallel=parallel is not False,
    )


def _functions(tools: Any) -> dict[str, Mapping[str, Any]]:
    """The functions, by name."""
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise invalid("tools: a list is expected", "tools")
    found: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            raise _wrong(where, f"type {kind!r} is not supported; send tools of type function", "unsupported_tool_type")
        function = tool.get("function") if kind == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise _wrong(where, 'a tool such as {"type": "function", "function": {"name": "f"}} is expected')
        if name in found:
            raise _wrong(where, f"there is another tool with the name {name!r}")
        if not isinstance(function.get("parameters", {}), (Mapping, type(None))):
            raise _wrong(f"{where}.function.parameters", "a JSON Schema is expected")
        found[name] = function
    return found


def _choice(choice: Any, functions: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Mode (none, auto, required, or the name of a tool) and the names of the tools that can be called."""
    mode, allowed = choice, list(functions)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        mode = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(mode, str) or mode not in functions:
            raise _unknown(mode, functions)
        return mode, [mode]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        given = choice.get("allowed_tools")
        given = given if isinstance(given, Mapping) else {}
        mode, listed = given.get("mode"), given.get("tools")
        allowed = [_name(tool, functions) for tool in listed] if isinstance(listed, list) else []
        if not allowed:
            raise _wrong("tool_choice", "allowed_tools: a mode and a list of tools are expected")
    if mode is None and not isinstance(choice, Mapping):
        mode = "auto"
    if mode not in ("auto", "none", "required"):
        raise _wrong("tool_choice", f"{choice!r} came; auto, none, required or a function is expected")
    if mode == "required" and not functions:
        raise _wrong("tool_choice", "there are no tools; give some in tools")
    return mode, allowed


def _name(tool: Any, functions: Mapping[str, Any]) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in functions:
        raise _unknown(name, functions)
    return name


def _unknown(name: Any, functions: Mapping[str, Any]) -> APIError:
    return _wrong("tool_choice", f"no tool has the name {name!r}; tools: {', '.join(functions) or 'none'}")


def _wrong(where: str, message: str, code: str | None = None) -> APIError:
    return invalid(f"{where}: {message}", where.partition("[")[0], code)
