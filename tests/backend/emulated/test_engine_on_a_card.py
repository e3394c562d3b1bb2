"""Engines on an emulated card give the tokens of the CPU, and no launch waits for the card."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from card_rig import card_core, functions_as_kernels, never_waiting, runner_of, without_waits
from checkpoints import make_checkpoint
from emulated_card import Card, emulated_card
from every_kind import every_kind, prompt_of, work_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from integer_checkpoints import write
from offline import make_core, run, tokens

from inflight.engine.core import EngineCore
from inflight.engine.deltas import RequestFailed
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import launch
from inflight.loading.load_errors import LoadError
from inflight.runner import device_runner
from inflight.runner.device_runner import DeviceRunner

MIB = 2**20
LIMITS: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=64)
SQUEEZED: dict[str, Any] = dict(num_gpu_blocks_override=24, block_size=4)
SWAPPED: dict[str, Any] = dict(SQUEEZED, swap_space="1MiB", preemption_mode="swap")
DRAFTING: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("card"))


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_as_kernels(monkeypatch)


@pytest.fixture
def restless_card() -> Iterator[Card]:
    """It also works at random moments."""
    with emulated_card(rng=random.Random(3)) as made:
        yield made


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: str) -> EngineCore:
    return make_core(checkpoint, **LIMITS, seed=1)


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    return [prompt_of(index, 1 + (7 * index) % 23) for index in range(count)], [every_kind(i) for i in range(count)]


@pytest.fixture(scope="module")
def in_integers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, EngineCore]:
    """A checkpoint, and its engine on the CPU with inputs of layers in float32, as on a card."""
    path = make_checkpoint("llama", tmp_path_factory.mktemp("integers"))
    write(path, "gptq act-order")
    return path, make_core(path, **LIMITS, seed=1, native_forward=False)


def test_a_checkpoint_in_integers(card: Card, in_integers: tuple[str, EngineCore]) -> None:
    (path, on_the_cpu), (prompts, params) = in_integers, requests(4)
    expected = work_of(on_the_cpu, prompts, params, stagger=2)
    assert work_of(card_core(path, seed=1), prompts, params, stagger=2) == expected


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(), id="plain", marks=pytest.mark.nightly),
        pytest.param(dict(SQUEEZED), id="preempted"),
        pytest.param(dict(SWAPPED), id="swapped", marks=pytest.mark.nightly),  # `test_any_arrivals` swaps
        # runner/test_graph_steps.py has drafts that are preempted, runner/test_device_runner.py eager steps.
        pytest.param(dict(SQUEEZED, **DRAFTING), id="preempted, with drafts", marks=pytest.mark.nightly),
        pytest.param(dict(max_num_batched_tokens=7, block_size=1), id="few tokens a step", marks=pytest.mark.nightly),
        pytest.param(
            dict(max_num_batched_tokens=7, block_size=1, enforce_eager=True),
            id="few tokens a step, eager",
            marks=pytest.mark.nightly,
        ),
        pytest.param(dict(max_num_seqs=3, enable_prefix_caching=False), id="few slots", marks=pytest.mark.nightly),
    ],
)
def test_ragged_arrivals_of_every_kind(
    card: Card, checkpoint: str, on_the_cpu: EngineCore, options: dict[str, Any]
) -> None:
    """Rules, log probabilities, several sequences a request."""
    prompts, params = requests(16)
    expected = work_of(on_the_cpu, prompts, params, stagger=2)
    core = without_waits(card_core(checkpoint, seed=1, **options))
    assert work_of(core, prompts, params, stagger=2) == expected
    assert (core.scheduler.num_preempted_total > 0) == (options.get("block_size") == 4)
    assert (card.num_replays >= 10) != ("enforce_eager" in options)
    assert not card.launched_at_once


def test_without_kernels_the_definitions_run_in_torch(
    card: Card, checkpoint: str, on_the_cpu: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose machine has no C compiler: attention, operations, inputs of steps and samples."""
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_has_compiler", lambda: False)
    launch.can_launch.cache_clear()
    for name in ("make_inputs", "put_tokens"):
        monkeypatch.setattr(device_runner, name, never_waiting(getattr(device_runner, name)))
    prompts, params = requests(5)
    expected = work_of(on_the_cpu, prompts, params, stagger=2)
    core = card_core(checkpoint, seed=1)
    assert core.info.attention_backend == "reference"
    assert work_of(core, prompts, params, stagger=2) == expected


_arrivals = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 99), st.integers(4, 14)), min_size=1, max_size=8)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SWAPPED, id="swapped"),
        pytest.param(dict(max_cudagraph_capture_size=40, **DRAFTING), id="graphs of prompts and drafts"),
    ],
)
@pytest.mark.usefixtures("restless_card")
def test_any_arrivals(checkpoint: str, on_the_cpu: EngineCore, options: dict[str, Any]) -> None:
    core = without_waits(card_core(checkpoint, seed=1, **options))

    @settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(arrivals=_arrivals, stagger=st.integers(0, 3))
    def arrive(arrivals: list[tuple[int, int, int]], stagger: int) -> None:
        prompts = [prompt_of(seed, length) for length, seed, _ in arrivals]
        params = [every_kind(seed, max_tokens=count) for _, seed, count in arrivals]
        assert work_of(core, prompts, params, stagger) == work_of(on_the_cpu, prompts, params, stagger)

    arrive()


@pytest.mark.usefixtures("restless_card")
def test_requests_that_are_aborted_leave_nothing_in_those_that_take_their_slots(
    checkpoint: str, on_the_cpu: EngineCore
) -> None:
    """Aborts come while steps of the request run; what it had produced by then was right."""
    prompts, params = requests(14)
    expected = {key: tokens(deltas) for key, deltas in run(on_the_cpu, prompts, params).items()}
    core = card_core(checkpoint, seed=1, **SWAPPED, **DRAFTING)
    for seed in range(2):
        got, aborted = run_with_aborts(core, prompts, params, random.Random(seed))
        assert got.keys() | aborted == expected.keys()
        assert aborted
        for key, token_ids in got.items():
            assert token_ids == expected[key][: len(token_ids)]
            assert key in aborted or token_ids == expected[key]


def run_with_aborts(
    core: EngineCore, prompts: list[list[int]], params: list[SamplingParams], rng: random.Random
) -> tuple[dict[tuple[int, int], list[int]], set[tuple[int, int]]]:
    """The tokens of each sequence, and the sequences that were aborted before they had ended."""
    got: dict[tuple[int, int], list[int]] = {}
    running = {number: {(number, index) for index in range(each.n)} for number, each in enumerate(params)}
    aborted: set[tuple[int, int]] = set()
    for number, (prompt, sampling) in enumerate(zip(prompts, params)):
        assert core.add_request(AddRequest(number, prompt, sampling)) is None
    while core.has_work:
        for delta in core.step().deltas:
            key = delta.request_id, delta.index
            got.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                running[delta.request_id].remove(key)
        check_core(core)
        if rng.random() < 0.15:
            number = rng.choice(list(running))
            core.abort(number)
            aborted |= running.pop(number)
    return got, aborted


def finish(core: EngineCore) -> tuple[dict[int, list[int]], list[RequestFailed]]:
    found: dict[int, list[int]] = {}
    failures: list[RequestFailed] = []
    while core.has_work:
        output = core.step()
        for delta in output.deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        failures += output.failed
    return found, failures


def test_a_step_without_memory_fails_alone(card: Card, checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    core = card_core(checkpoint, enforce_eager=True)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = tokens(run(core, [prompt_of(1, 9)], [params])[0, 0])
    memory = card.allocator
    torch.cuda.empty_cache()
    memory.others = memory.total - memory.reserved  # another process takes all that is left
    filler = torch.empty(memory.reserved - memory.allocated, dtype=torch.uint8, device="cuda")
    assert core.add_request(AddRequest(1, prompt_of(1, 9), params)) is None
    found, failures = finish(core)
    assert [failure.request_id for failure in failures] == [1]
    assert "ran out of GPU memory" in failures[0].message
    assert not found
    del filler
    memory.others = 0
    assert tokens(run(core, [prompt_of(1, 9)], [params])[0, 0]) == expected


def test_the_pool_takes_what_a_small_card_leaves(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    with emulated_card(total=512 * MIB) as card:
        card.allocator.others = 64 * MIB
        core = card_core(checkpoint, kv_cache_memory=None, gpu_memory_utilization=0.9)
        torch.cuda.reset_peak_memory_stats()
        prompts, params = requests(8)
        run(core, prompts, params)
        assert 64 * MIB + torch.cuda.max_memory_reserved() <= 0.9 * 512 * MIB
        assert not [text for text in caplog.messages if "ran out of" in text]


def test_a_card_that_is_too_small_is_refused_by_name(checkpoint: str) -> None:
    with emulated_card(total=128 * MIB) as card:
        card.allocator.others = 120 * MIB
        with pytest.raises(LoadError, match="gpu_memory_utilization"):
            card_core(checkpoint, kv_cache_memory=None)


def test_a_model_that_reads_its_tensors_runs_without_graphs(
    card: Card,
    checkpoint: str,
    on_the_cpu: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    prompts, params = requests(4)
    expected = work_of(on_the_cpu, prompts, params, stagger=1)
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) if bool(x.isfinite().any()) else x)
    core = card_core(checkpoint, seed=1, native_forward=False)
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("a step cannot be captured" in text for text in texts)
    assert not runner_of(core).graphs
    assert work_of(core, prompts, params, stagger=1) == expected


def test_memory_comes_back_after_a_failed_capture(card: Card, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) if bool(x.isfinite().any()) else x)
    card_core(checkpoint, native_forward=False)
    big = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del big
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 64 * MIB


def test_a_buffer_that_is_reused_too_early_changes_tokens(
    card: Card, checkpoint: str, on_the_cpu: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests find a ring whose places are given away before the card has read them."""
    core = card_core(checkpoint, seed=1, enforce_eager=True)
    monkeypatch.setattr(DeviceRunner, "_next_buffers", lambda self: self._ring[0])
    prompts, params = requests(6)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert work_of(core, prompts, params, stagger=2) == work_of(on_the_cpu, prompts, params, stagger=2)
