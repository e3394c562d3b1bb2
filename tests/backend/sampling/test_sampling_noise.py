from __future__ import annotations

import numpy as np
import pytest
import torch
from nightly import nightly_but

from inflight.sampling.noise import mix_seed, negative_exponential, row_keys, token_hashes

CPU = torch.device("cpu")
PINNED = [[0.09147, 0.13961, 0.02481], [0.0624, 0.79802, 0.10182], [1.47152, 0.07224, 0.14411]]


def exponentials(seeds, positions, ids) -> np.ndarray:
    """float64[R, len(ids)]"""
    seeds = seeds if isinstance(seeds, (list, tuple)) else [seeds] * len(positions)
    origins = np.array([mix_seed(seed) for seed in seeds], dtype=np.uint64)
    keys = torch.from_numpy(row_keys(origins, np.asarray(positions)))
    hashes = token_hashes(2**18, CPU)[torch.as_tensor(ids)]
    return -negative_exponential(hashes, (keys[0][:, None], keys[1][:, None])).double().numpy()


def uniforms(seeds, positions, ids) -> np.ndarray:
    return -np.expm1(-exponentials(seeds, positions, ids))


def chi_square_z(counts: np.ndarray) -> float:
    """Standard deviations of the chi-square statistic above its mean, for even expectations."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - counts.size + 1) / np.sqrt(2 * (counts.size - 1)))


def joint_z(a: np.ndarray, b: np.ndarray) -> float:
    return chi_square_z(np.bincount((a * 16).astype(int) * 16 + (b * 16).astype(int), minlength=256))


def test_same_bits_for_candidates_and_vocabulary():
    keys = torch.from_numpy(row_keys(np.array([mix_seed(s) for s in range(5)], dtype=np.uint64), np.arange(5) * 7))
    keys = keys[0][:, None], keys[1][:, None]
    hashes = token_hashes(10007, CPU)
    whole = negative_exponential(hashes, keys)
    for width in (1, 2, 3, 7, 8, 15, 16, 17, 33, 1000):
        ids = torch.randint(0, 10007, (5, width), generator=torch.Generator().manual_seed(width))
        assert torch.equal(negative_exponential(hashes[ids], keys), whole.gather(1, ids))
    for row in range(5):
        alone = negative_exponential(hashes, (keys[0][row : row + 1], keys[1][row : row + 1]))
        assert torch.equal(alone[0], whole[row])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size():
    assert torch.equal(token_hashes(1000, CPU), token_hashes(50000, CPU)[:1000])


def test_pinned_values():
    """A change to the noise changes the output of every seeded request: it must be deliberate."""
    noise = exponentials([0, 1, 2**64 - 1], [0, 5, 10**6], [0, 1, 31999])
    assert noise.round(5).tolist() == PINNED


def test_seeds_are_taken_modulo_64_bits():
    assert mix_seed(-1) == mix_seed(2**64 - 1)
    assert mix_seed(0) != mix_seed(2**63)


def test_token_hashes_are_distinct_even_in_their_low_bits():
    low = token_hashes(2**18, CPU).numpy().view(np.uint32) & (2**20 - 1)
    assert len(np.unique(low)) == 2**18


def test_finite_and_positive_at_the_ends_of_the_hash_range():
    ends = torch.tensor([0, 1407728267], dtype=torch.int32)  # found by inverting the hash
    keys = torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    smallest, largest = (-negative_exponential(ends, keys))[0].tolist()
    assert smallest == pytest.approx(2.0**-31)
    assert largest == pytest.approx(24 * np.log(2))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63])
def test_uniform(seed):
    u = uniforms(seed, np.arange(20), np.arange(20000)).ravel()
    assert abs(chi_square_z(np.bincount((u * 1024).astype(int), minlength=1024))) < 5
    assert abs(chi_square_z(np.bincount((u * 2**18).astype(int) % 256, minlength=256))) < 5
    assert abs(u.mean() - 0.5) * np.sqrt(12 * len(u)) < 5


@pytest.mark.parametrize(
    "pair",
    nightly_but(
        [(0, 1), (7, 7 + 2**17), (31998, 31999)],
        [(0, 1), (1, 2), (100, 101), (5, 5 + 2**15), (7, 7 + 2**17), (31998, 31999)],
    ),
)
def test_tokens_are_independent(pair):
    u = uniforms(3, np.arange(50000), list(pair))
    assert joint_z(u[:, 0], u[:, 1]) < 5


@pytest.mark.parametrize("step", [1, 2, 64, 2**20])
def test_positions_are_independent(step):
    u = uniforms(3, np.array([10, 10 + step]), np.arange(50000))
    assert joint_z(u[0], u[1]) < 5


@pytest.mark.parametrize("seeds", [(0, 1), (1, 2), (0, 2**32), (0, 2**63), (-1, 0)])
def test_seeds_are_independent(seeds):
    u = uniforms([s % 2**64 for s in seeds], np.array([10, 10]), np.arange(50000))
    assert joint_z(u[0], u[1]) < 5


def test_no_pattern_over_squares_of_rows_and_tokens():
    """A hash that only added a row part and a token part would pass the pairwise tests."""
    u = uniforms(11, np.arange(500), np.arange(500))
    square = (u[1:, 1:] - u[1:, :-1] - u[:-1, 1:] + u[:-1, :-1]) % 1.0
    assert chi_square_z(np.bincount((square * 64).astype(int).ravel(), minlength=64)) < 5
    sign = np.sign(u - 0.5)
    assert abs((sign[1:, 1:] * sign[1:, :-1] * sign[:-1, 1:] * sign[:-1, :-1]).sum()) / 499 < 5


def test_minimum_over_a_large_vocabulary_follows_its_law():
    smallest = np.concatenate([exponentials(s, np.arange(100), np.arange(2**17)).min(1) for s in range(5)])
    quantiles = np.sort(-np.expm1(-smallest * 2**17))
    distance = np.abs(quantiles - (np.arange(len(quantiles)) + 0.5) / len(quantiles)).max()
    assert distance * np.sqrt(len(quantiles)) < 1.95  # Kolmogorov-Smirnov, 0.1 %
