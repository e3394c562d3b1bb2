"""Linear layers in fp8 on a GPU, compared with their twin on the CPU; skipped without one that has fp8 products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("this card has no fp8 products", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import VOCAB, make_checkpoint
from fp8_checkpoints import SCHEMES, compress
from fp8_twins import fp8_twins
from offline import make_core, run, tokens
from paged_case import relative_error
from torch import nn

from inflight.config import EngineConfig
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.registry import select_ops
from inflight.loading.check import load_check as checks
from inflight.loading.check.cases import cases
from inflight.loading.check.load_check import reference
from inflight.loading.loader import LoadedModel, load
from inflight.loading.quantization.fp8_linear import Fp8Linear, product
from inflight.ops.base import QuantizedRows
from inflight.ops.reference_ops import ReferenceOps

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
LARGE = sized([(4096, 6144), (14336, 4096)], [(512, 96), (96, 512)])


def layer(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> Fp8Linear:
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    return Fp8Linear.quantized(linear, CUDA, select_ops(CUDA))


def by_the_twin(made: Fp8Linear, rows: QuantizedRows) -> torch.Tensor:
    bias = None if made.bias is None else made.bias.cpu()
    on_cpu = QuantizedRows(rows.values.cpu(), rows.scales.cpu())
    return product(on_cpu, made.weight.cpu(), made.weight_scale.cpu(), bias, made.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(16, 16), (64, 48), *sized([(4096, 6144), (14336, 4096)], [(512, 96), (96, 512)])]
)
def test_products_are_the_twins(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    """Up to the order of additions, Hopper's fast accumulation, and the rounding of the result."""
    made = layer(inputs, outputs, dtype, bias)
    for count in (1, 17, sized(300, 40)):
        x = torch.randn(count, inputs, device=CUDA, dtype=dtype)
        x[0] *= 1000
        rows = select_ops(CUDA).quantize_rows(x)
        out = made(x)
        assert out.dtype == dtype
        expected = by_the_twin(made, rows)
        for row, right in zip(out.cpu(), expected):
            assert relative_error(row, right) < 0.01
        assert torch.equal(out, made(rows))


def test_quantising_is_the_twins() -> None:
    linear = nn.Linear(sized(4096, 512), sized(256, 32)).to(torch.bfloat16).requires_grad_(False)
    on_card = Fp8Linear.quantized(linear, CUDA, select_ops(CUDA))
    on_cpu = Fp8Linear.quantized(linear, CPU, ReferenceOps())
    assert torch.equal(on_card.weight.cpu().view(torch.uint8), on_cpu.weight.view(torch.uint8))
    assert torch.equal(on_card.weight_scale.cpu(), on_cpu.weight_scale)


def test_merged_layers_compute_the_same() -> None:
    parts = [layer(128, outputs, torch.bfloat16, True) for outputs in (64, 16, 32)]
    x = torch.randn(9, 128, device=CUDA, dtype=torch.bfloat16)
    expected = torch.cat([part(x) for part in parts], dim=-1)
    assert relative_error(Fp8Linear.merged(parts)(x).cpu(), expected.cpu()) < 0.005


def loaded(path: str, device: str, **options: Any) -> LoadedModel:
    values = {"model": path, "device": device, "dtype": "bfloat16", "kv_cache_memory": "64MiB", **options}
    return load(EngineConfig.from_dict(values))


def logits_differ(on_card: LoadedModel, twin: LoadedModel) -> float:
    """Relative error of the card's logits of a ragged batch, on the pool that the check at load used."""
    expected = reference(twin.model, cases(VOCAB, 64, [], None, 0), CPU)
    expected = replace(expected, logits=[logits.to(CUDA) for logits in expected.logits])
    return checks.relative_error(on_card.model, on_card.backend, expected, on_card.config.block_size, CUDA)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_a_models_logits_are_the_twins(model_type: str, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path, head_dim=32)
    with fp8_twins():
        twin = loaded(path, "cpu", quantization="fp8", native_forward=False)
    assert logits_differ(loaded(path, "cuda", quantization="fp8"), twin) < 0.2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_in_fp8_run_as_they_are(scheme: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, head_dim=32)
    compress(path, scheme)
    with fp8_twins():
        twin = loaded(path, "cpu", native_forward=False)
    on_card = loaded(path, "cuda")
    assert any(isinstance(module, Fp8Linear) for module in on_card.model.modules())
    assert logits_differ(on_card, twin) < 0.2


@pytest.mark.parametrize("eager", [True, False])
def test_the_engine_serves_with_weights_and_kv_in_fp8(eager: bool, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, head_dim=64)
    options = dict(quantization="fp8", kv_cache_dtype="fp8", enforce_eager=eager, async_scheduling=True)
    limits = sized(dict(max_num_batched_tokens=40, max_num_seqs=3), dict(max_num_batched_tokens=30, max_num_seqs=2))
    core = make_core(path, device="cuda", dtype="bfloat16", **limits, **options)
    prompts = [[1], [5, 6, 7] * 12, *sized([[9] * 20, [3, 1, 4, 1, 5] * 18], [[9] * 9])]
    count = sized(20, 5)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)] * len(prompts)
    deltas = run(core, prompts, params, stagger=2)
    assert [len(tokens(deltas[index, 0])) for index in range(len(prompts))] == [count] * len(prompts)
