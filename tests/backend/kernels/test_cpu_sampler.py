"""The compiled sampler against torch, for vocabularies of any size; what its tokens mean: tests/backend/sampling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import mask_words
from inflight.kernels.cpu import cpu_sampler
from inflight.kernels.cpu.library import instruction_set, use_instruction_set
from inflight.sampling import Sampler, SamplingTable
from inflight.sampling.metadata import COLUMN_LINES, Kind
from inflight.sampling.unusable import NO_TOKEN

INF = float("inf")


@pytest.fixture(params=["", "avx2", "portable"], ids=["best", "avx2", "portable"], scope="module", autouse=True)
def each_set(request: pytest.FixtureRequest) -> Iterator[None]:
    best = instruction_set()
    if not use_instruction_set(request.param):
        pytest.skip(f"no {request.param} here")
    yield
    use_instruction_set(best)


params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 200, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2]),
)


def columns_of(table: SamplingTable, rows: int, position: int) -> torch.Tensor:
    columns = np.empty((COLUMN_LINES, rows), dtype=np.int64)
    table.fill_columns(columns, np.arange(rows), np.full(rows, position))
    return torch.from_numpy(columns)


def by_torch(logits: torch.Tensor, params: list[SamplingParams], seed: int, position: int) -> list[int]:
    table = SamplingTable(len(params), logits.shape[-1])
    for slot, one in enumerate(params):
        table.set_row(slot, one, seed + slot, [], 1)
    metadata = table.select(np.arange(len(params)), np.full(len(params), position))
    tokens: list[int] = Sampler()(logits, metadata).token_ids.tolist()
    return tokens


@given(data=st.data())
def test_the_tokens_of_torch_whatever_the_vocabulary(data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 1024, 1025, 1500, 4099])))
    params = data.draw(st.lists(params_of, min_size=1, max_size=5))
    seed, position = data.draw(st.integers(0, 2**40)), data.draw(st.integers(1, 5000))
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), size, generator=rng) * data.draw(st.sampled_from([0.0, 0.5, 4.0, 1e4]))
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    barred = torch.rand(len(params), size, generator=rng) < data.draw(st.sampled_from([0.0, 0.5, 0.98]))
    logits.masked_fill_(barred, -INF)
    table = new_table(len(params), size)
    for slot, one in enumerate(params):
        table.set_row(slot, one, seed + slot, [], 1)
    columns = columns_of(table, len(params), position)
    expected = by_torch(logits, params, seed, position)
    assert cpu_sampler.choose(logits, columns).tolist() == expected
    # The same with a mask in place of infinities.
    words = np.zeros((len(params), mask_words(size) * 32), dtype=np.uint8)
    words[:, :size] = ~barred.numpy()
    bitmask = np.packbits(words, axis=1, bitorder="little").view(np.int32)
    whole = logits.masked_fill(barred, data.draw(st.sampled_from([0.0, 9.0])))
    marks = data.draw(st.booleans())
    masked = cpu_sampler.choose(whole, columns, marks, bitmask).tolist()
    assert masked == [0 if token == NO_TOKEN else token for token in expected], "nothing left is no fault of the model"


def test_rows_in_any_order_with_padding_between(each_set: None) -> None:
    table = new_table(6, 500)
    for slot in range(6):
        table.set_row(slot, SamplingParams(top_k=slot % 3 * 5, temperature=0.7), slot, [], 1)
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    columns = columns_of(table, 6, 9)
    expected = cpu_sampler.choose(logits, columns).tolist()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert cpu_sampler.choose(logits, columns[:, order]).tolist() == expected
    padded = columns[:, order].clone()
    padded[6, [1, 3]] = int(Kind.PADDING)
    assert cpu_sampler.choose(logits, padded).tolist() == [0 if row in (0, 2) else expected[row] for row in range(6)]
    wide = torch.randn(6, 700)
    wide[:, 100:600] = logits
    assert cpu_sampler.choose(wide[:, 100:600], columns).tolist() == expected, "rows need not be contiguous"
    assert cpu_sampler.choose(logits[:0], columns[:, :0]).tolist() == []


def test_a_bias_beyond_measure_and_rows_that_are_not_numbers() -> None:
    table = new_table(4, 300)
    for slot in range(4):
        table.set_row(slot, SamplingParams(temperature=1e-5 if slot == 3 else 1.0), slot, [], 1)
    logits = torch.zeros(4, 300)
    logits[0, 200] = INF
    logits[1, 299] = float("nan")
    logits[2] = -INF
    logits[3, 7] = 3e38
    columns = columns_of(table, 4, 1)
    assert cpu_sampler.choose(logits, columns).tolist() == [NO_TOKEN] * 3 + [7]
    assert cpu_sampler.choose(logits, columns, marks=False).tolist()[0] == 200
    bitmask = np.full((4, mask_words(300)), -1, dtype=np.int32)
    assert cpu_sampler.choose(logits, columns, bitmask=bitmask).tolist() == [NO_TOKEN] * 3 + [7], "a mask hides nothing"
