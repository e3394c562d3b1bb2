"""The syntax trees of our own sources."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def source_tree(path: Path) -> ast.Module:
    """Of a file, without a garbage collection meanwhile.

    It would let other threads in, and one that parses, too, breaks this call in CPython before 3.11.8 (gh-106905).
    """
    text = path.read_text(encoding="utf-8")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
