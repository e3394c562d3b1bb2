"""Checkpoints to start with, and an empty folder for kept weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

Log = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("startup"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With norms of heads."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("startup"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> Path:
    caplog.set_level(logging.INFO, "inflight")
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"
