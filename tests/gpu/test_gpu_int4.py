"""Weights in four bits on a GPU, compared with their twin on the CPU; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import make_checkpoint
from int4_layers import KINDS, int4_twins, int4_weight
from integer_checkpoints import write
from offline import make_core, run, tokens

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu.weight_format import INT4
from inflight.kernels.gpu.gpu_int4 import MAX_ROWS, GpuInt4
from inflight.loading.quantization.int4_linear import Int4Linear, quantised
from inflight.ops.int4 import Int4Weight

CUDA = torch.device("cuda")
# outputs, inputs, group; of one part and of several
SIZES = sized([(6144, 4096, 32), (4096, 14336, 128), (28672, 4096, 128), (1000, 1088, 1088)], [(72, 256, 16)])
PROMPTS = [[1], [5, 6, 7] * 24, *sized([[9] * 200, [3, 1, 4, 1, 5] * 18], [[9] * 9])]
COUNT = sized(20, 4)


def on_card(outputs: int, inputs: int, group: int, kind: str) -> tuple[Int4Weight, torch.Tensor]:
    weight, exact = int4_weight(outputs, inputs, group, kind)
    parts = (weight.codes, weight.scales, weight.offsets, weight.factors)
    return Int4Weight(*(None if part is None else part.to(CUDA) for part in parts)), exact  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_codes(size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    """Up to the rounding of a result; above MAX_ROWS also up to that of the weight."""
    weight, exact_weight = on_card(*size, kind)
    ops, eps = GpuInt4(), torch.finfo(dtype).eps
    ops.prepare(weight, dtype)
    for count in (1, 17, 33, MAX_ROWS + 1):
        x = torch.randn(count, size[1], device=CUDA).to(dtype)
        exact = F.linear(x.cpu().double(), exact_weight)
        off = (ops.linear(x, weight, None).cpu().double() - exact).norm() / exact.norm()
        assert off < (0.3 if count <= MAX_ROWS else 0.6) * eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_of_up_to_64(size: tuple[int, int, int], kind: str) -> None:
    """Whichever tile computes it."""
    weight, _ = on_card(*size, kind)
    ops = GpuInt4()
    ops.prepare(weight, torch.bfloat16)
    x = torch.randn(MAX_ROWS, size[1], device=CUDA).bfloat16()
    whole = ops.linear(x, weight, None)
    for count in sized(range(1, MAX_ROWS), (1, 16, 17, 32, 33, 63)):
        first = (7 * count) % (MAX_ROWS - count + 1)
        assert torch.equal(ops.linear(x[first : first + count], weight, None), whole[first : first + count])


def test_codes_are_those_of_a_cpu() -> None:
    """Wherever the weight is; dequantised on the card, each number to the last bit."""
    weight, importance = torch.randn(*sized((4096, 4096), (40, 96))), torch.rand(sized(4096, 96)) + 0.1
    found = quantised(weight.to(CUDA), importance, CUDA)
    assert found.codes.device.type == "cuda"
    assert torch.equal(found.dequantised(torch.float32).cpu(), INT4.encode(weight, importance).dequantize())


def generated(path: str, **options: Any) -> list[list[int]]:
    limits = sized(dict(max_num_batched_tokens=300, max_num_seqs=3), dict(max_num_batched_tokens=80, max_num_seqs=2))
    core = make_core(path, dtype="float16", check_on_load=False, max_model_len=256, block_size=16, **limits, **options)
    if options["device"] == "cuda":
        modules = core.runner.model.modules()  # type: ignore[attr-defined]
        assert any(isinstance(module, Int4Linear) for module in modules)
    params = [SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)] * len(PROMPTS)
    deltas = run(core, PROMPTS, params, stagger=2)
    return [tokens(deltas[number, 0]) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("stored", [None, "gptq act-order", "awq"], ids=["int4", "gptq", "awq"])
def test_the_engine_gives_the_tokens_of_the_twin(
    stored: str | None, eager: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Quantised at load, or a checkpoint served in its codes; steps of more than 64 rows, too."""
    path = make_checkpoint("llama", tmp_path, head_dim=32, intermediate_size=64, num_hidden_layers=sized(2, 1))
    quantization: dict[str, Any] = {"quantization": "int4"} if stored is None else {}
    if stored is not None:
        write(path, stored)
    with int4_twins():
        expected = generated(path, device="cpu", native_forward=False, attention_backend="reference", **quantization)
    request.getfixturevalue("any_kernels")  # not for the engine on the CPU
    assert generated(path, device="cuda", enforce_eager=eager, async_scheduling=True, **quantization) == expected
