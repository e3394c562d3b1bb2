"""Room on the disk that copies and kept files leave for others."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.byte_sizes import format_bytes

__all__ = ["lacks_room"]

_FREE_SHARE = 20  # 1 / 20 of a file system stays free
_FREE_BYTES = 5 * 2**30  # but no more of a large one


def lacks_room(folder: Path, size: int) -> str | None:
    """Why `size` bytes are too much for the file system of `folder`; None if they are not."""
    disk = os.statvfs(folder)
    free = min(disk.f_blocks * disk.f_frsize // _FREE_SHARE, _FREE_BYTES)
    if disk.f_bavail * disk.f_frsize - size >= free:
        return None
    return f"{format_bytes(size)} would leave less than {format_bytes(free)} of the disk at {folder} free"
