"""How many KV blocks fit: in the pool, and in host memory for swapped requests."""

from __future__ import annotations

import torch

from inflight.config import EngineConfig, parse_bytes
from inflight.loading.errors import LoadError
from inflight.runner.memory import available_memory, format_bytes

__all__ = ["num_host_blocks", "num_pool_blocks"]

# Share of the free RAM that the KV pool takes on a CPU unless `kv_cache_memory` is set.  The system provides
# pages when they are first written, so this is a limit rather than a cost.
_CPU_KV_SHARE = 0.4
# Kept free on a GPU for fragmentation and for growth of the CUDA context.
_GPU_HEADROOM = 150 * 2**20


def num_pool_blocks(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, device: torch.device, activation_bytes: int
) -> int:
    """Blocks of the pool.

    Raises:
        LoadError: a request of `max_model_len` does not fit.
    """
    blocks_per_request = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        source = f"num_gpu_blocks_override={num_blocks}"
    else:
        budget, source = _pool_bytes(config, device, activation_bytes)
        num_blocks = min(budget // bytes_per_block, config.max_num_seqs * blocks_per_request)
    if num_blocks < blocks_per_request:
        tokens = num_blocks * config.block_size
        missing = format_bytes((blocks_per_request - num_blocks) * bytes_per_block)
        raise LoadError(
            f"the KV pool ({source}) holds {tokens} tokens in {num_blocks} blocks, but one request of "
            f"max_model_len={max_model_len} takes {blocks_per_request} blocks, {missing} more; raise kv_cache_memory"
            + (f", or set max_model_len to at most {tokens}" if tokens > 1 else "")
        )
    return num_blocks


def _pool_bytes(config: EngineConfig, device: torch.device, activation_bytes: int) -> tuple[int, str]:
    """Memory for the pool, and where that number comes from."""
    if config.kv_cache_memory is not None:
        return parse_bytes(config.kv_cache_memory), f"kv_cache_memory={config.kv_cache_memory!r}"
    free = available_memory(device)
    if device.type == "cpu":
        return int(free * _CPU_KV_SHARE), f"{_CPU_KV_SHARE:.0%} of {format_bytes(free)} free RAM"
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = int(total * config.gpu_memory_utilization) - (total - free) - activation_bytes - _GPU_HEADROOM
    return max(0, allowed), f"gpu_memory_utilization={config.gpu_memory_utilization} of {format_bytes(total)}"


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
