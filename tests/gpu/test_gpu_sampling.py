"""Sampling on a GPU gives the CPU's tokens and never waits for the device.  Skipped without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import gpu_ops
from card_sizes import sized
from logprobs_of import logprobs_of
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import gpu_sampler
from inflight.sampling import Sampler, SamplingMetadata

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ROWS, VOCABULARY = sized((64, 50257), (12, 600))
HISTORY = np.tile(np.arange(40, dtype=np.int32) % 11, (ROWS, 1))
PARAMS = [
    *gpu_ops.KINDS["mixed"],
    SamplingParams(top_k=40, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    SamplingParams(top_p=0.9, logit_bias={7: 4.0}, bad_words_ids=[[3], [6, 2]]),
    SamplingParams(temperature=0.0, min_tokens=30, stop_token_ids=[5], logprobs=3),
]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def metadata(device: torch.device, rows: int, vocab_size: int, seed: int = 0) -> SamplingMetadata:
    table = new_table(rows, vocab_size, device)
    for slot in range(rows):
        table.set_row(slot, PARAMS[slot % len(PARAMS)], seed + slot, [], 20)
    return table.select(np.arange(rows), np.full(rows, 40), HISTORY)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_equal_those_of_the_cpu(seed: int) -> None:
    torch.manual_seed(seed)
    # Emulated: of a vocabulary with more than the 3000 logits that `top_k` keeps, or of any.
    sizes = sized(None, (6, 3500 if seed == 1 else 300))
    rows = gpu_ops.sampling_check_rows(CUDA, quick=seed > 1, seed=seed, sizes=sizes)
    assert not [row for row in rows if not row["passed"]]


@pytest.mark.parametrize("vocab_size", sized([11, 2048, 50257, 151936], [11, 2048]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_come_first(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab_size)
    logits = (torch.randn(ROWS, vocab_size) * 3).to(dtype)
    expected = Sampler()(logits, metadata(CPU, ROWS, vocab_size)).token_ids
    got = Sampler()(logits.to(CUDA), metadata(CUDA, ROWS, vocab_size)).token_ids
    assert torch.equal(got.cpu(), expected)


def test_ties() -> None:
    torch.manual_seed(5)
    logits = torch.randint(0, 4, (ROWS, VOCABULARY)).float()
    expected = Sampler()(logits, metadata(CPU, ROWS, VOCABULARY)).token_ids
    assert torch.equal(Sampler()(logits.to(CUDA), metadata(CUDA, ROWS, VOCABULARY)).token_ids.cpu(), expected)


def test_the_host_waits_for_nothing() -> None:
    """But for tables of the vocabulary, which the first call makes."""
    logits = torch.randn(ROWS, VOCABULARY, device=CUDA)
    Sampler()(logits, metadata(CUDA, ROWS, VOCABULARY))
    with no_waiting():
        Sampler()(logits, metadata(CUDA, ROWS, VOCABULARY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    logits = torch.randint(-9, 9, (ROWS, VOCABULARY)).to(dtype)  # ties across the edge of the top 3
    expected = logprobs_of(Sampler()(logits, metadata(CPU, ROWS, VOCABULARY)))
    got = logprobs_of(Sampler()(logits.to(CUDA), metadata(CUDA, ROWS, VOCABULARY)))
    assert got.keys() == expected.keys()
    for row, entry in got.items():
        ids, values, ranks = zip(*entry)
        expected_ids, expected_values, expected_ranks = zip(*expected[row])
        assert (ids, ranks) == (expected_ids, expected_ranks)
        assert values == pytest.approx(expected_values, abs=1e-4)


def test_a_row_alone_and_in_a_batch() -> None:
    logits = torch.randn(ROWS, VOCABULARY, device=CUDA)
    table = new_table(ROWS, VOCABULARY, CUDA)
    for slot in range(ROWS):
        table.set_row(slot, PARAMS[slot % 6], slot, [], 20)

    def tokens(slots: list[int]) -> list[int]:
        selected = table.select(np.array(slots), np.full(len(slots), 40), HISTORY)
        return Sampler()(logits[torch.tensor(slots, device=CUDA)], selected).token_ids.tolist()

    whole = tokens(list(range(ROWS)))
    assert [tokens([slot])[0] for slot in range(ROWS)] == whole
    assert tokens(list(range(ROWS))[::-1]) == whole[::-1]


def test_captured_in_a_graph() -> None:
    logits, selected = torch.randn(ROWS, VOCABULARY, device=CUDA), metadata(CUDA, ROWS, VOCABULARY)
    assert selected.columns is not None
    expected = gpu_sampler.choose(logits, selected.columns)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = gpu_sampler.choose(logits, selected.columns)
    for _ in range(3):
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("value", [-float("inf"), float("nan"), float("inf"), -3e38, 3e38])
def test_logits_that_are_not_finite_give_no_token_and_extreme_ones_do(value: float) -> None:
    logits = torch.full((len(gpu_ops.KINDS["mixed"]), 5000), value, device=CUDA)
    selected = gpu_ops.sampling_metadata("mixed", len(logits), 5000, CUDA, 0)
    got = gpu_sampler.choose(logits, selected.columns)
    assert bool(((got >= 0) & (got < 5000)).all() if abs(value) < 1e39 else (got == -1).all())
