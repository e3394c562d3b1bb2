"""Loading in the order of a GPU, on an emulated card of little memory: merged first, measured, and the pool last."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from card_rig import card_core, functions_as_kernels
from checkpoints import greedy_reference, make_checkpoint
from emulated_card import Card, emulated_card
from nightly import nightly_but
from offline import run, tokens

from inflight.attention.reference import ReferenceAttention
from inflight.config import EngineConfig
from inflight.device.batch_state import BatchState
from inflight.engine.sampling_params import SamplingParams
from inflight.loading import loaded_model, memory_plan
from inflight.loading.checkpoint import kv_scales
from inflight.loading.load_errors import LoadError
from inflight.loading.profile_step import largest_step, largest_steps
from inflight.loading.quantization.fp8_linear import Fp8Linear
from inflight.loading.quantization.int4_linear import Int4Linear
from inflight.runner.graphs import decode_sizes

CPU = torch.device("cpu")
MIB = 2**20
OTHERS = 10 * MIB
DTYPES = {None: "float32", "fp8": "bfloat16", "int4": "bfloat16"}
FEW = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("order"), vocab_size=4001)


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card of 100 MiB with another process on it; without headroom, so that the plan must be right."""
    monkeypatch.setattr(memory_plan, "HEADROOM", 0)
    with emulated_card(total=100 * MIB) as made:
        made.allocator.others = OTHERS
        yield made


@pytest.fixture
def card(small_card: Card, monkeypatch: pytest.MonkeyPatch) -> Card:
    """The same, with functions of torch as kernels."""
    functions_as_kernels(monkeypatch)
    return small_card


def gpu_core(path: str, **options: Any) -> Any:
    sizes = dict(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=None, check_on_load=True)
    return card_core(path, **{"kv_cache_memory": None, "enforce_eager": True, **sizes, **options})


def peak() -> int:
    """Bytes that are in use at most, since the last call of `forget_the_peak`."""
    return OTHERS + torch.cuda.max_memory_reserved()


def forget_the_peak() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def busy_params(index: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0, prompt_logprobs=5),
        dict(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5),
        dict(temperature=0.7, top_k=20, presence_penalty=0.3, logprobs=3),
    ]
    return SamplingParams(max_tokens=8, ignore_eos=True, seed=index, **kinds[index % 3])


@pytest.mark.parametrize("quantization", nightly_but([None], [None, "fp8", "int4"]))
def test_no_load_takes_more_than_the_utilization(checkpoint: str, card: Card, quantization: str | None) -> None:
    core = gpu_core(checkpoint, gpu_memory_utilization=0.48, quantization=quantization, dtype=DTYPES[quantization])
    limit = 0.48 * card.allocator.total
    forget_the_peak()
    prompts = [np.random.default_rng(index).integers(0, 4001, 20 + 10 * index).tolist() for index in range(20)]
    run(core, prompts, [busy_params(index) for index in range(20)])
    assert peak() <= limit
    assert peak() > 0.9 * limit, "nor is memory kept back for nothing"


def test_a_step_of_log_probabilities_of_the_whole_vocabulary_is_in_the_plan(
    checkpoint: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plan_on_gpu = loaded_model.plan_on_gpu
    monkeypatch.setattr(loaded_model, "plan_on_gpu", lambda *args: seen.append(args[-1]) or plan_on_gpu(*args))
    card.allocator.total = 400 * MIB
    core = gpu_core(checkpoint, max_logprobs=-1)
    (memory,) = seen
    forget_the_peak()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=-1)
    asking = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=-1)
    prompts = [np.random.default_rng(index).integers(0, 4001, 30).tolist() for index in range(18)]
    run(core, prompts, [params] * 16 + [asking] * 2)
    assert peak() <= memory.used + core.info.kv_bytes + memory.step


@pytest.mark.parametrize(
    ("max_logprobs", "asked"), [(0, None), (5, None), (100, (100, 512 + 7943)), (-1, (4001, 512 + 992))]
)
def test_the_second_largest_step_asks_for_as_many_log_probabilities_as_the_scheduler_lets_it(
    max_logprobs: int, asked: tuple[int, int] | None
) -> None:
    config = EngineConfig(model="m", max_num_seqs=512, max_num_batched_tokens=2**15, max_logprobs=max_logprobs)
    first, *others = largest_steps(config, 40_000, 2, 4001)
    assert first.num_tokens == 2**15
    found = [(out.new_rows[0].params.prompt_logprobs, out.num_tokens) for out in others]
    assert found == ([] if asked is None else [asked])


@pytest.mark.parametrize("mixed", [0, 64])
def test_graphs_are_in_the_plan(checkpoint: str, card: Card, monkeypatch: pytest.MonkeyPatch, mixed: int) -> None:
    """Two of them, captured on the few blocks of the first pool, tell what all will take on the real one."""
    seen = []
    plan_on_gpu = loaded_model.plan_on_gpu
    monkeypatch.setattr(loaded_model, "plan_on_gpu", lambda *args: seen.append(args[-1]) or plan_on_gpu(*args))
    card.allocator.total = 80 * MIB
    options = {"max_num_seqs": 8, "max_cudagraph_capture_size": mixed, "enforce_eager": False}
    core = gpu_core(checkpoint, gpu_memory_utilization=0.6, **options)
    (memory,) = seen
    assert [core.runner.graphs.bucket(size) for size in decode_sizes(8)] == decode_sizes(8)
    assert 0 < core.info.graph_bytes <= memory.graphs
    forget_the_peak()
    prompts = [np.random.default_rng(index).integers(0, 4001, 20 + 9 * index).tolist() for index in range(6)]
    run(core, prompts, [busy_params(index) for index in range(6)])
    assert peak() <= 0.6 * card.allocator.total


def test_the_output_is_that_of_the_merged_model_on_the_real_pool(
    checkpoint: str, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        core = gpu_core(checkpoint, block_size=4)
    model = core.runner.model
    attention = model.model.layers[0].self_attn
    assert "forward" in vars(model.model), "merged"
    assert len(attention.inflight.cache.key) == core.info.num_blocks > 1000
    assert "pool" in caplog.text
    assert f"{core.info.num_blocks} KV blocks" in caplog.text
    prompts = [[1, 2, 3], list(range(50)), [7] * 20]
    deltas = run(core, prompts, [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 3)
    assert [tokens(deltas[index, 0]) for index in range(3)] == greedy_reference(checkpoint, prompts, [12] * 3)


@pytest.mark.nightly
def test_with_the_gpu_kernels(checkpoint: str, small_card: Card, caplog: pytest.LogCaptureFixture) -> None:
    """They read and write the few blocks of the first pool, as often as the largest step names them."""
    pytest.importorskip("triton")
    from inflight.kernels.gpu.gpu_attention_configs import SCRATCH_BYTES

    small_card.allocator.total = 400 * MIB
    with caplog.at_level(logging.INFO):
        core = gpu_core(checkpoint, **FEW)
    workspaces = re.search(r"workspaces ([0-9.]+) MiB", caplog.text)
    assert workspaces is not None
    assert float(workspaces[1]) >= SCRATCH_BYTES / MIB
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    deltas = run(core, [[1, 2, 3]], [params])
    assert [tokens(deltas[0, 0])] == greedy_reference(checkpoint, [[1, 2, 3]], [4])


def test_fp8_scales_are_those_of_the_calibration_in_the_real_pool(
    checkpoint: str, small_card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    seen: list[Any] = []
    calibrated = kv_scales.calibrated
    monkeypatch.setattr(kv_scales, "calibrated", lambda *args: seen.extend(calibrated(*args)) or list(seen))
    small_card.allocator.total = 400 * MIB
    options = dict(kv_cache_dtype="fp8", quantization="fp8", dtype=DTYPES["fp8"], check_on_load=False)
    core = gpu_core(checkpoint, **options, **FEW)
    caches = [layer.self_attn.inflight.cache for layer in core.runner.model.model.layers]
    assert len(caches[0].key) == core.info.num_blocks
    assert core.info.num_blocks > 2
    for cache, scales in zip(caches, seen):
        assert cache.key_scale is scales.key
        assert cache.value_scale is scales.value
        assert not torch.equal(scales.key.cpu(), torch.ones(2))
    assert any(isinstance(module, Fp8Linear) for module in core.runner.model.modules())
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    deltas = run(core, [[1, 2, 3]], [params])
    assert len(tokens(deltas[0, 0])) == 2, "no logits without a finite maximum"


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_merged_weights_are_in_the_plan(
    checkpoint: str, card: Card, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    seen = []
    plan_on_gpu = loaded_model.plan_on_gpu
    monkeypatch.setattr(loaded_model, "plan_on_gpu", lambda *args: seen.append(args[-1]) or plan_on_gpu(*args))
    core = gpu_core(checkpoint, quantization=quantization, dtype=DTYPES[quantization])
    (memory,) = seen
    layers = core.runner.model.model.layers
    assert all(isinstance(layer.mlp.down_proj, Fp8Linear) == (quantization == "fp8") for layer in layers)
    weights = sum(parameter.nbytes for parameter in core.runner.model.parameters())
    fp8 = [module for module in layers.modules() if isinstance(module, Fp8Linear)]
    weights += sum(layer.weight.numel() + 4 * layer.out_features for layer in fp8)
    assert weights <= memory.weights < weights + 1000
    assert memory.used_before == OTHERS
    assert memory.weights <= memory.used - memory.used_before < memory.weights + 4 * MIB
    logits = 512 * 4001 * 4
    assert logits < memory.step < 5 * logits


def test_weights_in_four_bits_and_their_scratch_are_in_the_plan(
    checkpoint: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch is there before the pool is sized, for the merged layers, and no step replaces it."""
    seen = []
    plan_on_gpu = loaded_model.plan_on_gpu
    monkeypatch.setattr(loaded_model, "plan_on_gpu", lambda *args: seen.append(args[-1]) or plan_on_gpu(*args))
    limits = dict(max_num_seqs=4, max_num_batched_tokens=80, max_model_len=128)
    core = gpu_core(checkpoint, quantization="int4", dtype="bfloat16", check_on_load=False, **limits)
    (memory,) = seen
    attention = core.runner.model.model.layers[0].self_attn
    ops, codes = attention.q_proj._ops, attention.q_proj.codes
    assert codes.untyped_storage().nbytes() == 64 * 16, "query, key and value of 32 inputs in one"
    scratch = [ops._plain.data_ptr(), ops._sums.data_ptr()]
    assert ops._plain.numel() == 96 * 32, "gate and up in one"
    bfloat16 = sum(parameter.nbytes for parameter in core.runner.model.parameters())
    layers = [module for module in core.runner.model.modules() if isinstance(module, Int4Linear)]
    packed = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    assert bfloat16 + packed <= memory.weights < bfloat16 + packed + 1000
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    run(core, [[5, 6, 7] * 24, [3]], [params] * 2)
    assert [ops._plain.data_ptr(), ops._sums.data_ptr()] == scratch


def test_the_check_runs_again_on_the_real_pool(checkpoint: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ReferenceAttention.attend

    def wrong_in_a_large_pool(self: Any, query: Any, cache: Any, *args: Any) -> Any:
        return attend(self, query, cache, *args) * (1.05 if len(cache.key) > 100 else 1.0)

    monkeypatch.setattr(ReferenceAttention, "attend", wrong_in_a_large_pool)
    with pytest.raises(LoadError, match="'llama' is not supported: the logits of a test batch differ"):
        gpu_core(checkpoint)


def test_a_pool_of_one_block(checkpoint: str, card: Card) -> None:
    core = gpu_core(checkpoint, num_gpu_blocks_override=1, max_model_len=16, block_size=16)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    deltas = run(core, [[1, 2, 3]], [params])
    assert [tokens(deltas[0, 0])] == greedy_reference(checkpoint, [[1, 2, 3]], [6])


def test_too_little_memory_is_refused_by_name(checkpoint: str, card: Card) -> None:
    card.allocator.others = 56 * MIB
    with pytest.raises(LoadError, match=r"gpu_memory_utilization=0.9 of 100.00 MiB, less .* in use"):
        gpu_core(checkpoint)
    card.allocator.others = 80 * MIB
    with pytest.raises(LoadError, match="a step of max_num_batched_tokens=512 and max_num_seqs=16 does not fit"):
        gpu_core(checkpoint)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"),
    [(256, 2048, 4096, 16, 2), (4, 2048, 100, 16, 2), (64, 16, 100, 4, 6), (1, 1, 2, 1, 24), (3, 500, 64, 5, 1)],
)
def test_the_largest_step_exhausts_its_limits(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, num_blocks: int
) -> None:
    limits = max_num_seqs, max_num_batched_tokens, max_model_len
    out = largest_step(*limits, block_size, num_blocks, vocab_size=50)
    assert len(out.slots) == min(max_num_seqs, max_num_batched_tokens)
    assert out.num_tokens == min(max_num_batched_tokens, max_num_seqs * (max_model_len - 1))
    assert all(count >= 1 for count in out.num_scheduled_tokens)
    state = BatchState(max_num_seqs, max_model_len, block_size, CPU)
    state.apply(out)
    state.fill_rows(out)
    inputs = state.step_inputs(out)
    assert inputs.metadata.max_seq_len == max_model_len - 1
    assert int(inputs.metadata.slot_mapping.max()) < num_blocks * block_size
    assert int(inputs.metadata.block_table.max()) < num_blocks
    assert len(inputs.logits_indices) == len(out.slots)
    assert int(inputs.positions.min()) >= 0
