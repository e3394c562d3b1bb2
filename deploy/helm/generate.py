"""Writes the parts of the chart that follow from other files: `python deploy/helm/generate.py`.

- `model.settings` in values.schema.json, from the backend's `EngineConfig`: a misspelt key or a wrong value is refused
  when the chart is rendered, not when the model loads.
- the table of values in the chart's README.md, from the comments of values.yaml.

Tests compare the files with what this script would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from inflight.config import EngineConfig
from inflight.vllm_options import OTHER_NAMES, SPELLINGS

CHART = Path(__file__).parent / "inflight"
SCHEMA, VALUES, README = CHART / "values.schema.json", CHART / "values.yaml", CHART / "README.md"

_BEGIN, _END = "<!-- values: written by deploy/helm/generate.py -->", "<!-- end of values -->"
_EXACT = 2**53  # Helm's numbers are floats, which limits above this one would be rounded to
_NOTES = ("title", "description", "default")  # they repeat docs/operations/configure.md


def settings_schema() -> dict[str, Any]:
    """JSON schema of `model.settings`: the keys of model.json, and what the backend takes for them from vLLM."""
    (found,), components = msgspec.json.schema_components([EngineConfig])
    properties = _inlined(found, components)["properties"]
    for name, spellings in SPELLINGS.items():
        properties[name] = {"anyOf": [properties[name], {"enum": list(spellings)}]}
    # The backend compares their values with what it does anyway, and says what to do instead.
    properties |= {name: {} for name in OTHER_NAMES}
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(properties.items()))}


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """The schema without references, titles and texts."""
    if isinstance(schema, list):
        return [_inlined(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
    given = {key: value for key, value in schema.items() if key not in _NOTES and not _is_huge(value)}
    found = {key: _inlined(value, components) for key, value in given.items()}
    if "properties" in found:  # a key can have the name of a note
        found["properties"] = {key: _inlined(value, components) for key, value in schema["properties"].items()}
    return found


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > _EXACT


def values_schema() -> str:
    """values.schema.json, with the settings as they are now."""
    schema = json.loads(SCHEMA.read_text())
    schema["properties"]["model"]["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def values_table() -> str:
    """A row for each value: key, default, and the comment above it.  Groups have rows if they have comments."""
    lines = VALUES.read_text().splitlines()
    rows = ["| value | default | |", "|---|---|---|"]
    for path, line, value in _entries(yaml.compose("\n".join(lines)), ()):
        said = _comment(lines, line)
        is_group = isinstance(value, yaml.MappingNode) and bool(value.value) and not value.flow_style
        if said or not is_group:
            default = "" if is_group else f"`{json.dumps(yaml.safe_load(yaml.serialize(value)))}`"
            rows.append(f"| `{'.'.join(path)}` | {default} | {said} |".replace("  ", " "))
    return "\n".join(rows)


def _entries(node: yaml.MappingNode, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int, Any]]:
    """Path, line and value of all keys, groups before what they contain.  A mapping on one line is one value."""
    for key, value in node.value:
        place = (*path, key.value)
        yield place, key.start_mark.line, value
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _entries(value, place)


def _comment(lines: list[str], line: int) -> str:
    """The comment directly above a line, at its indentation."""
    start = " " * (len(lines[line]) - len(lines[line].lstrip())) + "# "
    found: list[str] = []
    while line and lines[line - 1].startswith(start):
        line -= 1
        found.insert(0, lines[line].removeprefix(start))
    return " ".join(found).replace("|", "\\|")


def readme() -> str:
    """README.md, with the table as it is now."""
    before, _, rest = README.read_text().partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{values_table()}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    SCHEMA.write_text(values_schema())
    README.write_text(readme())
