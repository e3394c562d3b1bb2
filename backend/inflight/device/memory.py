"""Memory: how much is available, how much a step takes on a GPU, and how a step that runs out of it fails."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, Union

import torch

__all__ = [
    "DeviceMeter",
    "Outcome",
    "attempt",
    "available_memory",
    "free_cached_memory",
    "meter_of",
    "out_of_memory",
    "pin",
]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
# The result of an attempt and "", or None and why it ran out of memory.
Outcome = Union[tuple[_T, str], tuple[None, str]]

_CGROUP = Path("/sys/fs/cgroup")


# How torch's allocators, the CUDA driver and cuBLAS say it; only the first raises an exception of its own type.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException, device: torch.device) -> str | None:
    """The message for the clients of a step that failed for lack of memory; None if it failed for another reason."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(
        text in str(error) for text in _OUT_OF_MEMORY
    ):
        return None
    if device.type == "cuda":
        return "the step ran out of GPU memory; lower max_num_batched_tokens or gpu_memory_utilization"
    return "the step ran out of memory; lower max_num_batched_tokens or kv_cache_memory"


def attempt(run: Callable[[], _T], device: torch.device) -> Outcome[_T]:
    """Run a part of a step.  If memory runs out, what it had allocated is free again, and the next step can run.

    Raises:
        RuntimeError: it failed for another reason.
    """
    try:
        return run(), ""
    except (RuntimeError, MemoryError) as error:
        failure = out_of_memory(error, device)
        if failure is None:
            raise
        _log.error("%s: %s", failure, str(error))  # the error would keep its frames
    free_cached_memory(device)  # outside of the handler, whose traceback holds the step's tensors
    return None, failure


class DeviceMeter:
    """Measures a GPU's memory, in bytes.

    Args:
        cuda: has the functions of `torch.cuda`; a test passes another.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    @property
    def total(self) -> int:
        return self._cuda.mem_get_info(self._device)[1]

    def used(self) -> int:
        """In use by all processes, without what torch's allocator keeps of freed tensors."""
        self._release()
        free, total = self._cuda.mem_get_info(self._device)
        return total - free

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that torch's allocator holds while `run` runs, minus what it holds afterwards.

        These are whole segments, so that the gaps which the run leaves in them count.
        """
        self._release()
        self._cuda.reset_peak_memory_stats(self._device)
        run()
        self._cuda.synchronize(self._device)
        peak = self._cuda.max_memory_reserved(self._device)
        self._release()
        return peak - self._cuda.memory_reserved(self._device)

    def _release(self) -> None:
        gc.collect()  # cycles would hold tensors, and loading turns the collector off
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()


def meter_of(device: torch.device) -> DeviceMeter | None:
    """The meter of a GPU; None for a CPU, whose system provides memory when it is first written."""
    return DeviceMeter(device) if device.type == "cuda" else None


def free_cached_memory(device: torch.device) -> None:
    """Return to the device what torch's allocator keeps of freed tensors; waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def pin(tensor: torch.Tensor) -> Callable[[], object]:
    """Lock the pages of a host tensor, so that copies to and from a GPU need not wait for the host.

    torch's allocator of pinned memory would round its size up to a power of two.  Returns what unlocks the pages again:
    call it before the tensor is freed.
    """
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, tensor.nbytes, 0))
    return functools.partial(cudart.cudaHostUnregister, address)


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
