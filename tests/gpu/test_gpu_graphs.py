"""Decode steps as CUDA graphs on a GPU; skipped without one."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from card_sizes import sized
from checkpoints import VOCAB, greedy_reference, make_checkpoint
from offline import make_core, run, tokens

from inflight.engine.core import EngineCore
from inflight.engine.drafting.adaptive_drafter import AdaptiveDrafter
from inflight.engine.sampling_params import SamplingParams
from inflight.runner.capture import CudaCapturer
from inflight.runner.device_runner import DeviceRunner
from inflight.runner.graphs import decode_sizes
from inflight.runner.step_inputs import StepSize

KINDS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(top_p=0.8, logprobs=3),
    dict(top_k=5, min_p=0.1),
    dict(temperature=0.6, top_k=20, repetition_penalty=1.1, frequency_penalty=0.2),
    dict(temperature=0.0, logit_bias={3: 4.0}, bad_words_ids=[[5]], min_tokens=4, logprobs=1),
    dict(temperature=0.0, prompt_logprobs=1),
]
ROWS = sized(24, 5)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return make_checkpoint("llama", tmp_path, head_dim=64)


def core_of(path: str, **options: Any) -> EngineCore:
    values = dict(device="cuda", block_size=16, num_gpu_blocks_override=200, max_num_seqs=ROWS, async_scheduling=True)
    values |= sized(dict(), dict(max_num_batched_tokens=64))
    return make_core(path, **{**values, "kv_cache_memory": None, **options})


def runner_of(core: EngineCore) -> DeviceRunner:
    assert isinstance(core.runner, DeviceRunner)
    return core.runner


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (3 + 5 * index,), generator=generator).tolist() for index in range(count)]


def output(core: EngineCore, params: list[SamplingParams]) -> dict[tuple[int, int], list[int]]:
    return {key: tokens(deltas) for key, deltas in run(core, prompts_of(len(params)), params, stagger=1).items()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_greedy_output_equals_generate(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Of a model with experts, too, if its steps can be captured."""
    if model_type != "llama":
        request.getfixturevalue("any_kernels")  # test_gpu_engine.py has these models' kernels
    path = make_checkpoint(model_type, tmp_path)
    core = core_of(path)
    if model_type != "gpt_oss":
        rows, expected = sized(((1, 3, 5, 9, 17, 24), [1, 4, 8, 16, 24, 24]), ((1, 2, 3, 5), [1, 2, 4, 5]))
        buckets = [runner_of(core).graphs.bucket(StepSize(count, count, count, 1)) for count in rows]
        assert [bucket and bucket.rows for bucket in buckets] == expected
        assert runner_of(core).info.graph_bytes > 0
        assert not [text for text in warnings_of(caplog) if "CUDA graphs" in text]
    count, length = sized((20, 20), (6, 4))
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)] * count
    found = output(core, params)
    assert [found[index, 0] for index in range(count)] == greedy_reference(path, prompts_of(count), [length] * count)


@pytest.mark.usefixtures("any_kernels")
@pytest.mark.parametrize("mixed", sized([0, 256], [0, 32]))
def test_every_kind_of_request_is_as_without_graphs(checkpoint: str, mixed: int) -> None:
    params = [
        SamplingParams(max_tokens=5 + index % sized(24, 3), ignore_eos=True, seed=index, **KINDS[index % len(KINDS)])
        for index in range(sized(24, 6))
    ]
    eager = core_of(checkpoint, enforce_eager=True)
    assert not runner_of(eager).graphs
    assert output(core_of(checkpoint, max_cudagraph_capture_size=mixed), params) == output(eager, params)


@pytest.mark.usefixtures("any_kernels")  # tests/backend/kernels/test_gpu_graph_steps.py has those of a GPU
def test_steps_with_prompts_are_as_without_graphs(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, decodes beside them; every step is a replay."""
    count, rows = sized((48, 8), (32, 4))
    options = dict(max_num_batched_tokens=count, max_num_seqs=rows)
    params = [SamplingParams(temperature=0.0, max_tokens=sized(12, 5), ignore_eos=True)] * sized(12, 7)
    expected = output(core_of(checkpoint, enforce_eager=True, **options), params)
    core = core_of(checkpoint, max_cudagraph_capture_size=count, **options)
    size = sized(StepSize(3, 40, 2, 30, 30), StepSize(3, 24, 2, 20, 20))
    assert runner_of(core).graphs.bucket(size) == StepSize(rows, count, rows, count, 2**14, 2**12)
    monkeypatch.setattr(core.runner, "forward_step", lambda step: pytest.fail(f"{step.size} was launched eagerly"))
    assert output(core, params) == expected


@pytest.mark.usefixtures("any_kernels")
def test_steps_with_drafts_are_as_without_graphs_and_without_drafts(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of few tokens repeat themselves, so that there is something to copy; every guess is tried."""
    monkeypatch.setattr(AdaptiveDrafter, "_worth", lambda self, guess, num_unknown, *_: len(guess.tokens) - num_unknown)
    params = [
        SamplingParams(
            max_tokens=sized(40, 12) + index, ignore_eos=True, seed=index, allowed_token_ids=[3, 5, 9], **kind
        )
        for index, kind in enumerate(KINDS[:3])
    ]
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}}
    core = core_of(checkpoint, **drafting)
    size = StepSize(2, 9, 9, 7, 7)
    assert runner_of(core).graphs.bucket(size) == StepSize(min(16, ROWS), 16, 16, 7, 16)
    found = output(core, params)
    assert core.scheduler.policies.draft_counts.totals()[2] > 0, "no draft was accepted"
    assert found == output(core_of(checkpoint, enforce_eager=True, **drafting), params)
    assert found == output(core_of(checkpoint), params)


@pytest.mark.usefixtures("any_kernels")
def test_padding_touches_no_slot_of_the_pool(checkpoint: str) -> None:
    core = core_of(checkpoint)
    params = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)] * 5
    output(core, params)
    runner = runner_of(core)
    model: Any = runner.model
    caches = [layer.self_attn.inflight.cache for layer in model.model.layers]
    state = runner.device_state
    kept = [
        *(pool for cache in caches for pool in (cache.key, cache.value)),
        state.token_ids[:-1],
        state.block_table[:-1],
    ]
    before = [tensor.clone() for tensor in kept]
    for size in decode_sizes(ROWS):
        assert runner.graphs.replay(runner._padding(size).key) is not None
        torch.cuda.synchronize()  # the next padding may find the same pinned buffer
    same = [torch.equal(*(tensor.view(torch.uint8) for tensor in pair)) for pair in zip(kept, before)]
    assert all(same), same


@pytest.mark.usefixtures("any_kernels")
def test_a_model_that_looks_at_its_tensors_runs_eagerly(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the process can capture the next model."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    params = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)] * 3
    with monkeypatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) if bool(x.isfinite().any()) else x)
        core = core_of(checkpoint, native_forward=False)
        (warning,) = [text for text in warnings_of(caplog) if "CUDA graphs" in text]
        assert "a step cannot be captured" in warning
        expected = output(core, params)
    again = core_of(checkpoint)
    assert runner_of(again).graphs.bucket(StepSize(3, 3, 3, 1)) == StepSize(4, 4, 4, 1)
    assert output(again, params) == expected


def test_a_capture_that_fails_leaves_no_memory_and_no_capture_under_way(checkpoint: str) -> None:
    """In each part of it; then the allocator returns memory, and the next capture works."""
    capturer = CudaCapturer(torch.device("cuda"))
    value = torch.zeros(2**20, device="cuda")

    def reads() -> tuple[torch.Tensor, ...]:
        grown = value.repeat(64)  # 256 MiB of the pool
        return (grown + grown[0].item(),)

    def raises() -> tuple[torch.Tensor, ...]:
        value.repeat(64)
        raise torch.OutOfMemoryError("none left")

    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for launch in (reads, raises):
        with pytest.raises(RuntimeError):
            capturer.capture(launch, None)
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved
    with pytest.raises(RuntimeError, match="synchronizing"):
        capturer.warm_up(reads)
    assert torch.cuda.get_sync_debug_mode() == 0
    graph = capturer.capture(lambda: (value + 1,), None)
    value.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert graph.outputs[0][0].item() == 4.0


@pytest.mark.usefixtures("any_kernels")
def test_an_output_of_a_graph_is_what_the_replay_writes(checkpoint: str) -> None:
    """Its tensor does not own the memory, which graphs share."""
    core = core_of(checkpoint)
    runner = runner_of(core)
    output(core, [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)] * 3)
    key = runner._padding(StepSize(4, 4, 4, 1)).key
    logits, token_ids = runner.graphs._graphs[key].outputs
    with torch.inference_mode():
        logits.fill_(-7.0)
    assert runner.graphs.replay(key) is not None
    assert logits.shape == (4, VOCAB)
    assert not (logits == -7.0).any()
    assert token_ids.shape == (4,)
