"""One xdist worker renders the chart: the library is 80 MB, and its answers are shared."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and "chart" in item.path.name:
            item.add_marker(pytest.mark.xdist_group("chart"))
