"""The memory plan as a table: what is given, and where each byte goes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from inflight.config import EngineConfig
from inflight.loading.load_errors import LoadError
from inflight.loading.memory_plan import (
    HEADROOM,
    DeviceMemory,
    MemoryPlan,
    graph_bytes,
    plan_on_cpu,
    plan_on_gpu,
)

GIB, MIB = 2**30, 2**20

# Of llama-3.1-8B and Qwen3-0.6B in bfloat16, 16 tokens a block.
BLOCK_8B = 16 * 32 * 2 * 8 * 128 * 2
BLOCK_06B = 16 * 28 * 2 * 8 * 128 * 2
WEIGHTS_8B = 15 * GIB
WEIGHTS_06B = 1200 * MIB
CONTEXT, WORKSPACES = 500 * MIB, 200 * MIB


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_dict({"model": "none", **options})


def card(total: int, weights: int, others: int = 0, **parts: int) -> DeviceMemory:
    """A card on which this process holds context, weights and workspaces."""
    used_before = CONTEXT + others
    return DeviceMemory(total, used_before, used_before + weights + WORKSPACES, weights, **{"step": GIB, **parts})


# name, memory, bytes of a block, max_model_len, options -> bytes of the pool (less than a block below), unused bytes
GPU = [
    ("8B on 80 GB", card(80 * GIB, WEIGHTS_8B), BLOCK_8B, 131072, {}, 72 * GIB - 15 * GIB - GIB - 850 * MIB, 8 * GIB),
    ("all of it", card(80 * GIB, WEIGHTS_8B), BLOCK_8B, 131072, {"gpu_memory_utilization": 1.0},
     80 * GIB - 15 * GIB - GIB - 850 * MIB, 0),
    ("0.6B on 80 GB", card(80 * GIB, WEIGHTS_06B), BLOCK_06B, 40960, {}, 72 * GIB - GIB - 2050 * MIB, 8 * GIB),
    ("0.6B has no use for more", card(80 * GIB, WEIGHTS_06B), BLOCK_06B, 4096, {"max_num_seqs": 8},
     8 * 256 * BLOCK_06B, None),
    ("a large step", card(80 * GIB, WEIGHTS_8B, step=9 * GIB), BLOCK_8B, 8192, {}, 72 * GIB - 24 * GIB - 850 * MIB,
     8 * GIB),
    ("graphs", card(80 * GIB, WEIGHTS_8B, graphs=2 * GIB), BLOCK_8B, 8192, {}, 72 * GIB - 18 * GIB - 850 * MIB,
     8 * GIB),
    ("graphs and an explicit pool", card(80 * GIB, WEIGHTS_8B, graphs=2 * GIB), BLOCK_8B, 8192,
     {"kv_cache_memory": "10GiB"}, 10 * GIB, 80 * GIB - 28 * GIB - 850 * MIB),
    ("others on the card", card(80 * GIB, WEIGHTS_8B, others=30 * GIB), BLOCK_8B, 8192, {},
     72 * GIB - 46 * GIB - 850 * MIB, 8 * GIB),
    ("kv_cache_memory", card(80 * GIB, WEIGHTS_8B), BLOCK_8B, 8192, {"kv_cache_memory": "10GiB"}, 10 * GIB,
     80 * GIB - 26 * GIB - 850 * MIB),
    ("kv_cache_memory beyond the utilization", card(80 * GIB, WEIGHTS_8B), BLOCK_8B, 8192,
     {"kv_cache_memory": "63GiB", "gpu_memory_utilization": 0.5}, 63 * GIB, GIB - 850 * MIB),
    ("override", card(80 * GIB, WEIGHTS_8B), BLOCK_8B, 8192, {"num_gpu_blocks_override": 600}, 600 * BLOCK_8B, None),
    ("override beyond what requests need", card(80 * GIB, WEIGHTS_8B), BLOCK_8B, 16,
     {"num_gpu_blocks_override": 9000, "max_num_seqs": 1}, 9000 * BLOCK_8B, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "block", "length", "options", "pool", "unused"), [c[1:] for c in GPU], ids=[c[0] for c in GPU]
)
def test_the_pool_gets_what_is_left(
    memory: DeviceMemory, block: int, length: int, options: dict[str, Any], pool: int, unused: int | None
) -> None:
    plan = plan_on_gpu(config(**options), block, length, memory)
    assert plan.num_blocks == pool // block
    assert plan.pool == plan.num_blocks * block
    assert (plan.others, plan.weights, plan.workspaces) == (memory.used_before, memory.weights, WORKSPACES)
    assert (plan.step, plan.graphs, plan.headroom) == (memory.step, memory.graphs, HEADROOM)
    if unused is not None:
        assert unused <= plan.unused < unused + block
    assert_complete(plan, memory.total)


@pytest.mark.parametrize(
    ("measured", "count", "expected"),
    [
        ([300 * MIB, 8 * MIB], 35, 300 * MIB + 34 * 8 * MIB),
        ([300 * MIB, 0], 35, 300 * MIB),  # what the second takes is below what the driver reports
        ([300 * MIB, -2 * MIB], 35, 300 * MIB),  # another process left meanwhile
        ([300 * MIB, 8 * MIB], 2, 308 * MIB),
        ([300 * MIB], 1, 300 * MIB),
        ([-MIB, -MIB], 35, 0),
    ],
)
def test_what_all_graphs_take(measured: list[int], count: int, expected: int) -> None:
    assert graph_bytes(measured, count) == expected


def assert_complete(plan: MemoryPlan, total: int) -> None:
    parts = asdict(plan)
    del parts["total"], parts["num_blocks"]
    assert sum(parts.values()) == plan.total == total
    assert all(size >= 0 for size in parts.values())


def test_without_explicit_sizes_the_utilization_holds_to_a_block() -> None:
    for utilization in (0.3, 0.55, 0.9, 1.0):
        memory = card(80 * GIB, WEIGHTS_8B, others=2 * GIB, graphs=GIB)
        plan = plan_on_gpu(config(gpu_memory_utilization=utilization), BLOCK_8B, 4096, memory)
        taken = plan.total - plan.unused
        assert utilization * memory.total - BLOCK_8B < taken <= utilization * memory.total


REFUSED = [
    ("too small", card(16 * GIB, WEIGHTS_8B), 8192, {},
     r"KV pool \(gpu_memory_utilization=0.9 of 16.00 GiB, less 15.68 GiB in use, 1.00 GiB for steps, 0 B for CUDA "
     r"graphs and 150.00 MiB of headroom\) holds 0 tokens in 0 blocks, but one request of max_model_len=8192 takes 512 "
     r"blocks, 1.00 GiB more; "
     r"raise gpu_memory_utilization, lower max_num_batched_tokens$"),
    ("too small because of graphs", card(18 * GIB, WEIGHTS_8B, graphs=GIB), 8192, {},
     r"1.00 GiB for steps, 1.00 GiB for CUDA graphs and .*max_num_batched_tokens, set enforce_eager to true$"),
    ("too small for one request", card(24 * GIB, WEIGHTS_8B), 131072, {}, r"or set max_model_len to at most \d+$"),
    ("kv_cache_memory", card(80 * GIB, WEIGHTS_8B), 8192, {"kv_cache_memory": "1MiB"},
     r"\(kv_cache_memory='1MiB'\).*raise kv_cache_memory$"),
    ("override", card(80 * GIB, WEIGHTS_8B), 8192, {"num_gpu_blocks_override": 9}, "override=9.*144 tokens.*raise it"),
    ("kv_cache_memory that is not there", card(80 * GIB, WEIGHTS_8B), 131072, {"kv_cache_memory": "70GiB"},
     r"kv_cache_memory='70GiB' is a KV pool of 70.00 GiB, but the device has 63.32 GiB left .* at most '64836MiB'"),
    ("override that is not there", card(80 * GIB, WEIGHTS_8B), 8192, {"num_gpu_blocks_override": 40000},
     r"num_gpu_blocks_override=40000 is .* set it to at most 32418$"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "length", "options", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_what_cannot_be_is_refused(memory: DeviceMemory, length: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        plan_on_gpu(config(**options), BLOCK_8B, length, memory)


@pytest.mark.parametrize(
    ("free", "options", "pool"),
    [
        (10 * GIB, {}, 4 * GIB),  # the machine's, or what a cgroup leaves
        (3 * GIB, {}, int(1.2 * GIB)),
        (3 * GIB, {"kv_cache_memory": "5GiB"}, 5 * GIB),  # pages come when they are written
        (2**63, {"max_num_seqs": 2}, 2 * 512 * MIB),
        (10 * GIB, {"num_gpu_blocks_override": 700}, 700 * MIB),
    ],
)
def test_a_cpu_gives_a_share_of_its_free_memory(free: int, options: dict[str, Any], pool: int) -> None:
    plan = plan_on_cpu(config(**options), MIB, 8192, free)
    assert plan.pool == plan.num_blocks * MIB == pool // MIB * MIB
    assert_complete(plan, max(free, plan.pool))


def test_a_cpu_without_room_for_a_request_is_refused() -> None:
    with pytest.raises(LoadError, match=r"40% of 1.00 GiB free RAM\) holds 6544 tokens in 409 blocks.*raise kv_cache"):
        plan_on_cpu(config(), MIB, 8192, GIB)


def test_another_process_may_leave_while_the_model_loads() -> None:
    before = card(80 * GIB, WEIGHTS_8B, others=20 * GIB)
    memory = DeviceMemory(before.total, before.used_before, before.used - 20 * GIB, before.weights, before.step)
    plan = plan_on_gpu(config(), BLOCK_8B, 8192, memory)
    assert (plan.others, plan.workspaces) == (CONTEXT + WORKSPACES, 0)
    assert plan.num_blocks == plan_on_gpu(config(), BLOCK_8B, 8192, card(80 * GIB, WEIGHTS_8B)).num_blocks
    assert_complete(plan, memory.total)


def test_the_log_line_names_every_part() -> None:
    plan = plan_on_gpu(config(num_gpu_blocks_override=512), BLOCK_8B, 8192, card(80 * GIB, WEIGHTS_8B))
    assert str(plan) == (
        "memory 80.00 GiB: others 500.00 MiB, weights 15.00 GiB, workspaces 200.00 MiB, step 1.00 GiB, graphs 0 B, "
        "headroom 150.00 MiB, pool 1.00 GiB, unused 62.17 GiB; 512 KV blocks"
    )
