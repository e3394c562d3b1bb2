"""The GPU attention kernels compile for real GPUs, fit them, and are all compiled at load.  Needs no GPU.

`python bench/gpu_attention.py --compile` reports what each shipped shape takes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiled_kernels import compiled

pytest.importorskip("triton")

FEW_SPILLS = 128  # bytes per thread: some loop-invariant values, depending on the compiler's version

SCRIPT = """
import json, sys
from dataclasses import fields, replace
import torch
from attention_cases import CASES, case_of, spec
from paged_case import PagedCase
from gpu_target import card, target
from inflight.kernels.gpu.gpu_attention import GpuAttention

arch, size, dtype, batches = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
layer = spec(8, 2, size)
backend = GpuAttention(card(arch))
with target(arch) as compiled:
    caches = [backend.new_cache(200, 16, layer, dtype, torch.device("meta")) for _ in range(2)]
    at_load = len(compiled)
    for layout in ("heads first", "fused", "size strided") if batches else ():
        lens = ([1], [1]), ([300] * 3, [1] * 3), ([2000], [1]), ([900, 17], [30, 2]), ([33], [33])
        for seq_lens, query_lens in lens:
            case = PagedCase(layer, seq_lens, query_lens, 16, dtype, layout)
            metadata = case.metadata(query_lens)
            # Tensors without contents: reading one, which would wait for the device, fails.
            tensors = [field.name for field in fields(metadata) if torch.is_tensor(getattr(metadata, field.name))]
            metadata = replace(metadata, **{name: getattr(metadata, name).to("meta") for name in tensors})
            last = [tensor[-count:].to("meta") for tensor, count in zip(case.keys, query_lens)]
            new = last[0] if len(last) == 1 else torch.cat(last)
            batch = backend.prepare(metadata)
            backend.write(new, new, caches[1], batch)
            backend.attend(case.query.to("meta"), caches[1], batch, layer, None)
print(json.dumps([at_load, len(compiled), [kernel.report(arch) for kernel in compiled]]))
"""


SOURCES = [
    "backend/inflight/attention/base.py",
    "backend/inflight/attention/dtypes.py",
    "backend/inflight/kernels/gpu",
    "tests/support/attention_cases.py",
    "tests/support/gpu_target.py",
    "tests/support/paged_case.py",
]


@pytest.fixture
def compiled_for(tmp_path: Path, cache: pytest.Cache) -> Callable[..., Any]:
    """(arch, head size, dtype, with batches) -> kernels compiled at load, in all, and a report of each."""
    return lambda *argument: compiled(cache, tmp_path, "attention", SCRIPT, argument, SOURCES)


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
def test_on_hopper_everything_is_compiled_at_load(compiled_for: Callable[..., Any]) -> None:
    """Decodes, prompts, mixes, split keys, any layout of queries: nothing is compiled later, and no launch
    waits for the device."""
    at_load, after_steps, kernels = compiled_for(90, 128, "bfloat16", True)
    assert at_load == after_steps == 6, "write, plan; attention and reduction, for decodes and for mixes"
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["stack_bytes"] == 0
    decode, mixed = [kernel for kernel in kernels if kernel["kernel"] == "attend_kernel"]
    assert decode["instructions"] == ["cp.async.cg", "mma.sync"], "tiles of 16 rows, asynchronous loads"
    assert mixed["instructions"] == ["cp.async.cg", "mma.sync", "wgmma.mma_async"]
    assert mixed["overlapped"] >= 32, "the softmax of a tile is computed beside the product of the one before"
    assert decode["registers"] <= 65536 // (3 * 128), "three programs on an SM"
    # Two programs with two tiles of keys and values in flight each cover the memory's latency.
    assert decode["shared_bytes"] <= decode["shared_limit"] // 2


@pytest.mark.nightly
def test_float32_is_not_rounded_to_tf32(compiled_for: Callable[..., Any]) -> None:
    *_, kernels = compiled_for(90, 16, "float32", False)
    assert len(kernels) == 6
    for kernel in kernels:
        assert not kernel["tf32"]
        assert not {"mma.sync", "wgmma.mma_async"} & set(kernel["instructions"])
        assert kernel["stack_bytes"] <= FEW_SPILLS


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arch", "size", "instruction", "spills"),
    [(80, 64, "mma.sync", FEW_SPILLS), (100, 128, "tcgen05.mma", 0)],
)
def test_other_cards(compiled_for: Callable[..., Any], arch: int, size: int, instruction: str, spills: int) -> None:
    """An A100, and a Blackwell card for data centres."""
    *_, kernels = compiled_for(arch, size, "bfloat16", False)
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["stack_bytes"] <= (spills if kernel.get("block_m") else 0)
    decode, mixed = [kernel for kernel in kernels if kernel["kernel"] == "attend_kernel"]
    assert decode["instructions"] == ["cp.async.cg", "mma.sync"]
    assert instruction in mixed["instructions"]
