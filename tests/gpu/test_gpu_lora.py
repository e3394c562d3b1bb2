"""Adapters on a GPU: the kernels, and the tokens of merged weights; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from adapters import attached, make_adapter, merged_checkpoint
from card_sizes import sized
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from lora_slots import exact_sums, lora_slots
from offline import make_core, run, tokens

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.gpu_lora import MAX_SPLIT_ROWS, GpuLora
from inflight.kernels.registry import select_lora
from inflight.loading.forward import device_adapters

CUDA = torch.device("cuda")
# inputs, outputs of the layers, rank: Llama 3 8B's query, key and value, and its down projection; Qwen3 0.6B's gate, up
SHAPES: list[Any] = sized(
    [(4096, (4096, 1024, 1024), 16), (14336, (4096,), 64), (1024, (3072, 3072), 256)], [(300, (40, 24, 24), 16)]
)
SLOTS = sized(8, 2)


def case(shape: Any, count: int, dtype: torch.dtype) -> Any:
    num_inputs, sizes, rank = shape
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, size, generator=generator).to(CUDA, dtype) for size in (num_inputs, sum(sizes)))
    of_token = torch.randint(-1, SLOTS, (count,), generator=generator, dtype=torch.int32).to(CUDA)
    return lora_slots(SLOTS, num_inputs, sizes, rank, dtype, CUDA), x, of_token, y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_float64(shape: Any, dtype: torch.dtype) -> None:
    """Up to the rounding of the inner numbers and of a result; rows without an adapter keep their bits."""
    eps = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.6)
    ops = GpuLora()
    for count in sized((1, 17, MAX_SPLIT_ROWS, MAX_SPLIT_ROWS + 1), (5, MAX_SPLIT_ROWS + 1)):
        slots, x, of_token, y = case(shape, count, dtype)
        ops.prepare(slots, count)
        result = y.clone()
        ops.add(x, slots, of_token, result)
        exact = exact_sums(x, slots, of_token.cpu(), y)
        assert (result.cpu().double() - exact).norm() / exact.norm() < eps
        assert torch.equal(result[of_token < 0], y[of_token < 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(shape: Any, dtype: torch.dtype) -> None:
    """In a tile of 16 or of 64, with splits among programs or in one."""
    slots, x, of_token, y = case(shape, 150, dtype)
    ops = GpuLora()
    ops.prepare(slots, 150)
    whole = y.clone()
    ops.add(x, slots, of_token, whole)
    for count in sized(range(1, 150), (1, 16, 17, MAX_SPLIT_ROWS)):
        first = (7 * count) % (151 - count)
        rows = slice(first, first + count)
        part = y[rows].clone()
        ops.add(x[rows], slots, of_token[rows], part)
        assert torch.equal(part, whole[rows]), count


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gpt2"])
def test_the_engine_gives_the_tokens_of_merged_weights(
    model_type: str, eager: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More adapters than slots, and none, in float32."""
    smaller = sized({}, {"num_hidden_layers": 1}) if model_type == "llama" else {}
    path = make_checkpoint(model_type, tmp_path, **smaller)
    refs = [make_adapter(tmp_path / f"a{i}", path, seed=i, rank=3 + 14 * i, strength=1.2) for i in range(2)]
    paths = [*(merged_checkpoint(path, ref, tmp_path / f"merged {ref.name}") for ref in refs), path]
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in sized((3, 90, 9), (3, 9, 5))
    ]
    count = sized(20, 3)
    expected = [greedy_reference(paths[i], [prompt], [count])[0] for i, prompt in enumerate(prompts)]
    request.getfixturevalue("any_kernels")
    monkeypatch.setattr(device_adapters, "select_lora", select_lora)  # not a function of torch
    options: dict[str, Any] = dict(max_num_batched_tokens=sized(64, 12), max_num_seqs=3, max_model_len=128)
    core = make_core(
        path, device="cuda", enable_lora=True, max_loras=1, max_lora_rank=20, enforce_eager=eager,
        check_on_load=sized(True, False), async_scheduling=True, kv_cache_memory=None, num_gpu_blocks_override=64,
        **options,
    )  # fmt: skip
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)] * 3
    deltas = run(core, prompts, params, stagger=1, attached=[*map(attached, refs), None])
    assert [tokens(deltas[i, 0]) for i in range(3)] == expected


def test_the_kernels_are_compared_with_their_definition_at_load(tmp_path: Path, any_kernels: None) -> None:
    """Which compiles them."""
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    core = make_core(path, device="cuda", dtype="float16", max_model_len=64, max_num_batched_tokens=80, max_num_seqs=2,
                     enable_lora=True, max_loras=2, enforce_eager=True, check_on_load=False)  # fmt: skip
    model: Any = core.info.adapters._model  # type: ignore[union-attr]
    model._ops = GpuLora()
    for product in model._products:
        model._ops.prepare(product.slots(model._slots, model._rank), 80)
    model.verify()
    assert not bool(model._slots.any()), "the slots are empty again"

    class Wrong(GpuLora):
        def add(self, x: Any, slots: Any, slot_of_token: Any, y: Any) -> None:
            y += 1

    model._ops = Wrong()
    with pytest.raises(device_adapters.LoadError, match=r"enable_lora=True does not work here: .*differs by"):
        model.verify()
