"""Counter-based noise: a pure function of (seed, position, token id), with no generator state.

The host derives a 64-bit key from (seed, position).  Its two 32-bit halves key a multiply-xorshift
hash of the token id, computed on the device in wrapping int32 arithmetic.  The hash becomes an
Exp(1) variate E, and `argmin(E_j / p_j)` draws from p (the exponential race, equivalent to the
Gumbel-max trick).  Every step is elementwise: the noise of a token has the same bits in any batch,
row and order, whether it is computed for the whole vocabulary or for a few candidates.

Constants: splitmix64 (Steele, Lea and Flood 2014) and lowbias32 (Wellons, "Prospecting for
Hash Functions").
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

__all__ = ["mix_seed", "negative_exponential", "row_keys", "token_hashes"]

_GAMMA = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1
MULTIPLIER = 0x7FEB352D
_LOW_BITS = 20
_LOW_MASK = np.uint64(2**_LOW_BITS - 1)
_LOW_MULTIPLIERS = (0x5A8D5, 0xB9C33, 0x3F4E9)
# 31-bit hash -> (0, 1): the largest hash rounds to 2**31 in float32 and must stay below 1.
TO_UNIT = 2.0**-31 * (1.0 - 2.0**-24)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_seed(seed: int) -> int:
    """Origin of a sequence's noise, 64 bits; any Python int is taken modulo 2**64."""
    return int(_mix64(np.array([(seed + _GAMMA) & _MASK64], dtype=np.uint64))[0])


def row_keys(origins: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int32[2, R]: two keys per row from uint64[R] origins (`mix_seed`) and int64[R] positions.

    The first key is odd.
    """
    keys = _mix64(origins + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA))
    halves = np.empty((2, len(keys)), dtype=np.uint32)
    halves[0] = keys | np.uint64(1)
    halves[1] = keys >> np.uint64(32)
    return halves.view(np.int32)


@functools.lru_cache(maxsize=8)
def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """int32[vocab_size]: a hash of each token id, the same for every row.

    Its low bits are a permutation of those of the id.  Equal hashes would give equal noise, and
    hashes that differ only in their top bits correlated noise, since a product carries upward only.
    """
    ids = np.arange(vocab_size, dtype=np.uint64)
    low = ids & _LOW_MASK
    for multiplier in _LOW_MULTIPLIERS:
        low = ((low ^ (low >> np.uint64(_LOW_BITS // 2))) * np.uint64(multiplier)) & _LOW_MASK
    high = _mix64((ids + np.uint64(1)) * np.uint64(_GAMMA)) & np.uint64(2**32 - 2**_LOW_BITS)
    return torch.from_numpy((high | low).astype(np.uint32).view(np.int32)).to(device)


def negative_exponential(hashes: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """log(1 - u) = -E with E ~ Exp(1), always finite and below zero.

    Args:
        hashes: int32[V] or int32[R, K], `token_hashes` of the tokens.
        keys: two int32[R, 1] from `row_keys`.

    Returns:
        float32[R, V or K].
    """
    # Right shifts are arithmetic: each xorshift costs one bit of the hash but none of its balance.
    x = hashes * keys[0]
    x += keys[1]
    shifted = x >> 15
    x ^= shifted
    x *= MULTIPLIER
    x ^= torch.bitwise_right_shift(x, 16, out=shifted)  # sign bit now clear
    x |= 1  # u > 0
    # u is small where E is: log1p stays precise there.
    return x.to(torch.float32).mul_(-TO_UNIT).log1p_()
