"""The headers that Triton must pass on to models whose `model.json` sets `tenant_header`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from inflight_tools.repository import read_settings

__all__ = ["forward_arguments"]


def forward_arguments(repositories: Iterable[Path]) -> list[str]:
    """Arguments for `tritonserver`; none if no `model.json` of the repositories names a header."""
    found = (settings.get("tenant_header") for settings in read_settings(repositories))
    names = {name for name in found if isinstance(name, str)}
    if not names:
        return []
    pattern = f"(?i)^({'|'.join(sorted(map(re.escape, names)))})$"
    return [f"--http-header-forward-pattern={pattern}", f"--grpc-header-forward-pattern={pattern}"]
