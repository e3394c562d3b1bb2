"""The FlashInfer backend, with a stand-in that computes according to FlashInfer's documented interface.

tests/gpu runs the real one if it is installed.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace

import pytest
import torch
from attention_cases import case_of, spec
from paged_case import relative_error
from torch import Tensor

pytest.importorskip("triton")

from inflight.attention.base import LayerSpec
from inflight.attention.reference import ReferenceAttention, attend_request
from inflight.attention.selection import select_backend
from inflight.config import ConfigError
from inflight.kernels.gpu.gpu_flashinfer import FlashInferAttention
from inflight.kernels.gpu.launch import interpreted

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
]
CPU = torch.device("cpu")


class Wrapper:
    """As documented at docs.flashinfer.ai: BatchPrefillWithPagedKVCacheWrapper."""

    plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        assert causal
        assert {t.dtype for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)} == {
            torch.int32
        }
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.pages = (qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices, paged_kv_last_page_len.tolist())
        window = None if window_left < 0 else window_left + 1
        self.spec = LayerSpec(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_qk, sm_scale, window, logits_soft_cap or None
        )
        self.page_size, self.dtype = page_size, q_data_type
        Wrapper.plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert q.dtype == self.dtype and q.is_contiguous()
        rows, pages, indices, last = self.pages
        out = torch.full_like(q, torch.nan)
        for r in range(len(last)):
            tokens = (pages[r + 1] - pages[r] - 1) * self.page_size + last[r]
            query = q[rows[r] : rows[r + 1]]
            first = max(0, tokens - len(query) + 1 - (self.spec.sliding_window or tokens))
            key, value = (
                pool[indices[pages[r] : pages[r + 1]].long()].transpose(1, 2).flatten(0, 1)[first:tokens]
                for pool in paged_kv_cache
            )
            out[rows[r] : rows[r + 1]] = attend_request(query, key, value, self.spec, None)
        return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("installed")
class TestInstalled:
    @pytest.mark.parametrize("name", ["decode", "mix", "window", "softcap", "blocks of 48"])
    def test_it_agrees_with_the_reference(self, name: str) -> None:
        case = case_of(name, torch.float16)
        assert relative_error(case.run(FlashInferAttention()), case.run(ReferenceAttention())) < 1e-3

    def test_each_step_is_planned_once_per_kind_of_layer(self) -> None:
        case = case_of("decode", torch.float16)
        backend = FlashInferAttention()
        windowed = replace(case, spec=replace(case.spec, sliding_window=7))
        layers = [(part, part.filled_cache(backend)) for part in (case, windowed, case)]
        before = Wrapper.plans
        for _ in range(2):
            batch = case.prepared(backend)
            for layer, cache in layers:
                out = backend.attend(layer.query, cache, batch, layer.spec, None)
                assert relative_error(out, layer.run(ReferenceAttention())) < 1e-3
        assert Wrapper.plans - before == 4

    @pytest.mark.parametrize(
        ("layer", "dtype", "reason"),
        [
            (spec(4, 2, 64, has_sinks=True), torch.bfloat16, "sinks"),
            (spec(4, 2, 64), torch.float32, "float32"),
            (spec(4, 2, 96), torch.bfloat16, "head size 96"),
            (LayerSpec(4, 2, 128, 64, 0.1), torch.bfloat16, "head size 64"),
            (spec(4, 2, 64, kv_cache_dtype=torch.int8), torch.bfloat16, "kv_cache_dtype"),
        ],
    )
    def test_unsupported_features_are_named(self, layer: LayerSpec, dtype: torch.dtype, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            select_backend("flashinfer", [layer], dtype, 16, CPU)
        assert select_backend("flashinfer", [spec(4, 2, 64)], torch.bfloat16, 16, CPU).name == "flashinfer"


def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        select_backend("flashinfer", [spec(4, 2, 64)], torch.bfloat16, 16, CPU)
