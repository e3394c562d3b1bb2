from __future__ import annotations

import numpy as np
import pytest
import torch
from logprobs_of import logprobs_of
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import Sampler, prompt_logprobs
from inflight.sampling.token_logprobs import _chunk_logprobs

V = 211


def logits_and_logprobs(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, np.ndarray]:
    logits = (torch.randn(num_rows, V, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    return logits, torch.log_softmax(logits.double(), -1).numpy()


def check_entry(entry, logprobs: np.ndarray, token: int, top: int) -> None:
    ids, values, ranks = zip(*entry)
    assert len(ids) == 1 + min(top, len(logprobs))
    assert ids[0] == token
    expected = np.lexsort((np.arange(len(logprobs)), -logprobs))[:top]
    assert list(ids[1:]) == expected.tolist()
    np.testing.assert_allclose(values, logprobs[list(ids)], rtol=1e-5, atol=1e-5)
    assert list(ranks) == [1 + int((logprobs > logprobs[i]).sum()) for i in ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 5, 500])
def test_prompt_logprobs(dtype, top):
    logits, expected = logits_and_logprobs(9, dtype)
    tokens = torch.arange(9) * 20
    entries = prompt_logprobs(logits, tokens, top)
    assert len(entries) == 9
    for entry, logprobs, token in zip(entries, expected, tokens.tolist()):
        check_entry(entry, logprobs, token, top)


def test_prompt_logprobs_in_chunks(monkeypatch):
    from inflight.sampling import token_logprobs as logprobs

    logits, _ = logits_and_logprobs(9)
    whole = prompt_logprobs(logits, torch.arange(9), 3)
    monkeypatch.setattr(logprobs, "_CHUNK", 4 * V)
    assert prompt_logprobs(logits, torch.arange(9), 3) == whole
    assert len(prompt_logprobs(logits[:0], torch.arange(0), 3)) == 0


def test_int32_tokens():
    logits, expected = logits_and_logprobs(2)
    _, entry = prompt_logprobs(logits, torch.tensor([3, 4], dtype=torch.int32), 2)
    check_entry(entry, expected[1], 4, 2)


def test_sampled_token_comes_first_then_the_top_of_the_raw_logits():
    logits, expected = logits_and_logprobs(4)
    table = new_table(4, V)
    biased = {int(expected[1].argmin()): 100.0}
    table.set_row(0, SamplingParams(temperature=2.0, logprobs=3), 0, [], 1)
    table.set_row(1, SamplingParams(temperature=0.0, logit_bias=biased, logprobs=0), 0, [], 1)
    table.set_row(2, SamplingParams(), 0, [], 1)
    table.set_row(3, SamplingParams(top_k=4, repetition_penalty=1.5, logprobs=7), 0, [], 1)
    output = Sampler()(logits, table.select(range(4), [2] * 4, np.zeros((4, 8), dtype=np.int32)))
    logprobs = logprobs_of(output)
    assert list(logprobs) == [0, 1, 3]
    for row, top in ((0, 3), (1, 0), (3, 7)):
        check_entry(logprobs[row], expected[row], int(output.token_ids[row]), top)
    assert logprobs[1][0][2] == V  # chosen because of its bias, but ranked by the raw logits


def test_equal_logits_share_a_rank():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0]])
    (entry,) = prompt_logprobs(logits, torch.tensor([2]), 4)
    assert [(i, r) for i, _, r in entry] == [(2, 3), (1, 1), (3, 1), (0, 3), (2, 3)]


def test_masked_logits_have_log_probability_minus_infinity():
    logits = torch.tensor([[0.0, -float("inf"), 0.0]])
    (entry,) = prompt_logprobs(logits, torch.tensor([1]), 2)
    assert entry[0] == (1, -float("inf"), 3)
    assert [round(v, 5) for _, v, _ in entry[1:]] == [-0.69315, -0.69315]


def test_entries_are_plain_python():
    (entry,) = prompt_logprobs(torch.zeros(1, 5), torch.tensor([2]), 1)
    assert [tuple(map(type, e)) for e in entry] == [(int, float, int)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_read_on_the_host_before_the_entries_are(dtype):
    """A tensor without data raises where a GPU would make the host wait."""
    ids, values, ranks = _chunk_logprobs(
        torch.zeros(4, V, dtype=dtype, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"), 3
    )
    assert ids.shape == values.shape == ranks.shape == (4, 4)


def test_minus_one_asks_for_the_whole_vocabulary_of_its_row_alone():
    logits, expected = logits_and_logprobs(2)
    table = new_table(2, V)
    table.set_row(0, SamplingParams(temperature=0.0, logprobs=-1), 0, [], 1)
    table.set_row(1, SamplingParams(temperature=0.0, logprobs=1), 0, [], 1)
    output = Sampler()(logits, table.select(range(2), [2] * 2, np.zeros((2, 8), dtype=np.int32)))
    for row, top in ((0, V), (1, 1)):
        check_entry(logprobs_of(output)[row], expected[row], int(output.token_ids[row]), top)
