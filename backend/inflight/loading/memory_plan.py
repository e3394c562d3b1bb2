"""Where memory goes: how many KV blocks fit beside weights and the largest step, and how many in host memory.

The functions that plan a pool are pure: they know only what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from inflight.byte_sizes import format_bytes
from inflight.config import EngineConfig, parse_bytes
from inflight.device.memory import available_memory
from inflight.loading.load_errors import LoadError

__all__ = ["HEADROOM", "DeviceMemory", "MemoryPlan", "graph_bytes", "num_host_blocks", "plan_on_cpu", "plan_on_gpu"]

# Share of the free RAM that the KV pool takes on a CPU unless `kv_cache_memory` is set.  The system provides
# pages when they are first written, so this is a limit rather than a cost.
_CPU_KV_SHARE = 0.4
# Kept free on a GPU for fragmentation and for growth of the CUDA context.
HEADROOM = 150 * 2**20


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory in bytes, as measured while loading.

    Attributes:
        total: of the device.
        used_before: in use before the weights came, by other processes and by this one's CUDA context.
        used: in use after the model has run its largest step, with torch's cache emptied: by the above, weights,
            workspaces, scratch and compiled kernels.
        weights: parameters and buffers of the model.
        step: what the largest step takes besides `used`, at its peak.
        graphs: what captured graphs will take.
        adapters: slots of LoRA adapters, a part of `used`.
    """

    total: int
    used_before: int
    used: int
    weights: int
    step: int
    graphs: int = 0
    adapters: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory goes, in bytes; the parts add up to `total`.

    On a CPU, which is not measured, `total` is the free RAM, and all but `pool` and `unused` is 0.

    Attributes:
        others: other processes, and this one's CUDA context.
        workspaces: what stays allocated for libraries, kernels and their scratch.
        step: activations, logits and sampling of the largest step.
        graphs: captured graphs.
        headroom: kept free for fragmentation; less where an explicit pool size takes it.
        pool: the KV pool, of `num_blocks` blocks.
        unused: what `gpu_memory_utilization` leaves to others, or the pool has no use for.
        adapters: slots of LoRA adapters.
    """

    total: int
    others: int
    weights: int
    workspaces: int
    step: int
    graphs: int
    headroom: int
    pool: int
    unused: int
    num_blocks: int
    adapters: int = 0

    def __str__(self) -> str:
        names = ["others", "weights", "workspaces", "step", "graphs", "headroom", "pool", "unused"]
        if self.adapters:
            names.insert(2, "adapters")
        parts = ", ".join(f"{name} {format_bytes(getattr(self, name))}" for name in names)
        return f"memory {format_bytes(self.total)}: {parts}; {self.num_blocks} KV blocks"


def plan_on_cpu(config: EngineConfig, bytes_per_block: int, max_model_len: int, free: int) -> MemoryPlan:
    """The pool's share of `free` bytes of RAM.

    Raises:
        LoadError: a request of `max_model_len` does not fit.
    """
    source = f"{_CPU_KV_SHARE:.0%} of {format_bytes(free)} free RAM"
    budget = _Budget(int(free * _CPU_KV_SHARE), source, "raise kv_cache_memory")
    num_blocks = _num_blocks(config, bytes_per_block, max_model_len, budget)
    pool = num_blocks * bytes_per_block
    return MemoryPlan(max(free, pool), 0, 0, 0, 0, 0, 0, pool, max(0, free - pool), num_blocks)


def plan_on_gpu(config: EngineConfig, bytes_per_block: int, max_model_len: int, memory: DeviceMemory) -> MemoryPlan:
    """The pool takes what the rest leaves of `gpu_memory_utilization`, or what the configuration says.

    Raises:
        LoadError: a request of `max_model_len` does not fit, or the configured size does not.
    """
    taken = memory.used + memory.step + memory.graphs
    left = int(memory.total * config.gpu_memory_utilization) - taken - HEADROOM
    source = (
        f"gpu_memory_utilization={config.gpu_memory_utilization} of {format_bytes(memory.total)}, less "
        f"{format_bytes(memory.used)} in use, {format_bytes(memory.step)} for steps, {format_bytes(memory.graphs)} for "
        f"CUDA graphs and {format_bytes(HEADROOM)} of headroom"
    )
    advice = "raise gpu_memory_utilization, lower max_num_batched_tokens"
    if memory.graphs and config.max_cudagraph_capture_size:
        advice += ", lower max_cudagraph_capture_size"
    if memory.graphs:
        advice += ", set enforce_eager to true"
    if memory.adapters:
        advice += ", lower max_loras or max_lora_rank"
    num_blocks = _num_blocks(config, bytes_per_block, max_model_len, _Budget(max(0, left), source, advice))
    pool, room = num_blocks * bytes_per_block, memory.total - taken
    if pool > room:  # only a configured size can be
        key = "kv_cache_memory" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
        limit = repr(f"{room // 2**20}MiB") if key == "kv_cache_memory" else str(room // bytes_per_block)
        raise LoadError(
            f"{key}={getattr(config, key)!r} is a KV pool of {format_bytes(pool)}, but the device has "
            f"{format_bytes(max(0, room))} left besides weights, steps and graphs; set it to at most {limit}"
        )
    headroom = min(HEADROOM, room - pool)
    of_model = memory.weights + memory.adapters
    others = min(memory.used_before, memory.used - of_model)  # less, if another process left meanwhile
    return MemoryPlan(
        total=memory.total,
        others=others,
        weights=memory.weights,
        workspaces=memory.used - of_model - others,
        step=memory.step,
        graphs=memory.graphs,
        headroom=headroom,
        pool=pool,
        unused=room - pool - headroom,
        num_blocks=num_blocks,
        adapters=memory.adapters,
    )


def graph_bytes(measured: Sequence[int], count: int) -> int:
    """Bytes that `count` captured graphs take.  `measured` has those of the largest, in order of their capture.

    The first fills a memory pool that the others find their tensors' memory in.  They add what a graph itself takes,
    its kernels with their arguments, which hardly depends on the number of rows.
    """
    first, *others = (max(0, size) for size in measured)
    return first + (count - 1) * (others[0] if others else 0)


class _Budget(NamedTuple):
    """Bytes for the pool, where that number comes from, and what to do if it is too small."""

    size: int
    source: str
    advice: str


def _num_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, budget: _Budget) -> int:
    """Blocks of the pool: as many as the configuration says, or as fit the budget.

    Raises:
        LoadError: a request of `max_model_len` does not fit.
    """
    blocks_per_request = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        budget = _Budget(0, f"num_gpu_blocks_override={num_blocks}", "raise it")
    else:
        if config.kv_cache_memory is not None:
            size, source = parse_bytes(config.kv_cache_memory), f"kv_cache_memory={config.kv_cache_memory!r}"
            budget = _Budget(size, source, "raise kv_cache_memory")
        most_requests = config.max_num_seqs + bool(config.kv_tiers)  # loads fill blocks beside the longest request
        num_blocks = min(budget.size // bytes_per_block, most_requests * blocks_per_request)
    if num_blocks < blocks_per_request:
        tokens = num_blocks * config.block_size
        missing = format_bytes((blocks_per_request - num_blocks) * bytes_per_block)
        raise LoadError(
            f"the KV pool ({budget.source}) holds {tokens} tokens in {num_blocks} blocks, but one request of "
            f"max_model_len={max_model_len} takes {blocks_per_request} blocks, {missing} more; {budget.advice}"
            + (f", or set max_model_len to at most {tokens}" if tokens > 1 else "")
        )
    return num_blocks


def num_host_blocks(config: EngineConfig, bytes_per_block: int, num_blocks: int, device: torch.device) -> int:
    """Blocks that `swap_space` holds; 0 if nothing would ever be swapped.

    Raises:
        LoadError: `swap_space` exceeds the free memory, or is smaller than a block.
    """
    if config.preemption_mode == "recompute" or not config.swap_bytes:
        return 0
    host = torch.device("cpu")
    free = available_memory(host) - (num_blocks * bytes_per_block if device == host else 0)
    if config.swap_bytes > free:
        raise LoadError(
            f"swap_space={config.swap_space!r} is {format_bytes(config.swap_bytes)} of host memory, but only "
            f"{format_bytes(max(0, free))} are free besides the KV pool; lower it"
        )
    blocks = config.swap_bytes // bytes_per_block
    if not blocks:
        raise LoadError(
            f"swap_space={config.swap_space!r} is smaller than a KV block of {format_bytes(bytes_per_block)}; "
            "raise it, or set it to 0"
        )
    return blocks
