"""Elementwise functions of the GPU sampling kernels.

The functions that decide a token (`uniform`, `negative_exponential`, `exp_of_negative`) use only integer
operations and correctly rounded ones.  In a kernel compiled with `enable_fp_fusion=False` they give
the same bits on every GPU, however accurate the hardware's exp and log are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.sampling import noise

__all__ = ["exp_of_negative", "negative_exponential", "order_key", "rough_gumbel", "uniform"]

_MULTIPLIER = tl.constexpr(noise.MULTIPLIER)
_TO_UNIT = tl.constexpr(noise.TO_UNIT)

# 1.5 * 2**23: adding it to |x| < 2**22 rounds x to an integer, in the low bits of the sum.
_ROUNDER = tl.constexpr(12582912.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# ln 2 in two parts; the upper one ends in zero bits, so that small multiples of it are exact.
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.4286068203094172e-06)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_ONE_BITS = tl.constexpr(0x3F800000)


@triton.jit
def uniform(hashes, key, offset):
    """`noise.negative_exponential` before its logarithm: float32 in (0, 1), bit for bit.

    Args:
        hashes: int32, `noise.token_hashes` of the tokens.
        key, offset: the row's two int32 keys, see `noise.row_keys`.
    """
    x = hashes * key + offset
    x ^= x >> 15
    x *= _MULTIPLIER
    x ^= x >> 16
    return (x | 1).to(tl.float32) * _TO_UNIT


@triton.jit
def negative_exponential(u):
    """log(1 - u) for float32 u in (0, 1), within 1 unit in the last place.

    1 - u = 2**k (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), then the series of log(1 + f) in
    s = f / (2 + f) with the coefficients of FreeBSD's `k_logf.h` (Sun Microsystems, 1993).
    """
    t = 1.0 - u
    bits = t.to(tl.int32, bitcast=True) + (_ONE_BITS - _SQRT_HALF_BITS)
    k = (bits >> 23) - 127
    reduced = ((bits & 0x007FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    # For small u, f is -u itself, and the rounding error of 1 - u does not matter; otherwise the
    # error is added back, times a rough 1 / t.
    f = tl.where(k == 0, -u, reduced - 1.0)
    lost = tl.where(k == 0, 0.0, ((1.0 - t) - u) * 1.7)
    s = tl.div_rn(f, 2.0 + f)
    z = s * s
    w = z * z
    series = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841)
    half = 0.5 * f * f
    exponent = k.to(tl.float32)
    return s * (half + series) + (exponent * _LN2_LOW + lost) - half + f + exponent * _LN2_HIGH


@triton.jit
def exp_of_negative(x):
    """exp(x) for float32 x <= 0, within 1 unit in the last place; 0 for x < -87, where results get subnormal.

    x = n ln 2 + r, then the polynomial of the Cephes library's `expf` (Moshier, 1989) in r.
    """
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    exponent = (shifted.to(tl.int32, bitcast=True) << 23) + _ONE_BITS
    return tl.where(x < -87.0, 0.0, p * exponent.to(tl.float32, bitcast=True))


@triton.jit
def _rough_log2(x):
    """log2 of normal x > 0, within 2e-5: the bits of a float are already a piecewise linear log2."""
    bits = x.to(tl.int32, bitcast=True)
    f = ((bits & 0x007FFFFF) | _ONE_BITS).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, 0.04424374, -0.19126251)
    p = tl.fma(p, f, 0.41355505)
    p = tl.fma(p, f, -0.70837215)
    p = tl.fma(p, f, 0.44183587)
    return tl.fma(p, f, tl.fma(bits.to(tl.float32), 1.1920928955078125e-7, -127.0))


@triton.jit
def rough_gumbel(u):
    """-log(-log(1 - u)) within 2e-4, at low cost: for shortlists only."""
    # For small u the absolute error of the logarithm would be large in comparison.
    series = tl.fma(tl.fma(tl.fma(u, 0.25, 0.33333334), u, 0.5), u, 1.0) * u
    exponential = tl.where(u < 0.125, series, _rough_log2(1.0 - u) * -_LN2)
    return _rough_log2(exponential) * -_LN2


@triton.jit
def order_key(x):
    """int32 that orders like float32 x; 0.0 and -0.0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
