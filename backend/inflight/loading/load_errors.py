"""Errors of loading."""

from __future__ import annotations

import traceback
from pathlib import Path

__all__ = ["CannotKeep", "LoadError", "NotRecognised", "in_models_code", "in_one_line"]


class LoadError(RuntimeError):
    """The checkpoint cannot be served on this machine; the message says what to change."""


class NotRecognised(ValueError):
    """A module is not what it was taken for; the message says how it differs."""


def in_one_line(error: Exception) -> str:
    """A library's error: its first line, and the second if the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def in_models_code(error: Exception) -> str:
    """The innermost place in the model's code at which an error arose, as " (in f, modeling_x.py:1)"; "" if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = Path(frame.filename).name
        if name.startswith(("modeling", "configuration")) and name != "modeling_utils.py":
            return f" (in {frame.name}, {name}:{frame.lineno})"
    return ""


class CannotKeep(Exception):
    """The weights of this load are not kept for the next start, or not taken from there; says why."""
