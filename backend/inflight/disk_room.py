"""Room on the disk that copies and kept files leave for others."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["lacks_room"]

_FREE_SHARE = 20  # 1 / 20 of a file system stays free
_FREE_BYTES = 5 * 2**30  # but no more of a large one


def lacks_room(folder: Path, size: int) -> str | None:
    """Why `size` bytes are too much for the file system of `folder`; None if they are not."""
    disk = os.statvfs(folder)
    free = min(disk.f_blocks * disk.f_frsize // _FREE_SHARE, _FREE_BYTES)
    if disk.f_bavail * disk.f_frsize - size >= free:
        return None
    return f"{size / 2**20:.1f} MiB would leave less than {free / 2**30:.1f} GiB of the disk at {folder} free"
