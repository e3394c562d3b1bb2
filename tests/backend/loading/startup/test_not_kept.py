"""Loads that are not kept, weights that are not read, and folders without room."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from startup_rig import is_reused, start

from inflight.kernels.cpu import library
from inflight.loading import startup
from inflight.loading.load_errors import CannotKeep

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

Log = pytest.LogCaptureFixture


def test_another_program_or_processor_loads_in_full(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(llama)
    monkeypatch.setattr(startup, "instruction_set", lambda: "avx9")
    caplog.clear()
    start(llama)
    assert "in full: the weights kept of it are of another version or CPU" in caplog.messages
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "an upgrade is no fault"
    assert not is_reused(caplog)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"check_on_load": False}, "check_on_load"),
        ({"native_forward": False}, "native_forward"),
        ({"trust_remote_code": True}, "own code"),
        ({"load_format": "dummy"}, "not read from files"),
        ({"attention_backend": "reference"}, "through transformers"),
    ],
    ids=["unchecked", "modules", "own code", "dummy", "reference"],
)
def test_a_load_that_does_not_fit_is_not_kept(
    options: dict[str, Any], why: str, llama: str, cache: Path, caplog: Log
) -> None:
    start(llama, **options)
    assert why in caplog.text
    assert not list(cache.glob("*.iw"))


def test_a_load_whose_check_was_cut_is_not_kept(llama: str, cache: Path, caplog: Log) -> None:
    start(llama, max_model_len=16, num_gpu_blocks_override=1)
    assert "was not complete" in caplog.text
    start(llama, max_model_len=16)
    caplog.clear()
    start(llama, max_model_len=16, num_gpu_blocks_override=1)
    assert "too small" in caplog.text
    assert not is_reused(caplog)
    start(llama, max_model_len=16)
    assert is_reused(caplog)


def test_kept_weights_that_do_not_fit_the_memory_are_not_read(llama: str, cache: Path, caplog: Log) -> None:
    start(llama)
    caplog.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(startup, "available_memory", lambda _: 1024)
        start(llama)
    assert "and 1.00 KiB are available; loading the checkpoint in full" in caplog.text
    assert not is_reused(caplog)
    start(llama)
    assert is_reused(caplog)


def test_nothing_is_kept_if_the_cache_is_off(
    llama: str, tmp_path: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "inflight")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start(llama)
    assert "INFLIGHT_CACHE is off" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["1KiB", "nonsense", "²"])
def test_a_bound_that_is_too_small_or_unreadable_is_said(
    size: str, llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_SIZE", size)
    start(llama)
    assert "INFLIGHT_CACHE_SIZE" in caplog.text
    assert not list(cache.glob("*.iw"))


def test_a_folder_that_cannot_be_written_is_said_and_does_not_matter(llama: str, cache: Path, caplog: Log) -> None:
    cache.parent.write_text("a file where the folder should be")
    start(llama)
    assert "are not kept for the next start" in caplog.text


def test_a_full_disk_is_said_and_leaves_nothing(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    start(llama)
    assert "No space left" in caplog.text
    assert not [path for path in cache.iterdir() if path.suffix in (".iw", ".part")]


def test_kept_weights_can_be_read_where_nothing_can_be_written(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(llama)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    caplog.clear()
    start(llama)
    assert is_reused(caplog)


def test_a_decoder_with_parts_that_no_file_holds_is_not_kept(llama: str, cache: Path) -> None:
    from inflight.loading.saved.saved_model import content_of

    loaded = start(llama)
    loaded.model.tables.layers[0].qkv.struct.bias = 4711
    with pytest.raises(CannotKeep, match="the pointer bias of a packed weight"):
        content_of(loaded)


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_kept(
    llama: str, cache: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter(["0" * 32, "1" * 32])
    monkeypatch.setattr(startup, "checkpoint_key", lambda *_: next(keys))
    start(llama)
    assert "has changed while it was loaded" in caplog.text
    assert not list(cache.glob("*.iw"))
