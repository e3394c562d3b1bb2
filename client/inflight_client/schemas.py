"""JSON Schemas of Python types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["json_schema_of"]


def json_schema_of(described: Any) -> Any:
    """The schema of a pydantic model or dataclass; a mapping or JSON text is one already.

    Raises:
        TypeError: none of these, or a dataclass without pydantic, which reads its types.
    """
    if isinstance(described, (Mapping, str)):
        return described
    if hasattr(described, "model_json_schema"):
        return described.model_json_schema()
    if isinstance(described, type) and dataclasses.is_dataclass(described):
        try:
            from pydantic import TypeAdapter
        except ImportError:
            raise TypeError("the schema of a dataclass needs pydantic: pip install pydantic, or give a dict") from None
        return TypeAdapter(described).json_schema()
    raise TypeError(f"json_schema={described!r}: give a dict, JSON text, a pydantic model or a dataclass")
