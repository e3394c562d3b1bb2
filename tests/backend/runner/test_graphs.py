"""Buckets, capture, measurement and fallback of decode graphs, on a step of a few operations on an emulated card."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card_rig import card
from emulated_card import launch_function
from emulated_card.graphs import GRAPH_BYTES
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inflight.attention.reference import ReferenceAttention
from inflight.config import EngineConfig
from inflight.device.memory import DeviceMeter
from inflight.runner.capture import CudaCapturer
from inflight.runner.graphs import DecodeGraphs, Padding, bucket_sizes, decode_graphs, decode_sizes, draft_sizes
from inflight.runner.step_inputs import StepSize

__all__ = ["card"]

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
on_card = pytest.mark.usefixtures("card")


class ToyRunner:
    """A row's state becomes its double plus one; a padded row has length 0."""

    def __init__(self, max_rows: int) -> None:
        self.slots = torch.full((max_rows,), max_rows, device=CUDA)
        self.state = torch.arange(max_rows + 1.0, device=CUDA)
        self.weights = torch.tensor(2.0, device=CUDA)
        self.fails: Callable[[int], None] = lambda bucket: None

    def padding(self, size: StepSize) -> Padding:
        self.slots.fill_(len(self.state) - 1)
        return Padding(size, lambda: self.step(size.rows))

    def step(self, rows: int) -> tuple[Tensor, ...]:
        self.fails(rows)
        slots = self.slots[:rows]
        out = self.state[slots] * self.weights + 1
        self.state.index_copy_(0, slots, out)
        return (out,)


def graphs_of(max_rows: int, runner: ToyRunner) -> DecodeGraphs:
    """Not captured yet."""
    return DecodeGraphs(decode_sizes(max_rows), runner.padding, CudaCapturer(CUDA))


def captured(max_rows: int, runner: ToyRunner | None = None) -> tuple[ToyRunner, DecodeGraphs]:
    runner = runner or ToyRunner(max_rows)
    made = graphs_of(max_rows, runner)
    made.capture(meter())
    return runner, made


def replayed(made: DecodeGraphs, bucket: StepSize | None) -> Tensor:
    outputs = made.replay(bucket)
    assert outputs is not None
    return outputs[0]


def decode(rows: int) -> StepSize:
    return StepSize(rows, rows, rows, 1)


def meter() -> Any:
    return SimpleNamespace(used=lambda: 0)


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]),
        (33, [1, 2, 4, 8, 16, 24, 32, 33]),
        (256, [1, 2, 4, *range(8, 257, 8)]), (257, [1, 2, 4, *range(8, 257, 8), 257]),
        (4096, [1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, 4097, 128)]),
    ],
)  # fmt: skip
def test_bucket_sizes(max_rows: int, sizes: list[int]) -> None:
    assert bucket_sizes(max_rows) == sizes


@given(max_rows=st.integers(1, 4096), data=st.data())
def test_the_bucket_of_a_step_is_the_smallest_that_has_room(max_rows: int, data: st.DataObject) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    rows = data.draw(st.integers(1, max_rows))
    capturer: Any = SimpleNamespace(warm_up=lambda launch: None, capture=lambda launch, beside: object())
    made = DecodeGraphs(decode_sizes(max_rows), lambda size: Padding(size, tuple), capturer)
    assert made.bucket(decode(rows)) is None, "nothing is captured yet"
    made.capture(meter())
    bucket = made.bucket(decode(rows))
    assert bucket == decode(min(size for size in sizes if size >= rows))
    assert bucket.rows <= 2 * rows
    assert bucket.rows - rows < max(8, rows / 4)
    assert made.bucket(decode(max_rows + 1)) is None
    assert made.bucket(StepSize(rows, rows, rows, 1, new_tokens=1)) is None, "a row that enters, or a draft"


@given(max_rows=st.integers(1, 40), max_tokens=st.integers(1, 300), max_drafts=st.integers(1, 30), data=st.data())
def test_a_step_with_drafts_has_a_bucket_with_room_for_all_of_it(
    max_rows: int, max_tokens: int, max_drafts: int, data: st.DataObject
) -> None:
    sizes = draft_sizes(max_rows, max_tokens, max_drafts)
    capturer: Any = SimpleNamespace(warm_up=lambda launch: None, capture=lambda launch, beside: object())
    made = DecodeGraphs(decode_sizes(max_rows) + sizes, lambda size: Padding(size, tuple), capturer)
    made.capture(meter())
    counts = data.draw(st.lists(st.integers(1, max_drafts + 1), min_size=1, max_size=max_rows))
    tokens, drafts = sum(counts), sum(counts) - len(counts)
    bucket = made.bucket(StepSize(len(counts), tokens, tokens, max(counts), drafts))
    if not drafts:
        assert bucket is not None and bucket.query_len == 1
    elif tokens > min(max_tokens, 128):
        assert bucket is None
    else:
        assert bucket is not None
        assert bucket.rows >= len(counts) and bucket.tokens == bucket.logits >= tokens
        assert bucket.query_len >= max(counts) and bucket.new_tokens >= drafts
        assert bucket.rows <= max_rows and bucket.tokens <= max_tokens, "more than the runner has room for"
        assert sum(size.tokens < bucket.tokens for size in sizes) == sum(size.tokens < tokens for size in sizes)
        assert made.bucket(StepSize(len(counts), tokens, len(counts), max(counts))) is None, "a prompt's tokens"
        assert made.bucket(StepSize(1, max_drafts + 2, max_drafts + 2, max_drafts + 2)) is None, "a longer draft"


@on_card
def test_a_replay_is_the_step_on_what_the_tensors_contain_now() -> None:
    runner, made = captured(20)
    assert [len(graph.outputs[0]) for graph in made._graphs.values()] == [20, 16, 8, 4, 2, 1], "largest first"
    before = runner.state.clone()
    runner.slots[:3] = torch.tensor([7, 2, 11], device=CUDA)
    bucket = made.bucket(decode(3))
    assert bucket == decode(4)
    out = replayed(made, bucket)
    assert made.replay("another key") is None
    assert out[:3].tolist() == [15.0, 5.0, 23.0]
    expected = before.clone()
    expected[torch.tensor([7, 2, 11], device=CUDA)] = torch.tensor([15.0, 5.0, 23.0], device=CUDA)
    assert torch.equal(runner.state[:-1], expected[:-1]), "padding changes nothing but the void row"


@on_card
def test_the_outputs_of_a_graph_are_void_after_another_replay() -> None:
    runner, made = captured(4)
    runner.slots[0] = 1
    out = replayed(made, decode(1))
    assert out.tolist() == [3.0]
    made.replay(decode(2))
    assert out.isnan().all()


@on_card
@pytest.mark.parametrize("name", ["slots", "state", "weights"])
def test_a_replay_fails_if_a_tensor_has_moved(name: str) -> None:
    runner, made = captured(4)
    made.replay(decode(2))
    setattr(runner, name, getattr(runner, name).clone())
    with pytest.raises(RuntimeError, match="freed after its capture"):
        made.replay(decode(2))


@on_card
def test_a_tensor_that_moved_but_is_alive_has_no_effect() -> None:
    runner, made = captured(4)
    old, runner.slots = runner.slots, torch.tensor([1, 2, 4, 4], device=CUDA)
    out = replayed(made, decode(2))
    assert out.tolist() != [3.0, 5.0]
    assert (old == 4).all()


@on_card
def test_a_kernel_reads_its_tensors_at_each_replay() -> None:
    runner = ToyRunner(2)

    def add(out: Tensor, state: Tensor, slots: Tensor) -> None:
        out.copy_(torch.tensor([state[slot].item() + 0.5 for slot in slots.tolist()]))

    def step(rows: int) -> tuple[Tensor]:
        out = torch.empty(rows, device=CUDA)
        launch_function(add, out, runner.state, runner.slots[:rows])
        return (out,)

    runner.step = step  # type: ignore[method-assign]
    _, made = captured(2, runner)
    runner.slots[:] = torch.tensor([1, 0], device=CUDA)
    assert replayed(made, decode(2)).tolist() == [1.5, 0.5]


def reads_a_tensor(bucket: int) -> None:
    if torch.zeros(1, device=CUDA).item():
        raise AssertionError


def lists_a_tensor(bucket: int) -> None:
    torch.zeros(1, device=CUDA).tolist()


def depends_on_contents(bucket: int) -> None:
    torch.zeros(3, device=CUDA)[torch.zeros(3, dtype=torch.bool, device=CUDA)]


def only_the_smaller_fail(bucket: int) -> None:
    if bucket < 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.\nMore lines.")


@on_card
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (reads_a_tensor, "RuntimeError: called a synchronizing CUDA operation: Tensor.item"),
        (lists_a_tensor, "RuntimeError: called a synchronizing CUDA operation: a blocking copy to the host"),
        (depends_on_contents, "RuntimeError: called a synchronizing CUDA operation: aten.nonzero.default"),
        (only_the_smaller_fail, r"OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB.\); "),
    ],
)
@pytest.mark.parametrize("measured", [False, True])
def test_a_step_that_cannot_be_captured_runs_eagerly(
    fails: Callable[[int], None], reason: str, measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, also where measuring fails already, and no graph remains."""
    runner = ToyRunner(8)
    runner.fails = fails
    made = graphs_of(8, runner)
    if measured:
        made.measure(meter())
    assert made.capture(meter()) == 0
    assert made.bucket(decode(4)) is None
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith(
        "decode steps run without CUDA graphs, and slower: a step cannot be captured ("
    )
    assert re.search(reason, record.getMessage())
    assert made.measure(meter()) == 0


@on_card
def test_a_step_that_reads_a_tensor_never_starts_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every version of torch recovers from a capture that fails."""
    runner, tried = ToyRunner(8), []
    runner.fails = lambda rows: tried.append(rows) or reads_a_tensor(rows)  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *_, **__: pytest.fail("a capture was started"))
    made = graphs_of(8, runner)
    assert made.measure(meter()) == made.capture(meter()) == 0
    assert tried == [8, 8], "it may wait the first time, not the second"


@on_card
def test_the_collector_is_off_while_capturing_and_as_before_afterwards() -> None:
    seen = []
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            runner = ToyRunner(2)
            runner.fails = lambda bucket: seen.append(gc.isenabled())
            capturer = CudaCapturer(CUDA)
            capturer.warm_up = lambda launch: None  # type: ignore[method-assign]
            DecodeGraphs(decode_sizes(2), runner.padding, capturer).capture(meter())
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert seen == [False] * 4


@on_card
def test_two_buckets_tell_what_all_will_take(caplog: pytest.LogCaptureFixture) -> None:
    """The pool is as large as the largest graph needs; each further graph adds what the driver keeps of it."""
    runner = ToyRunner(32)
    runner.fails = lambda rows: torch.empty(rows, MIB // 8, device=CUDA).zero_()
    made, meter = graphs_of(32, runner), DeviceMeter(CUDA)
    before = meter.used()
    with caplog.at_level(logging.INFO):
        expected = made.measure(meter)
        assert expected == 16 * MIB + 7 * GRAPH_BYTES
        assert meter.used() == before, "measuring leaves nothing"
        assert made.bucket(decode(1)) is None
        assert made.capture(meter) == expected == meter.used() - before
    assert re.search(r"7 CUDA graphs of up to 32 tokens: \d+\.\d s, 16\.44 MiB", caplog.text)


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_dict({"model": "none", **options})


class CapturableAttention(ReferenceAttention):
    capturable = True


@on_card
def test_when_graphs_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    def sizes(options: dict[str, Any], backend: Any = CapturableAttention, capturable: bool = True) -> list[int]:
        made = decode_graphs(config(**options), backend(), device, ToyRunner(256).padding, capturable)
        made.capture(meter())
        return [rows for rows in range(1, 257) if made.bucket(decode(rows)) == decode(rows)]

    device = CPU
    assert sizes({"max_num_seqs": 8}) == [], "a CPU captures nothing"
    device = CUDA
    assert sizes({"max_num_seqs": 8}) == [1, 2, 4, 8]
    assert sizes({"max_num_seqs": 8, "max_num_batched_tokens": 5}) == [1, 2, 4, 5], "no step has more rows than tokens"
    assert sizes({"max_num_seqs": 8, "enforce_eager": True}) == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    drafting = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}
    made = decode_graphs(config(max_num_seqs=2, **drafting), CapturableAttention(), CUDA, ToyRunner(8).padding)
    made.capture(meter())
    assert [size.tokens for size in made._sizes] == [1, 2, 2, 4, 8]
    assert sizes({"max_num_seqs": 8}, capturable=False) == []
    assert "the model's rotary embedding has frequencies for every length" in caplog.text
    assert sizes({"max_num_seqs": 8}, ReferenceAttention) == []
    assert "attention_backend='reference' decides on the host what it launches" in caplog.text
