#!/usr/bin/env python3
"""Writes docs/reference/: every key of `model.json`, and every command with its options.

    python docs/generate_reference.py

The texts come from the docstrings of the configuration's classes and from the help of the commands, the topics from
the table in docs/operations/configure.md.  `make docs` runs this file, and `make test` compares its output with the
pages in the repository.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec import NODEFAULT, Meta

from inflight.config import EngineConfig
from inflight_tools.cli import app

DOCS = Path(__file__).parent

_CONFIGURATION = """\
# Keys of `model.json`

Every key of a model's configuration, by topic, with its type, its default and its meaning.
[Configure](../operations/configure.md) says where they are set, and which to set first.
`inflight serve --set KEY=VALUE` takes them, and so does [`LLM`](../python.md).

<!-- Written by docs/generate_reference.py from the docstring of EngineConfig; edit that. -->
"""
_COMMANDS = """\
# Commands

Every command of `inflight` with its arguments and options. `inflight COMMAND --help` prints the same.

<!-- Written by docs/generate_reference.py from the help of the commands; edit that. -->
"""


def pages() -> dict[Path, str]:
    """The text of each generated page."""
    folder = DOCS / "reference"
    return {folder / "configuration.md": configuration(), folder / "commands.md": commands()}


def topics() -> list[tuple[str, list[str]]]:
    """Topics and their keys, in the order of the table "All keys"."""
    page = (DOCS / "operations" / "configure.md").read_text(encoding="utf-8")
    rows = page.split("\n## All keys\n")[1].split("\n## ")[0]
    found = re.findall(r"(?m)^\| (.+?) \| (`.+?`) \|", rows)
    return [(topic, re.findall(r"`(\w+)`", keys)) for topic, keys in found]


def configuration() -> str:
    parts = [_CONFIGURATION]
    for topic, keys in topics():
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n")
        parts += [entry(EngineConfig, key, "###") for key in keys]
    parts.append("## Objects\n\nThe keys of objects within these keys.\n")
    for struct in nested(EngineConfig):
        parts.append(f"### {struct.__name__}\n\n{_prose(_summary(struct))}\n")
        parts += [entry(struct, key, "####") for key in struct.__struct_fields__]
    return "\n".join(parts)


def entry(struct: type[msgspec.Struct], key: str, heading: str) -> str:
    """A key as a heading, a line with type and default, and its meaning."""
    field = next(field for field in msgspec.structs.fields(struct) if field.name == key)
    hint = get_type_hints(struct, include_extras=True)[key]
    value = field.default_factory() if field.default_factory is not NODEFAULT else field.default
    default = "required" if value is NODEFAULT else f"default: {_json(value)}"
    return f"{heading} `{key}`\n\n{_type(hint)}; {default}\n\n{_prose(descriptions(struct)[key])}\n"


def descriptions(struct: type) -> dict[str, str]:
    """The meaning of each field, from the docstrings' sections `Attributes:`; an entry can describe several fields."""
    found = {}
    for part in struct.__mro__[: struct.__mro__.index(msgspec.Struct)]:
        section = inspect.cleandoc(part.__doc__ or "").split("\nAttributes:\n")[1]
        for names, text in re.findall(r"(?m)^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section):
            for name in names.split(", "):
                found[name] = re.sub(r"\s+", " ", text)
    return found


def _summary(struct: type) -> str:
    return re.sub(r"\s+", " ", inspect.cleandoc(struct.__doc__ or "").split("\n\n")[0])


def nested(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """The classes of objects that are values of keys, by the order of these keys."""
    for hint in get_type_hints(struct).values():
        yield from (part for part in _parts(hint) if isinstance(part, type) and issubclass(part, msgspec.Struct))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _type(hint: Any) -> str:
    """A type as readers of JSON know it, with its limits."""
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        return _type(base) + "".join(_limits(meta) for meta in metas if isinstance(meta, Meta))
    if get_origin(hint) is Literal:
        return ", ".join(_json(value) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type(part) for part in sorted(get_args(hint), key=lambda part: part is NoneType))
    if get_origin(hint) is list:
        return f"list of {_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"object of {_type(get_args(hint)[1])}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}[hint]


def _limits(meta: Meta) -> str:
    low = next(
        (f"{name} {value:,}" for name, value in (("from", meta.ge), ("above", meta.gt)) if value is not None), ""
    )
    high = next((f"{name} {value:,}" for name, value in (("to", meta.le), ("below", meta.lt)) if value is not None), "")
    bounds = " ".join(part for part in (low, high) if part)
    pattern = f"pattern `{meta.pattern}`" if meta.pattern else ""
    length = f"at most {meta.max_length} characters" if meta.max_length else ""
    said = ", ".join(part for part in (bounds, pattern, length) if part)
    return f" ({said})" if said else ""


def _json(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        value = {}
    return f"`{msgspec.json.encode(value).decode()}`"


def _prose(text: str) -> str:
    """A docstring's text as Markdown: pages that it names become links, `None` becomes JSON's null."""
    text = text[0].upper() + text[1:].replace("`None`", "`null`")
    return re.sub(r"(?<!`)docs/([\w/-]+\.md)", r"[\1](../\1)", text)


def commands() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join([_COMMANDS, *_commands("inflight", group)])


def _commands(before: str, group: Any) -> Iterator[str]:
    """The commands of a group, and those of the groups in it."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(f"{before} {name}", command)
        elif not command.hidden:
            yield _command(f"{before} {name}", command)


def _command(name: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    usage = [name, *(argument.metavar or argument.name.upper() for argument in arguments), "[OPTIONS]"]
    parts = [f"## `{name}`\n", f"```text\n{' '.join(usage)}\n```\n", f"{inspect.cleandoc(command.help)}\n"]
    if arguments:
        parts.append(_table("argument", ((f"`{one.metavar or one.name.upper()}`", one) for one in arguments)))
    parts.append(_table("option", ((", ".join(map("`{}`".format, _names(one))), one) for one in options)))
    return "\n".join(parts)


def _names(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def _table(kind: str, rows: Any) -> str:
    lines = [f"| {kind} | default | |", "|---|---|---|"]
    for names, param in rows:
        text = re.sub(r"\s+", " ", getattr(param, "help", None) or "")
        if param.envvar:
            text += f" Variable: `{param.envvar}`."
        lines.append(f"| {names} | {_default(param)} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _default(param: Any) -> str:
    shown = getattr(param, "show_default", None)
    if param.required:
        return "required"
    if isinstance(shown, str):
        return shown
    value = param.default() if callable(param.default) else param.default
    if value is True:
        return f"`{param.opts[0]}`"
    return f"`{value}`" if value else ""


def main() -> None:
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
