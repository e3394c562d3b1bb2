"""Available memory, for weights and KV pool."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["available_memory", "format_bytes", "free_cached_memory", "out_of_memory"]

_CGROUP = Path("/sys/fs/cgroup")


def format_bytes(size: float) -> str:
    """Human-readable, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


# How torch's allocators, the CUDA driver and cuBLAS say it; only the first raises an exception of its own type.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException, device: torch.device) -> str | None:
    """What to tell the clients of a step that failed for lack of memory; None if it failed for another reason."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(
        text in str(error) for text in _OUT_OF_MEMORY
    ):
        return None
    if device.type == "cuda":
        return "the step ran out of GPU memory; lower max_num_batched_tokens or gpu_memory_utilization"
    return "the step ran out of memory; lower max_num_batched_tokens or kv_cache_memory"


def free_cached_memory(device: torch.device) -> None:
    """Return to the device what torch's allocator keeps of freed tensors; waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the GPU, or in RAM within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_ram_available(), _cgroup_available())


def _ram_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; set kv_cache_memory in model.json")


def _cgroup_available() -> int:
    """Bytes that cgroup v2 leaves this process; reclaimable page cache counts as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return 2**63
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return 2**63
