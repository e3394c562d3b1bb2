"""Compiles the CPU library if its sources have changed and there is a compiler."""

from __future__ import annotations

import shutil

import pytest

from inflight.kernels.cpu import build


@pytest.fixture(scope="session", autouse=True)
def current_kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not build.is_current() and any(map(shutil.which, ("g++", "clang++"))):
        build.build()
