"""The compiled library of the CPU kernels: loading it, its instruction set, memory for it.

The kernels are called through ctypes rather than as torch custom operators: a call takes 4.5 us, compared to
7 us through `torch.library.Library.impl` and 9 us through `torch.library.custom_op` (measured with one
token), and nothing here is traced or compiled.

A token's result is bitwise independent of the batch, the chunking, the block size and the number of
threads.  It depends on the instruction set.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from inflight.kernels.cpu import build

__all__ = [
    "DTYPE_CODES",
    "allocate",
    "discard",
    "instruction_set",
    "library",
    "load",
    "map_pages",
    "unavailable",
    "use_instruction_set",
]

_log = logging.getLogger(__name__)

_FORKED = (
    "this process was forked from one that used the CPU kernels: its threads do not exist here, and the first parallel "
    'product would wait for them for ever; start it with multiprocessing\'s "spawn" method'
)

ABI = 14  # of cpu_library.cpp
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_SLACK = 64  # bytes that kernels may read past the end of an allocation
_REBUILD = "run `python -m inflight.kernels.cpu.build`"

_ROWS = (c_void_p, c_int64, c_int64)  # data, token stride, head stride
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "inflight_instruction_set": ([], c_char_p),
    "inflight_use_instruction_set": ([c_char_p], c_int32),
    "inflight_advise_huge_pages": ([c_void_p, c_int64], None),
    "inflight_discard": ([c_void_p, c_int64], None),
    "inflight_map_pages": ([c_void_p, c_void_p, c_int64, c_void_p], None),
    "inflight_attention_write": ([c_void_p, c_void_p, *_ROWS, *_ROWS, c_int32, c_int32], None),
    "inflight_attention_attend": ([c_void_p, c_void_p, *_ROWS, c_int32, c_void_p, c_void_p, c_int32], None),
    "inflight_attention_keys": ([c_void_p, c_void_p, c_int32], c_int64),
    "inflight_ops_packed_bytes": ([c_void_p], c_int64),
    "inflight_ops_pack": ([c_void_p, c_void_p, c_int32], None),
    "inflight_ops_unpack": ([c_void_p, c_void_p, c_int32], None),
    "inflight_ops_pack4": ([c_void_p, c_void_p, c_int32], None),
    "inflight_ops_unpack4": ([c_void_p, c_void_p, c_int32], None),
    "inflight_ops_pack_stored": ([c_void_p, c_void_p, c_int32], None),
    "inflight_ops_unpack_stored": ([c_void_p, c_void_p, c_int32], None),
    "inflight_ops_dequantize": ([c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_int32], None),
    "inflight_ops_choose_codes": ([c_void_p, c_int32, c_int64, c_int64, *[c_void_p] * 4, c_int32], None),
    "inflight_lora_shrink": ([c_void_p, c_void_p, c_int64], c_int64),
    "inflight_lora_halves": ([c_void_p, c_int64, c_void_p, c_int64, c_void_p], c_int64),
    "inflight_lora_expand": ([c_void_p, c_int64, c_void_p, c_int64, c_void_p], c_int64),
    "inflight_ops_linear": ([c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int32], None),
    "inflight_ops_forward": (
        [*[c_void_p] * 5, c_int64, *[c_void_p] * 2, c_int64, c_void_p, c_void_p, c_int64, c_int32],
        None,
    ),
    "inflight_ops_encode": ([c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32], None),
    "inflight_sampler_choose": ([c_void_p, c_int64, c_int32], None),
}


_forked = _had_threads = False


@functools.cache
def load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none.

    Compiles it if it is missing or of another version.  A library that has the right version but was compiled
    from other sources is used with a warning, rather than compiled for half a minute.
    """
    found = _open()
    if isinstance(found, str):
        try:
            build.build(
                announce=lambda: _log.warning("compiling the CPU kernels; this takes about half a minute, once")
            )
        except build.BuildError as error:
            return f"{found} ({error}); {_REBUILD}"
        found = _open()
        if isinstance(found, str):
            return f"{found}; {_REBUILD}"
    elif not build.is_current():
        _log.warning("the CPU kernels do not match their sources; %s", _REBUILD)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, result
    os.register_at_fork(before=_count_threads, after_in_child=_note_fork)
    return found


def _count_threads() -> None:
    global _had_threads
    _had_threads = len(os.listdir("/proc/self/task")) > 1


def _note_fork() -> None:
    """In the child.  With one thread nothing waits for another."""
    global _forked
    _forked = _forked or (_had_threads and torch.get_num_threads() > 1)


def _open() -> ctypes.CDLL | str:
    """The library as found on disk, or what is wrong with it."""
    if not build.LIBRARY.exists():
        return "the CPU kernels are not compiled"
    try:
        found = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        return f"the compiled CPU kernels cannot be loaded on this machine: {error}"
    if hasattr(found, "inflight_abi") and found.inflight_abi() == ABI:
        return found
    _ctypes.dlclose(found._handle)  # otherwise its replacement, which has the same path, would not be loaded
    return "the compiled CPU kernels are of another version"


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        RuntimeError: it is not available, or this process was forked from one whose threads it used.
    """
    found = load()
    if isinstance(found, str):
        raise RuntimeError(found)
    if _forked:
        raise RuntimeError(_FORKED)
    return found


def unavailable() -> str | None:
    """Why the kernels cannot run here, and what to do about it; None if they can."""
    found = load()
    return found if isinstance(found, str) else None


def instruction_set() -> str:
    """The instruction set in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable"."""
    return library().inflight_instruction_set().decode()


def use_instruction_set(name: str) -> bool:
    """Switch to another instruction set, for tests and benchmarks; "" selects the best one.

    Returns:
        False, with nothing changed, if this machine or the build's compiler lacks it.
    """
    return bool(library().inflight_use_instruction_set(name.encode()))


def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, on huge pages if available; kernels may read slightly past its end."""
    count = torch.Size(shape).numel()
    flat = torch.empty(count + _SLACK // dtype.itemsize, dtype=dtype)
    library().inflight_advise_huge_pages(flat.data_ptr(), flat.nbytes)
    return flat[:count].view(shape)


def map_pages(addresses: Sequence[int], sizes: Sequence[int], stop: c_int32) -> None:
    """Have the system provide the pages of ranges of memory, at idle priority; returns when it has, or `stop` is set.

    The calling thread waits, without the interpreter's lock.  Bytes stay as they are or as other threads write them.
    """
    count = len(addresses)
    data, bytes_ = (c_void_p * count)(*addresses), (c_int64 * count)(*sizes)
    library().inflight_map_pages(data, bytes_, count, ctypes.byref(stop))


def discard(tensor: Tensor) -> None:
    """Return a contiguous tensor's memory to the system, mapped from a file or not; its contents are lost."""
    library().inflight_discard(tensor.data_ptr(), tensor.nbytes)
