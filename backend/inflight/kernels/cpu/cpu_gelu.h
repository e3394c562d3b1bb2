// GELU by the normal distribution, as BERT has it.
#pragma once

#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {

// x * Phi(x).  With a = |x| / sqrt(2) the tail of the distribution is erfc(a) / 2, and erfc(a) = exp(-a^2) t Q(t) with
// t = 1 / (1 + a / 2) and a minimax polynomial Q: a few 1e-7 of relative error, also where Phi is small.
INFLIGHT_INLINE Vec gelu(Vec x) {
  constexpr float kLargest = 14.0f;  // whose tail is 0 in float32
  Vec a = (x < 0.0f ? -x : x) * 0.707106781f;
  a = a > kLargest ? splat(kLargest) : a;
  const Vec t = splat(1.0f) / (a * 0.5f + 1.0f);
  Vec q = splat(-0.0593869016f);
  q = q * t + 0.286125869f;
  q = q * t + -0.490409791f;
  q = q * t + 0.281736523f;
  q = q * t + -0.0291502476f;
  q = q * t + 0.203753009f;
  q = q * t + 0.24283506f;
  q = q * t + 0.282412112f;
  q = q * t + 0.282084346f;
  const Vec tail = a * 0.707106781f * t * q * exp2<true>(a * a * -1.44269504f);
  return x > 0.0f ? x - tail : -tail;
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
