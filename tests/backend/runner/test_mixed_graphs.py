"""Steps with prompts as graphs, on an emulated card: chunks, decodes and drafts side by side give the answers of eager
steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card_rig import card, functions_as_kernels, num_replays
from checkpoints import make_checkpoint
from emulated_card import Card
from every_kind import every_kind, prompt_of, work_of
from hypothesis import given
from hypothesis import strategies as st
from offline import run, tokens

from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput
from inflight.runner import graphs
from inflight.runner.graphs import DecodeGraphs, Padding, decode_sizes, draft_sizes, mixed_sizes
from inflight.runner.step_inputs import StepSize

from .test_drafts import Replayer
from .test_graph_steps import (
    assert_same_bytes,
    contents,
    cpu_core,
    drafting,
    graph_core,
    pair_of,
)
from .test_graphs import meter
from .test_parity import prepared

__all__ = ["card"]

SQUEEZED: dict[str, Any] = dict(max_num_seqs=8, num_gpu_blocks_override=24, block_size=4)
CAPTURED = dict(max_cudagraph_capture_size=40, max_model_len=64, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str) -> EngineCore:
    return cpu_core(checkpoint)


@pytest.fixture
def kernels(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


def mixed_replays(core: EngineCore) -> dict[tuple[int, int], int]:
    """(tokens, rows) of a bucket with prompts -> how often its graph was replayed."""
    return {(size.tokens, size.rows): count for size, count in num_replays(core).items() if size.prompt_blocks}


@given(
    max_rows=st.integers(1, 300),
    max_tokens=st.integers(1, 2048),
    has_drafts=st.booleans(),
    data=st.data(),
)
def test_the_bucket_of_a_step_with_prompts_has_room_for_all_of_it(
    max_rows: int, max_tokens: int, has_drafts: bool, data: st.DataObject
) -> None:
    sizes = mixed_sizes(max_rows, max_tokens, has_drafts)
    assert len(set(sizes)) == len(sizes) <= 2 * (4 + max_tokens // 128)
    capturer: Any = type("", (), dict(warm_up=lambda self, launch: None, capture=lambda self, launch, beside: object()))
    made = DecodeGraphs(sizes, lambda size: Padding(size, tuple), capturer())
    made.capture(meter())
    rows = data.draw(st.integers(1, min(max_rows, max_tokens)))
    count = data.draw(st.integers(rows, max_tokens))
    size = StepSize(rows, count, data.draw(st.integers(0, rows)), count - rows + 1, data.draw(st.integers(0, 20_000)))
    bucket = made.bucket(size)
    if size.new_tokens > 2**14:
        assert bucket is None, "so long a prompt is uploaded by itself"
    else:
        assert bucket is not None and bucket.holds(size)
        assert bucket.rows <= max_rows and bucket.tokens <= max_tokens, "more than the runner has room for"
        assert bucket.tokens - count < max(16, count, 128)
        assert bucket.rows <= 16 or rows > 16
    assert made.bucket(StepSize(rows, max_tokens + 1, rows, 2)) is None


def test_the_page_says_how_many_graphs_there_are() -> None:
    assert [len(mixed_sizes(256, most, False)) for most in (512, 1024, 2048)] == [13, 21, 37]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(max_num_seqs=20), id="many rows"),
        pytest.param(dict(SQUEEZED), id="preempted", marks=pytest.mark.nightly),
        # emulated/test_engine_on_a_card.py swaps.
        pytest.param(
            dict(SQUEEZED, swap_space="1MiB", preemption_mode="swap"), id="swapped", marks=pytest.mark.nightly
        ),
        pytest.param(
            dict(max_num_seqs=8, max_num_batched_tokens=12, block_size=1),
            id="chunks, small blocks",
        ),
    ],
)
def test_everything_is_as_without_graphs(checkpoint: str, on_the_cpu: EngineCore, options: dict[str, Any]) -> None:
    """Ragged arrivals of all kinds of requests; prompts whose log probabilities are asked for run eagerly."""
    captured = graph_core(checkpoint, **CAPTURED, **options)
    count = 10 if options.get("num_gpu_blocks_override") is None else 16
    prompts = [prompt_of(index, 1 + (7 * index) % 23) for index in range(count)]
    params = [every_kind(index) for index in range(count)]
    for stagger in (2, 0):
        assert work_of(captured, prompts, params, stagger) == work_of(on_the_cpu, prompts, params, stagger)
    replays = mixed_replays(captured)
    assert sum(replays.values()) >= 8
    assert sum(map(bool, replays.values())) >= (1 if "max_num_batched_tokens" in options else 2), replays
    if options.get("num_gpu_blocks_override") == 24:
        assert captured.scheduler.num_preempted_total > 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model_type", ["gemma2", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_architectures_give_the_tokens_of_generate(model_type: str) -> None:
    path, prompts, counts, expected = prepared(model_type)
    options = dict(block_size=5, max_num_batched_tokens=40, max_num_seqs=4, max_model_len=160)
    core = graph_core(path, max_cudagraph_capture_size=40, **options)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[index, 0]) for index in range(len(prompts))] == expected
    assert sum(mixed_replays(core).values()) >= len(prompts)


@pytest.mark.usefixtures("kernels")
def test_every_step_of_an_engine_is_a_replay(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, alone and beside decodes, and requests whose prefix is cached."""
    core = graph_core(checkpoint, max_num_seqs=4, max_num_batched_tokens=16, block_size=4, **CAPTURED)
    monkeypatch.setattr(core.runner, "forward_step", lambda step: pytest.fail(f"{step.size} was launched eagerly"))
    prompts = [prompt_of(0, 40), prompt_of(1, 3), prompt_of(0, 40)[:33]]
    run(core, prompts, [GREEDY] * 3, stagger=5)
    assert core.stats(SchedulerOutput(), 0.0).prefix_hits_total >= 32
    assert sum(mixed_replays(core).values()) >= 5


@pytest.mark.nightly  # emulated/test_engine_on_a_card.py has graphs of prompts and drafts
@pytest.mark.usefixtures("kernels")
def test_drafts_beside_prompts_are_replayed(checkpoint: str, on_the_cpu: EngineCore) -> None:
    options = dict(max_num_seqs=4, num_gpu_blocks_override=64)
    core = graph_core(checkpoint, **CAPTURED, **options, **drafting(5))
    prompts = [prompt_of(index, 4 + 3 * index) for index in range(8)]
    params = [every_kind(index, max_tokens=20) for index in range(8)]
    expected = {key: tokens(deltas) for key, deltas in run(on_the_cpu, prompts, params).items()}
    core.scheduler.policies.drafter = Replayer(expected, 3)
    with_drafts = []
    stage = core.runner._stage
    core.runner._stage = lambda out, *args: with_drafts.append(bool(out.draft_token_ids)) or stage(out, *args)
    assert work_of(core, prompts, params, stagger=2) == work_of(on_the_cpu, prompts, params, stagger=2)
    assert sum(mixed_replays(core).values()) > 0
    assert any(with_drafts)


@pytest.mark.usefixtures("kernels")
def test_a_prompt_without_room_in_the_upload_runs_eagerly(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its tokens, or by the blocks of its cached prefix."""
    options: dict[str, Any] = dict(max_num_seqs=4, block_size=1, num_gpu_blocks_override=200, **CAPTURED)
    eager = graph_core(checkpoint, enforce_eager=True, **options)
    for name in ("_MAX_NEW_TOKENS", "_MAX_NEW_BLOCKS"):
        with monkeypatch.context() as patch:
            patch.setattr(graphs, name, 6)
            core = graph_core(checkpoint, **options)
        for each, length in ((core, 30), (core, 5)):
            before = sum(mixed_replays(core).values())
            prompt = [prompt_of(length, length)]
            assert work_of(each, prompt, [GREEDY], 0) == work_of(eager, prompt, [GREEDY], 0)
            assert (sum(mixed_replays(core).values()) > before) == (length == 5), name


@pytest.mark.usefixtures("kernels")
def test_padding_touches_no_slot_of_the_pool_and_no_row_of_the_state(checkpoint: str) -> None:
    """Neither a replay of nothing but padding, for decodes, drafts or prompts, nor the padding beside other rows."""
    options = dict(max_num_seqs=8, block_size=4, num_gpu_blocks_override=64, **drafting(5), **CAPTURED)
    core, eager = pair_of(checkpoint, **options)
    prompts = [prompt_of(index, 5 + index) for index in range(5)]
    for each in (core, eager):
        for layer in each.runner.model.model.layers:
            for pool in (layer.self_attn.inflight.cache.key, layer.self_attn.inflight.cache.value):
                pool.fill_(0.0)
        run(each, prompts, [GREEDY] * 5, stagger=1)
    assert sum(mixed_replays(core).values()) >= 3
    before = contents(core)
    for name, tensor in contents(eager).items():
        torch.testing.assert_close(before[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    sizes = decode_sizes(8) + draft_sizes(8, 64, 5) + mixed_sizes(8, 40, True)
    assert len(core.runner.graphs) == len(sizes)
    for size in sizes:
        assert core.runner.graphs.replay(core.runner._padding(size).key) is not None
        assert_same_bytes(before, contents(core))
    core.runner.graphs._graphs.clear()
    captured_by_nothing: Any = SimpleNamespace(used=lambda: 0)
    core.runner.graphs.capture(captured_by_nothing)
    assert_same_bytes(before, contents(core))
