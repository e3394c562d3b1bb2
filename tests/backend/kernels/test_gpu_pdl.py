"""Programmatic dependent launch: with the switch, every kernel of a decode step waits first; without it, none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from compiled_kernels import compiled
from torch import nn

pytest.importorskip("triton")

from attention_cases import spec
from paged_case import PagedCase

from inflight.config import ConfigError, EngineConfig
from inflight.kernel_config import KernelConfig
from inflight.kernels import registry
from inflight.kernels.gpu import gpu_pdl
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu.launch import interpreted
from inflight.kernels.registry import check_switches, select_attention, select_ops
from inflight.loading import loader
from inflight.loading.forward import acceleration, switched_kernels
from inflight.loading.quantization.schemes import scheme_of

SCRIPT = """
import json, re, sys
import torch
from attention_cases import spec
from gpu_target import SMS, card, target
from paged_case import PagedCase
from inflight.attention.base import AttentionMetadata, LayerAttention
from inflight.kernels.gpu import gpu_kv_cache
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu.gpu_split_k import Workspace, split_k_linear, split_of
from inflight.ops.base import Angles, HeadNorms

arch, launch_pdl = json.loads(sys.argv[1])
bf16, layer = torch.bfloat16, spec(8, 2, 64)

def facts(kernel):
    body = kernel.ptx[kernel.ptx.index(".entry"):]
    code = body[body.index("{"):]
    before, _, _ = re.sub("//.*", "", code).partition("griddepcontrol.wait")
    early = r"\\b(ld\\.global|st\\.global|ld\\.shared|atom|red|cp\\.async|bra|ret|exit)\\b"
    found = sorted(set(re.findall(r"griddepcontrol\\.\\w+", kernel.ptx)))
    return dict(kernel=kernel.name, found=found, early=re.findall(early, before), pdl=kernel.launch_pdl)

with target(arch) as compiled:
    ops = GpuOps(launch_pdl=launch_pdl)
    x, weight = torch.empty(3, 512, dtype=bf16), torch.empty(512, dtype=bf16)
    for quantized in (False, True):
        ops.rms_norm(x, weight, 1e-6, quantized=quantized)
        ops.add_rms_norm(x, x.clone(), weight, 1e-6, quantized=quantized)
        ops.silu_and_mul(x, quantized=quantized)
    ops.quantize_rows(x)
    ops.rotary(x.view(3, 8, 64), x.view(3, 8, 64), *torch.empty(2, 3, 64, dtype=bf16))
    cache = gpu_kv_cache.new_cache(4, 16, layer, bf16, torch.device("cpu"))
    slots = torch.zeros(3, dtype=torch.int64)
    metadata = AttentionMetadata(slots, slots, slots, slots, [], [], 1, 1, 16)
    table, norm = torch.empty(64, 32, dtype=bf16), torch.empty(64, dtype=bf16)
    norms, angles = HeadNorms(norm, norm, 1e-6), Angles(table, table, 64, slots)
    ops.rotate_and_write(torch.empty(3, 768, dtype=bf16), LayerAttention(layer, None, cache), metadata, norms, angles)
    case, backend = PagedCase(layer, [9000], [1], 16, bf16), GpuAttention(card(arch), launch_pdl=launch_pdl)
    backend._warm_up = lambda *_: None  # compiles the kernels of prompts, too
    cache = backend.new_cache(600, 16, layer, bf16, torch.device("cpu"))
    backend.attend(case.query, cache, case.prepared(backend), layer, None)
    split = split_of(256, 4096, SMS[arch])
    workspace = Workspace([(split, 256)], torch.device("cpu"))
    operands = torch.empty(1, 4096, dtype=bf16), torch.empty(256, 4096, dtype=bf16), None
    split_k_linear(*operands, split, workspace, launch_pdl=launch_pdl)
print(json.dumps([facts(kernel) for kernel in compiled]))
"""
SOURCES = [
    "backend/inflight/attention/base.py",
    "backend/inflight/kernels/gpu",
    "backend/inflight/ops/base.py",
    "tests/support/attention_cases.py",
    "tests/support/gpu_target.py",
    "tests/support/paged_case.py",
]
# Kernels of a decode step that begin so.  The write of keys and values that were not fused does not, nor do copies.
BEGIN = {
    "add_rms_norm_kernel",
    "attend_kernel",
    "plan_kernel",
    "quantize_rows_kernel",
    "reduce_kernel",
    "rms_norm_kernel",
    "rotary_kernel",
    "rotate_and_write_kernel",
    "silu_and_mul_kernel",
    "silu_and_mul_quantized_kernel",
    "split_k_kernel",
}


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize(("arch", "launch_pdl"), [(90, True), (90, False), (120, True)])
def test_every_program_waits_before_it_touches_memory(
    tmp_path: Path, cache: pytest.Cache, arch: int, launch_pdl: bool
) -> None:
    kernels: list[dict[str, Any]] = compiled(cache, tmp_path, "pdl", SCRIPT, [arch, launch_pdl], SOURCES)
    assert {kernel["kernel"] for kernel in kernels} >= BEGIN
    for kernel in kernels:
        if launch_pdl and kernel["kernel"] in BEGIN:
            assert kernel["found"] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"], kernel
            assert kernel["early"] == [], f"before it waits: {kernel}"
            assert kernel["pdl"]
        else:
            assert kernel["found"] == [] and not kernel["pdl"], kernel


@pytest.mark.skipif(not interpreted(), reason="kernels are compiled for the GPU here")
def test_the_interpreter_runs_kernels_without_it() -> None:
    assert gpu_pdl.pdl_options(True) == {}
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(GpuOps(launch_pdl=True).rms_norm(x, weight, 1e-6), GpuOps().rms_norm(x, weight, 1e-6))
    case = PagedCase(spec(4, 2, 64), [40, 20], [1, 20], 16)
    assert torch.equal(case.run(GpuAttention(launch_pdl=True)), case.run(GpuAttention()))


def test_the_switch_reaches_ops_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pdl, "interpreted", lambda: False)
    monkeypatch.setattr(registry, "can_launch", lambda device: True)
    cuda, layer, switched = torch.device("cuda"), spec(4, 2, 64), KernelConfig(launch_pdl=True)
    for launch_pdl, options in ((True, {"PDL": True, "launch_pdl": True}), (False, {})):
        ops: Any = select_ops(cuda, launch_pdl)
        assert ops._launch == options
    if interpreted():
        for kernels in (switched, KernelConfig(launch_pdl=True, varlen_attention=True)):
            backend: Any = select_attention("gpu", [layer], torch.float16, 16, torch.device("cpu"), kernels)
            assert backend._launch_pdl
        unswitched: Any = select_attention("gpu", [layer], torch.float16, 16, torch.device("cpu"), KernelConfig())
        assert not unswitched._launch_pdl


@pytest.mark.skipif(not interpreted(), reason="the device is a CPU")
def test_loading_passes_the_switches_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def select(*args: Any) -> Any:
        seen["attention"] = args[-1]
        return select_attention(*args)

    monkeypatch.setattr(loader, "select_attention", select)
    monkeypatch.setattr(loader, "accelerate", lambda *args: seen.update(accelerate=args[-1]) or args[0])
    monkeypatch.setattr(switched_kernels, "split_linears", lambda model, launch_pdl: seen.update(split=launch_pdl))
    path, switches = make_checkpoint("llama", tmp_path), dict(launch_pdl=True, split_k=True)
    loader.load(EngineConfig.from_dict(dict(model=path, device="cpu", kv_cache_memory="1MiB", kernel_config=switches)))
    assert seen == {"attention": KernelConfig(**switches), "accelerate": KernelConfig(**switches), "split": True}

    monkeypatch.setattr(acceleration, "select_ops", lambda device, launch_pdl: seen.update(ops=launch_pdl))
    monkeypatch.setattr(acceleration, "use_ops", lambda model, *_: model)
    for kernels in (KernelConfig(launch_pdl=True), KernelConfig()):
        acceleration.accelerate(nn.Module(), torch.device("cuda"), bool, 8, scheme_of(EngineConfig(model="m")), kernels)
        assert seen["ops"] is kernels.launch_pdl


def test_cards_without_it_refuse_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "unavailable", lambda: None)
    cuda = torch.device("cuda")
    for capability, allowed in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        check_switches(KernelConfig(split_k=True), cuda)
        if allowed:
            check_switches(KernelConfig(launch_pdl=True), cuda)
        else:
            with pytest.raises(ConfigError, match=r"launch_pdl needs .* 9\.0 or later, and this one has 8\.\d; remove"):
                check_switches(KernelConfig(launch_pdl=True), cuda)
