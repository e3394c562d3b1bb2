"""torch's `varlen_attn` on a GPU computes whole prompts as the reference does."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from attention_cases import spec
from card_sizes import sized
from paged_case import PagedCase, relative_error

from inflight.attention.reference import ReferenceAttention
from inflight.kernels.gpu import gpu_varlen
from inflight.kernels.gpu.gpu_varlen import VarlenAttention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 128), (4, 4, 64), (6, 2, 80)])
def test_whole_prompts(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    layer, lengths = spec(heads, kv_heads, size), sized([700, 33, 1, 128], [70, 33, 1])
    case, backend = PagedCase(layer, lengths, lengths, 16, dtype, device="cuda"), VarlenAttention()
    cache = case.filled_cache(backend)
    assert gpu_varlen._wrong(layer, dtype, torch.device("cuda")) is None, "the card has no such kernel"
    assert not case.prepared(backend).work
    exact = case.with_dtype(torch.float32).on("cpu").run(ReferenceAttention())
    assert relative_error(case.attend(backend, cache).cpu(), exact) < 2 * torch.finfo(dtype).eps
