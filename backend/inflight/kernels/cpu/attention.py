"""Native paged attention for CPUs: `cpu_attention.cpp`, called through ctypes.

Ragged mixes of prefill chunks and decodes straight from the pool, on torch's own OpenMP threads.
A token's result is the same to the last bit whatever the batch, the chunking, the block size and
the number of threads; it depends on the instruction set.

ctypes, not a torch custom op: a call costs 4.5 us so, 7 us through `torch.library.Library.impl` and
9 us through `torch.library.custom_op` (measured, one token), and nothing here is traced or compiled.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import logging
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec, kv_dtype_lacks
from inflight.attention.int8 import SCALE_BYTES
from inflight.kernels.cpu import build

__all__ = ["CpuAttention", "instruction_set", "unavailable", "use_instruction_set"]

_log = logging.getLogger(__name__)

_ABI = 3  # of cpu_attention.cpp
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KV_DTYPES = {**_DTYPES, torch.int8: 3}
_GROUP = 16  # slots of a packed panel
_MAX_HEAD_SIZE = 1024
_SLACK = 64  # bytes that the kernel may read past the end of the pool


class _Layer(ctypes.Structure):
    _fields_ = [
        ("pool", c_void_p),
        ("block_size", c_int64),
        ("dtype", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("key_size", c_int32),
        ("value_size", c_int32),
        ("window", c_int32),
        ("scaling", c_float),
        ("softcap", c_float),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_table_stride", c_int64),
        ("num_requests", c_int64),
        ("num_tokens", c_int64),
    ]


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none.

    One that is missing or of another version is compiled first; one that serves, though of other
    sources than are there, is taken as it is: no start takes half a minute without need.
    """
    rebuild = "run `python -m inflight.kernels.cpu.build`"
    library = _open()
    if isinstance(library, str):
        try:
            build.build(announce=lambda: _log.warning("compiling the CPU kernels: about half a minute, this once"))
        except build.BuildError as error:
            return f"{library} ({error}): {rebuild}"
        library = _open()
        if isinstance(library, str):
            return f"{library}: {rebuild}"
    elif not build.is_current():
        _log.warning("the CPU kernels were compiled from other sources than are there: %s", rebuild)
    library.inflight_attention_isa.restype = c_char_p
    library.inflight_attention_use.argtypes = [c_char_p]
    library.inflight_attention_advise.argtypes = [c_void_p, c_int64]
    library.inflight_attention_advise.restype = None
    rows = (c_void_p, c_int64, c_int64)  # data, strides of token and head
    library.inflight_attention_write.argtypes = [c_void_p, c_void_p, *rows, *rows, c_int32, c_int32]
    library.inflight_attention_write.restype = None
    library.inflight_attention_attend.argtypes = [c_void_p, c_void_p, *rows, c_int32, c_void_p, c_void_p, c_int32]
    library.inflight_attention_attend.restype = None
    return library


def _open() -> ctypes.CDLL | str:
    """The library as it is there, or what is wrong with it."""
    if not build.LIBRARY.exists():
        return "the compiled kernel"
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        return f"a kernel compiled for this machine: {error}"
    if library.inflight_attention_abi() == _ABI:
        return library
    _ctypes.dlclose(library._handle)  # else the one that replaces it, by the same name, would not be read
    return "a kernel compiled from this version's source"


def _library() -> ctypes.CDLL:
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(f"attention_backend='cpu' lacks {library}")
    return library


def unavailable() -> str | None:
    """What is missing (and what to do) where the kernel cannot run at all."""
    library = _load()
    return library if isinstance(library, str) else None


def instruction_set() -> str:
    """The instruction set that runs: "avx512bf16", "avx512", "avx2" or "portable"."""
    return _library().inflight_attention_isa().decode()


def use_instruction_set(name: str) -> bool:
    """Run the kernels of another instruction set (tests, benchmarks); "" takes the best one.

    Returns:
        False, with nothing changed, where this machine or the compiler of the build lacks it.
    """
    return bool(_library().inflight_attention_use(name.encode()))


@dataclass(slots=True)
class _CpuKVCache(KVCache):
    """`key` and `value` are [num_blocks, panels of a block, num_kv_heads, elements], views of one
    allocation, in which the two lie panel by panel (see cpu_attention.h); `layer` is what the kernel is
    told of them."""

    layer: _Layer
    address: int


class CpuAttention:
    """Implements `AttentionBackend` by the compiled kernel."""

    name = "cpu"

    def __init__(self) -> None:
        # The step whose batch `_batch` describes: all layers of a step share it.
        self._step: AttentionMetadata | None = None
        self._batch = _Batch()
        self._batch_address = ctypes.addressof(self._batch)
        self._tensors: tuple[Tensor, ...] = ()

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if spec.kv_cache_dtype not in (None, torch.int8):
            return kv_dtype_lacks(spec.kv_cache_dtype, "auto", "int8")
        if dtype not in _DTYPES:
            return f"dtype {str(dtype).removeprefix('torch.')} (it has float32, bfloat16 and float16)"
        for size in (spec.key_head_size, spec.value_head_size):
            if size % 8 or size > _MAX_HEAD_SIZE:
                return f"head size {size} (it has multiples of 8 up to {_MAX_HEAD_SIZE})"
        if not spec.scaling > 0:
            return f"a scaling of {spec.scaling} (it must be positive)"
        return unavailable()

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        panel_slots = _GROUP if block_size % _GROUP == 0 else 1
        stored = spec.kv_cache_dtype or dtype
        scales = 2 * SCALE_BYTES if stored == torch.int8 else 0  # of a slot; they stand before the keys
        key_elements = panel_slots * (spec.key_head_size + scales)
        elements = key_elements + panel_slots * spec.value_head_size
        pool = allocate(num_blocks, block_size // panel_slots, spec.num_kv_heads, elements, dtype=stored)
        layer = _Layer(
            pool=pool.data_ptr(),
            block_size=block_size,
            dtype=_KV_DTYPES[stored],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            key_size=spec.key_head_size,
            value_size=spec.value_head_size,
            window=spec.sliding_window or 0,
            scaling=spec.scaling,
            softcap=spec.softcap or 0.0,
        )
        return _CpuKVCache(pool[..., :key_elements], pool[..., key_elements:], layer, ctypes.addressof(layer))

    def write(self, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
        assert isinstance(cache, _CpuKVCache)
        if key.stride(2) != 1:
            key = key.contiguous()
        if value.stride(2) != 1:
            value = value.contiguous()
        _library().inflight_attention_write(
            cache.address,
            self.batch_address(metadata),
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
            _DTYPES[key.dtype],
            torch.get_num_threads(),
        )

    def attend(
        self, query: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        assert isinstance(cache, _CpuKVCache)
        if query.stride(2) != 1:
            query = query.contiguous()
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_size)
        _library().inflight_attention_attend(
            cache.address,
            self.batch_address(metadata),
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            _DTYPES[query.dtype],
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def batch_address(self, metadata: AttentionMetadata) -> int:
        """Address of the kernel's view of the step's batch, valid until the next step's is asked for."""
        if metadata is not self._step:
            starts, lens = metadata.query_start_loc.contiguous(), metadata.seq_lens.contiguous()
            table, slots = metadata.block_table.contiguous(), metadata.slot_mapping.contiguous()
            self._tensors = (starts, lens, table, slots)
            batch = self._batch
            batch.query_start_loc, batch.seq_lens = starts.data_ptr(), lens.data_ptr()
            batch.block_table, batch.slot_mapping = table.data_ptr(), slots.data_ptr()
            batch.block_table_stride = table.shape[1]
            batch.num_requests, batch.num_tokens = len(lens), len(slots)
            self._step = metadata
        return self._batch_address


def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory on huge pages where the system grants them, readable a little past its end."""
    count = torch.Size(shape).numel()
    flat = torch.empty(count + _SLACK // dtype.itemsize, dtype=dtype)
    _library().inflight_attention_advise(flat.data_ptr(), flat.nbytes)
    return flat[:count].view(shape)
