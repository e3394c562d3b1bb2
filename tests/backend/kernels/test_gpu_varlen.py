"""Whole prompts by `varlen_attn`, with a substitute that computes what torch documents; tests/gpu runs the real one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import CASES, case_of, spec
from flash_attention import varlen_attn_2_11, varlen_attn_2_12
from paged_case import PagedCase, relative_error
from torch import Tensor

pytest.importorskip("triton")

import torch.nn.attention.varlen as torchs

from inflight.attention.base import LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.config import ConfigError
from inflight.kernel_config import KernelConfig
from inflight.kernels.gpu import gpu_varlen
from inflight.kernels.gpu.gpu_varlen import VarlenAttention
from inflight.kernels.gpu.launch import interpreted
from inflight.kernels.registry import select_attention

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
]
CPU = torch.device("cpu")
LAYER = spec(4, 2, 64)
SWITCHED = KernelConfig(varlen_attention=True)


class VarlenAttn:
    """torch's function of some version; `lengths` are those of the prompts of each call."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.lengths: list[list[int]] = []

    def installed(self) -> Callable[..., Tensor]:
        @functools.wraps(self.function)
        def call(*args: Any, **options: Any) -> Tensor:
            out = self.function(*args, **options)
            self.lengths.append(args[3].diff().tolist())
            return out

        return call


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(torchs, "varlen_attn", function)
    gpu_varlen._varlen_attn.cache_clear()


@pytest.fixture(params=[varlen_attn_2_11, varlen_attn_2_12], ids=["torch 2.11", "torch 2.12"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[VarlenAttn]:
    made = VarlenAttn(request.param)
    install(monkeypatch, made.installed())
    yield made
    gpu_varlen._varlen_attn.cache_clear()


def test_the_installed_torch_has_the_signature_of_the_substitute() -> None:
    _, names_groups = gpu_varlen._varlen_attn()
    assert names_groups == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layer", "lengths"), [(LAYER, [3, 70, 1]), (spec(2, 2, 64), [33]), (spec(6, 2, 80), [20, 40]), (LAYER, [48, 16])]
)
def test_whole_prompts(calls: VarlenAttn, layer: LayerSpec, lengths: list[int], dtype: torch.dtype) -> None:
    case = PagedCase(layer, lengths, lengths, 16, dtype)
    backend = VarlenAttention()
    cache = case.filled_cache(backend)
    calls.lengths.clear()
    out = case.attend(backend, cache)
    assert calls.lengths == [lengths]
    assert not case.prepared(backend).work, "no plan for a kernel that is not launched"
    assert relative_error(out, case.with_dtype(torch.float32).run(ReferenceAttention())) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["chunks in the middle", "mix", "decode", "a few tokens each"])
def test_other_steps_are_the_gpu_kernels(calls: VarlenAttn, name: str) -> None:
    case, backend = case_of(name, torch.float16), VarlenAttention()
    cache = case.filled_cache(backend)
    calls.lengths.clear()
    assert relative_error(case.attend(backend, cache), case.run(ReferenceAttention())) < 2e-3
    assert not calls.lengths


def test_prompts_of_one_token_are_decodes(calls: VarlenAttn) -> None:
    case, backend = PagedCase(LAYER, [1, 1], [1, 1], 16, torch.float16), VarlenAttention()
    cache = case.filled_cache(backend)
    calls.lengths.clear()
    assert relative_error(case.attend(backend, cache), case.run(ReferenceAttention())) < 2e-3
    assert not calls.lengths


def test_a_cached_prefix_or_an_earlier_chunk_is_attended_to(calls: VarlenAttn) -> None:
    """One request of the step has KV of its own from before: none of them is computed without."""
    case, backend = PagedCase(LAYER, [40, 60], [40, 44], 16, torch.float16), VarlenAttention()
    cache = case.filled_cache(backend)
    calls.lengths.clear()
    assert relative_error(case.attend(backend, cache), case.run(ReferenceAttention())) < 2e-3
    assert not calls.lengths


def test_a_captured_step_is_the_gpu_kernels(calls: VarlenAttn, monkeypatch: pytest.MonkeyPatch) -> None:
    case, backend = PagedCase(LAYER, [40], [40], 16, torch.float16), VarlenAttention()
    cache = case.filled_cache(backend)
    monkeypatch.setattr(gpu_varlen, "_is_capturing", lambda: True)
    calls.lengths.clear()
    assert relative_error(case.attend(backend, cache), case.run(ReferenceAttention())) < 2e-3
    assert not calls.lengths


def test_layers_of_several_kinds_in_a_step(calls: VarlenAttn, caplog: pytest.LogCaptureFixture) -> None:
    """As in gemma: some with a window."""
    case = PagedCase(LAYER, [90, 50], [90, 50], 16, torch.float16)
    windowed = replace(case, spec=replace(LAYER, sliding_window=20))
    backend = VarlenAttention()
    caches = [part.filled_cache(backend) for part in (case, windowed)]
    batch = case.prepared(backend)
    assert list(batch.work) == [(windowed.spec, torch.float16)], "planned for the gpu kernel's layers only"
    calls.lengths.clear()
    for part, cache in zip((case, windowed), caches):
        out = backend.attend(part.query, cache, batch, part.spec, None)
        assert relative_error(out, part.run(ReferenceAttention())) < 2e-3
    assert len(calls.lengths) == 1
    assert [m for m in caplog.messages if "a sliding window of 20 tokens" in m], "named"


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("softcap", torch.float16, "a soft cap of 3.0"),
        ("sinks", torch.float16, "sinks"),
        ("values of another size", torch.float16, "head sizes 96 and 64"),
        ("prompts", torch.float32, "dtype float32"),
    ],
)
def test_a_layer_that_does_not_fit_is_named_and_computed(
    name: str, dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer, _, _, block_size = CASES[name]
    case, backend = PagedCase(layer, [40, 20], [40, 20], block_size, dtype), VarlenAttention()
    assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 2e-3
    case.run(backend)
    (line,) = [line for line in caplog.messages if "varlen_attention" in line]
    assert line.startswith(f"kernel_config: varlen_attention is not used, but the gpu kernel: {reason}")


def raises(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


def is_not_causal(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value.repeat_interleave(2, dim=1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(raises, "RuntimeError: FlashAttention only supports Ampere"), (is_not_causal, "its results differ by")],
)
def test_a_function_that_does_not_work_here_is_not_used(
    function: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, function)
    case, backend = PagedCase(LAYER, [40, 20], [40, 20], 16, torch.float16), VarlenAttention()
    assert relative_error(case.run(backend), case.run(ReferenceAttention())) < 2e-3
    with caplog.at_level(logging.WARNING):
        assert any(reason in line for line in caplog.messages)
    gpu_varlen._varlen_attn.cache_clear()


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(torchs, "varlen_attn")
    gpu_varlen._varlen_attn.cache_clear()
    PagedCase(LAYER, [40, 20], [40, 20], 16, torch.float16).run(VarlenAttention())
    assert any("varlen_attention is not used, but the gpu kernel: ImportError" in line for line in caplog.messages)


def test_the_switch_selects_it() -> None:
    for name in ("gpu", "triton"):
        backend = select_attention(name, [LAYER], torch.float16, 16, CPU, SWITCHED)
        assert type(backend) is VarlenAttention
    assert type(select_attention("gpu", [LAYER], torch.float16, 16, CPU, KernelConfig())) is not VarlenAttention
    for name in ("reference", "flash3"):
        with pytest.raises(ConfigError, match=f"belongs to attention_backend='gpu', not to '{name}'; remove one"):
            select_attention(name, [LAYER], torch.float16, 16, CPU, SWITCHED)
