"""The FlashAttention-3 backend, with a function that computes what `flash_attn_with_kvcache` documents.

tests/gpu runs the real one if it is installed.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import CASES, case_of, spec
from flash_attention import flash_attn_with_kvcache
from paged_case import PagedCase, relative_error
from torch import Tensor

pytest.importorskip("triton")

from inflight.attention.base import KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.config import ConfigError
from inflight.kernels.gpu import gpu_flash3
from inflight.kernels.gpu.gpu_attention_configs import Card
from inflight.kernels.gpu.gpu_flash3 import Flash3Attention
from inflight.kernels.gpu.launch import interpreted
from inflight.kernels.registry import select_attention

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
]
CPU = torch.device("cpu")
LAYER = spec(4, 2, 64)


class Calls(list[dict[str, Any]]):
    """Arguments of the calls of `flash_attn_with_kvcache`."""

    def attend(self, *args: Tensor, **options: Any) -> Tensor:
        out = flash_attn_with_kvcache(*args, **options)
        self.append(dict(options, k_cache=args[1]))
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    module.flash_attn_with_kvcache = made.attend
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    gpu_flash3._flash_attention.cache_clear()
    yield made
    gpu_flash3._flash_attention.cache_clear()


def finite(case: PagedCase, backend: Flash3Attention) -> KVCache:
    """The filled pool with zeros where PagedCase puts NaN."""
    cache = case.filled_cache(backend)
    cache.key.nan_to_num_()
    cache.value.nan_to_num_()
    return cache


@pytest.mark.usefixtures("calls")
def test_a_new_pool_is_zero() -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialised tensors with NaN
    try:
        cache = Flash3Attention().new_cache(3, 16, LAYER, torch.float16, CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not cache.key.any() and not cache.value.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["prompts", "chunks in the middle", "mix", "head size 80, odd group", "window", "window of one", "softcap",
     "blocks of 48"],
)  # fmt: skip
def test_it_agrees_with_the_reference(calls: Calls, name: str, dtype: torch.dtype) -> None:
    case = case_of(name, dtype)
    exact = case.with_dtype(torch.float32).run(ReferenceAttention())
    backend = Flash3Attention()
    assert relative_error(case.attend(backend, finite(case, backend)), exact) < 2 * torch.finfo(dtype).eps
    assert len(calls) == 1
    assert calls[0]["window_size"] == ((-1, -1) if not (w := CASES[name][0].sliding_window) else (w - 1, 0))


@pytest.mark.parametrize("layout", ["heads first", "fused", "size strided"])
def test_the_pool_is_read_in_place_for_any_layout_of_queries(calls: Calls, layout: str) -> None:
    case = case_of("mix", torch.float16, layout=layout)
    backend = Flash3Attention()
    expected = case.with_dtype(torch.float32).run(ReferenceAttention())
    assert relative_error(case.attend(backend, finite(case, backend)), expected) < 2e-3
    (call,) = calls
    cache = call["k_cache"]
    assert cache.stride()[1:] == (128, 128 * 16 * 1, 1)


def test_decodes_are_not_its_business(calls: Calls) -> None:
    """One token each, or a few: what CUDA graphs capture never depends on another package."""
    for name in ("decode", "a few tokens each"):
        case = case_of(name, torch.float16)
        backend = Flash3Attention()
        assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 1e-3
        assert case.prepared(backend).work, "planned"
    assert not calls
    prompt = case_of("prompts", torch.float16)
    assert not prompt.prepared(backend).work, "no plan for a batch that it computes"


def test_layers_of_several_kinds_in_a_step(calls: Calls) -> None:
    """With four tokens each, a group of 4 is a decode and a group of 8 is not."""
    case = PagedCase(spec(4, 1, 64), [40, 50], [4, 4], 16, torch.float16)
    wide = replace(case, spec=spec(8, 1, 64))
    backend = Flash3Attention()
    caches = [finite(part, backend) for part in (case, wide)]
    batch = case.prepared(backend)
    for part, cache in zip((case, wide), caches):
        out = backend.attend(part.query, cache, batch, part.spec, None)
        assert relative_error(out, part.run(ReferenceAttention())) < 1e-3
    assert len(calls) == 1


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (spec(4, 2, 64, has_sinks=True), torch.bfloat16, "sinks"),
        (LAYER, torch.float32, "float32"),
        (spec(4, 2, 12), torch.bfloat16, "head sizes 12 and 12"),
        (spec(4, 2, 264), torch.bfloat16, "head size 264"),
        (LayerSpec(4, 2, 128, 64, 0.1), torch.bfloat16, "head sizes 128 and 64"),
        (spec(4, 2, 64, kv_cache_dtype=torch.float8_e4m3fn), torch.bfloat16, "kv_cache_dtype='fp8'"),
    ],
)
def test_unsupported_features_are_named(layer: LayerSpec, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        select_attention("flash3", [layer], dtype, 16, CPU)
    assert select_attention("flash3", [LAYER], torch.bfloat16, 16, CPU).name == "flash3"
    assert select_attention("auto", [LAYER], torch.bfloat16, 16, CPU).name != "flash3"


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_only_on_hopper(capability: tuple[int, int]) -> None:
    reason = Flash3Attention(Card(capability, 108, 163 * 1024)).unsupported(LAYER, torch.bfloat16, 16)
    assert reason == f"compute capability {capability[0]}.{capability[1]} (FlashAttention-3 supports 9.0, Hopper)"


class TestWhereItComesFrom:
    @pytest.fixture(autouse=True)
    def not_installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name in ("flash_attn_interface", "kernels"):
            monkeypatch.setitem(sys.modules, name, None)  # find_spec raises ValueError for a module without a spec
        monkeypatch.setattr(gpu_flash3.importlib.util, "find_spec", lambda name: sys.modules.get(name))
        gpu_flash3._flash_attention.cache_clear()
        yield
        gpu_flash3._flash_attention.cache_clear()

    def kernels(self, monkeypatch: pytest.MonkeyPatch, get_kernel: object) -> None:
        module = types.ModuleType("kernels")
        module.get_kernel = get_kernel
        monkeypatch.setitem(sys.modules, "kernels", module)

    def test_without_a_package_it_says_what_to_install(self) -> None:
        reason = Flash3Attention(Card((9, 0), 1, 227 * 1024)).unsupported(LAYER, torch.bfloat16, 16)
        assert reason is not None and "pip install kernels" in reason and "Dao-AILab" in reason

    def test_the_kernels_package_fetches_a_pinned_version_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def get_kernel(repository: str, *, version: int) -> object:
            asked.append((repository, version))
            return types.SimpleNamespace(flash_attn_with_kvcache=len)

        self.kernels(monkeypatch, get_kernel)
        backend = Flash3Attention(Card((9, 0), 1, 227 * 1024))
        assert [backend.unsupported(LAYER, torch.bfloat16, 16) for _ in range(3)] == [None] * 3
        assert asked == [("kernels-community/flash-attn3", 1)]

    def test_a_failed_download_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def get_kernel(repository: str, *, version: int) -> object:
            raise OSError("no network")

        self.kernels(monkeypatch, get_kernel)
        reason = Flash3Attention(Card((9, 0), 1, 227 * 1024)).unsupported(LAYER, torch.bfloat16, 16)
        assert reason == "FlashAttention-3 cannot be loaded: OSError: no network"
