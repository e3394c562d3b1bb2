from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_tables import new_table

from inflight.engine.sampling_params import SamplingParams
from inflight.sampling import Sampler, candidates
from inflight.sampling.candidates import argmax, top_candidates
from inflight.sampling.choose import _weights

pytestmark = pytest.mark.usefixtures("drawn_by")

sample = Sampler()


def draws(logits: torch.Tensor, params: SamplingParams, num: int, seed: int = 0) -> np.ndarray:
    """Tokens drawn from one row of logits at `num` successive positions."""
    table = new_table(1, logits.shape[-1])
    table.set_row(0, params, seed, [], 1)
    metadata = table.select(np.zeros(num, dtype=np.int64), np.arange(num) + 1)
    return sample(logits.expand(num, -1), metadata).token_ids.numpy()


def assert_distribution(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square test over tokens expected at least five times; a token of probability zero must not occur."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum(), max(1, len(observed) - 1)
    assert (chi_square - freedom) / np.sqrt(2 * freedom) < 5


SHAPES = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=20, top_p=0.7),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.05, temperature=0.8),
    SamplingParams(top_p=0.9, min_p=0.02, temperature=1.3),
]


@pytest.mark.parametrize("params", SHAPES, ids=repr)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_frequencies_match_the_probabilities(reference, params, scale):
    logits = torch.randn(61, generator=torch.Generator().manual_seed(1)) * scale
    weights = reference.weights(logits.numpy(), params)
    assert_distribution(draws(logits, params, 20_000), weights / weights.sum())


def test_frequencies_over_seeds_match_the_probabilities(reference):
    logits = torch.randn(61, generator=torch.Generator().manual_seed(2)) * 2
    table = new_table(5000, 61)
    for seed in range(5000):
        table.set_row(seed, SamplingParams(), seed, [], 1)
    tokens = sample(logits.expand(5000, -1), table.select(np.arange(5000), np.full(5000, 17))).token_ids.numpy()
    assert_distribution(tokens, torch.softmax(logits.double(), -1).numpy())


def test_successive_tokens_are_independent():
    tokens = draws(torch.zeros(8), SamplingParams(), 40_000)
    assert_distribution(tokens[:-1] * 8 + tokens[1:], np.full(64, 1 / 64))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_p=0.5), {0}),  # 0.5 reaches 0.5
        (SamplingParams(top_p=0.50001), {0, 1}),
        (SamplingParams(top_p=0.75), {0, 1}),
        (SamplingParams(top_p=0.76), {0, 1, 2}),
        (SamplingParams(top_p=1e-9), {0}),
        (SamplingParams(top_p=1.0), {0, 1, 2, 3}),
        (SamplingParams(top_k=3, top_p=0.57), {0}),  # of the three: 4/7 = 0.5714
        (SamplingParams(top_k=3, top_p=0.58), {0, 1}),
        (SamplingParams(min_p=0.5), {0, 1}),  # probability equal to the bound stays
        (SamplingParams(min_p=0.51), {0}),
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(min_p=0.5, top_p=0.66), {0}),  # of min_p's two: 2/3
        (SamplingParams(min_p=0.5, top_p=0.67), {0, 1}),
        (SamplingParams(min_p=0.5, top_k=3, top_p=0.67), {0, 1}),
        (SamplingParams(top_k=1), {0}),
    ],
    ids=repr,
)
def test_boundaries(params, allowed):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert set(draws(probabilities.log(), params, 400).tolist()) == allowed


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_k=70), 70),
        (SamplingParams(top_p=0.1), 10),
        (SamplingParams(top_k=50, top_p=0.1), 5),
        (SamplingParams(min_p=1.0), 100),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_keep_the_lowest_ids(params, allowed, dtype):
    assert set(draws(torch.ones(100, dtype=dtype), params, 3000).tolist()) == set(range(allowed))


def test_ties_behind_a_leader():
    logits = torch.zeros(50)
    logits[20] = 1.0
    assert set(draws(logits, SamplingParams(top_k=4), 500).tolist()) == {20, 0, 1, 2}


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    for dtype in (torch.float32, torch.bfloat16):
        assert argmax(logits.to(dtype)).tolist() == [1, 0]
    assert draws(logits[0], SamplingParams(temperature=9e-6), 5).tolist() == [1] * 5


@pytest.mark.parametrize("k", [0, -1, 7, 8, 1000])
def test_top_k_of_at_least_the_vocabulary_keeps_everything(k):
    logits = torch.randn(7, generator=torch.Generator().manual_seed(3))
    assert draws(logits, SamplingParams(top_k=k), 500).tolist() == draws(logits, SamplingParams(), 500).tolist()


@pytest.mark.parametrize("narrowing", [{}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.9, "min_p": 0.01}])
def test_candidates_and_vocabulary_race_to_the_same_token(narrowing):
    """A top_k that drops only an impossible token takes another path to the same result."""
    logits = torch.randn(2003, generator=torch.Generator().manual_seed(4)) * 2
    logits[77] = -float("inf")
    whole = draws(logits, SamplingParams(**narrowing), 300)
    assert draws(logits, SamplingParams(top_k=2002, **narrowing), 300).tolist() == whole.tolist()
    assert len(set(whole.tolist())) > 10


@pytest.mark.parametrize("scale", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("params", [SamplingParams(top_p=0.7), SamplingParams(min_p=0.3), SamplingParams(top_p=0.01)])
def test_shortlist_and_chunks_do_not_change_the_token(monkeypatch, scale, params):
    """On a GPU there is no shortlist and chunks have another size."""
    from inflight.sampling import choose

    logits = torch.randn(1009, generator=torch.Generator().manual_seed(5)) * scale
    tokens = draws(logits, params, 300).tolist()
    monkeypatch.setattr(choose, "_CHUNK_CPU", 3000)
    assert draws(logits, params, 300).tolist() == tokens
    monkeypatch.setattr(choose, "_shortlist", lambda weights, floor: None)
    assert draws(logits, params, 300).tolist() == tokens


@pytest.mark.parametrize("params", [*SHAPES, SamplingParams(temperature=0.0)], ids=repr)
@pytest.mark.parametrize("value", [-3e38, 3e38])
def test_extreme_logits_give_a_token_of_the_vocabulary(params, value):
    tokens = draws(torch.full((37,), value), params, 20)
    assert ((tokens >= 0) & (tokens < 37)).all()


@pytest.mark.parametrize("params", SHAPES, ids=repr)
def test_masked_tokens_are_never_drawn(params):
    logits = torch.full((301,), -float("inf"))
    logits[[3, 200, 300]] = torch.tensor([0.0, 0.5, 0.2])
    assert set(draws(logits, params, 200).tolist()) <= {3, 200, 300}


def test_weights_of_a_fully_masked_row_are_zero():
    masked = torch.full((1, 5), -float("inf"))
    assert _weights(masked.clone(), masked[:, :1], None).tolist() == [[0.0] * 5]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 100.0])
def test_temperature_extremes(temperature):
    logits = torch.linspace(-30, 30, 41)
    tokens = draws(logits, SamplingParams(temperature=temperature), 2000)
    assert len(set(tokens.tolist())) == (41 if temperature == 100.0 else 1)


@pytest.mark.parametrize("k", [1, 3, 10, 50])
def test_top_candidates_are_ordered_by_logit_then_id(monkeypatch, k):
    """On a CPU, and in chunks as on a GPU."""
    monkeypatch.setattr(candidates, "_CHUNK", 350)
    x = torch.randint(0, 6, (40, 50), generator=torch.Generator().manual_seed(k)).float()
    x[0] = -float("inf")
    x[1, ::2] = -0.0
    on_cpu, by_rank = top_candidates(x, k), candidates._top_by_rank(x, k)
    assert all(torch.equal(a, b) for a, b in zip(on_cpu, by_rank))
    values, ids = on_cpu
    for row in range(40):
        expected = np.lexsort((np.arange(50), -x[row].numpy()))[:k]
        assert ids[row].tolist() == expected.tolist()
        assert values[row].tolist() == x[row, expected].tolist()
