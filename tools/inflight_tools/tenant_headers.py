"""The headers that Triton must pass on to models whose `model.json` sets `tenant_header`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["forward_arguments"]


def forward_arguments(repositories: Iterable[Path]) -> list[str]:
    """Arguments for `tritonserver`; none if no `model.json` of the repositories names a header."""
    names = {name for repository in repositories for name in _named(repository)}
    if not names:
        return []
    pattern = f"(?i)^({'|'.join(sorted(map(re.escape, names)))})$"
    return [f"--http-header-forward-pattern={pattern}", f"--grpc-header-forward-pattern={pattern}"]


def _named(repository: Path) -> Iterable[str]:
    for path in repository.glob("*/*/model.json"):
        try:
            name = json.loads(path.read_text(encoding="utf-8")).get("tenant_header")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # the model's own load says what is wrong with the file
        if isinstance(name, str):
            yield name
