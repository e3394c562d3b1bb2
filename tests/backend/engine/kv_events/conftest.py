"""An address for events."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"
