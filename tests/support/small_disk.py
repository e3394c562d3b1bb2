"""A file system of a few mebibytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from wire import wait_for

__all__ = ["can_only_be_read", "small_disk"]


@contextmanager
def small_disk(path: Path, mebibytes: int) -> Iterator[Path]:
    """A tmpfs at a new folder; skips the test if this user cannot mount one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(path)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # engines may still have files open


def can_only_be_read(disk: Path, only: bool = True) -> None:
    """Refused while a file is open for writing, so it is tried again."""
    remount = ["mount", "-o", f"remount,{'ro' if only else 'rw'}", str(disk)]
    wait_for(lambda: subprocess.run(remount, stderr=subprocess.DEVNULL).returncode == 0)
