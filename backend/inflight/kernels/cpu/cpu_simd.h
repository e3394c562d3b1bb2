// Vectors and operand types, written once for all instruction sets with the compiler's vector extensions;
// intrinsics only where the extensions lack an operation.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu_attention.h"

#define INFLIGHT_INLINE inline __attribute__((always_inline))

namespace inflight {
namespace INFLIGHT_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kLanes)));

INFLIGHT_INLINE Vec splat(float x) { return x - Vec{}; }

INFLIGHT_INLINE Vec load(const float* from) {
  Vec result;
  __builtin_memcpy(&result, from, sizeof result);
  return result;
}

INFLIGHT_INLINE void store(float* to, Vec x) { __builtin_memcpy(to, &x, sizeof x); }

INFLIGHT_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

INFLIGHT_INLINE float reduce_max(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float result = x[0];
  for (int i = 1; i < kLanes; ++i) result = x[i] > result ? x[i] : result;
  return result;
#endif
}

// The largest magnitude.  Preserves NaN: as an unsigned integer it is greater than any magnitude.
INFLIGHT_INLINE UintVec maximum_bits(UintVec a, Vec x) {
  const UintVec bits = (UintVec)x & 0x7fffffffu;
  return a > bits ? a : bits;
}

INFLIGHT_INLINE float reduce_max_bits(UintVec bits) {
#if defined(__AVX512F__)
  const uint32_t result = _mm512_reduce_max_epu32((__m512i)bits);
#else
  uint32_t result = bits[0];
  for (int i = 1; i < kLanes; ++i) result = bits[i] > result ? bits[i] : result;
#endif
  float value;
  __builtin_memcpy(&value, &result, 4);
  return value;
}

INFLIGHT_INLINE float reduce_add(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}

// x = n + r with an integer n and r in [-1/2, 1/2]; |x| < 2^22.
struct Split {
  Vec r;
  UintVec n;  // valid in its low bits only, which are shifted into an exponent
};

INFLIGHT_INLINE Split split_integer(Vec x) {
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are x rounded to an integer
  const Vec shifted = x + shifter;
  return {x - (shifted - shifter), (UintVec)shifted};
}

// 2^r - 1 for r in [-1/2, 1/2]: minimax, relative error 1e-7.
INFLIGHT_INLINE Vec exp2_minus_1(Vec r) {
  Vec p = splat(0.00132647271f);
  p = p * r + 0.00967151265f;
  p = p * r + 0.0555073374f;
  p = p * r + 0.240222421f;
  p = p * r + 0.693146978f;
  return p * r;
}

// 2^x for x <= 126; 0 far below -126; NaN for NaN.  Relative error 1e-7, or 3e-6 without kExact where that is faster.
template <bool kExact>
INFLIGHT_INLINE Vec exp2(Vec x) {
#if defined(__AVX512F__)
  x = (Vec)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // of a NaN and a number it returns the second
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
  Vec p;
  if (kExact) {
    p = splat(0.00186713007f);
    p = p * r + 0.00901703032f;
    p = p * r + 0.0557999131f;
    p = p * r + 0.24016445f;
    p = p * r + 0.693151312f;
  } else {
    p = splat(0.0134266843f);
    p = p * r + 0.0522424742f;
    p = p * r + 0.241280205f;
    p = p * r + 0.693044845f;
  }
  return (Vec)_mm512_scalef_ps((__m512)(p * r + 1.0f), (__m512)x);  // times 2^floor(x)
#else
  const Split split = split_integer(x);
  const Vec scaled = (Vec)((UintVec)(exp2_minus_1(split.r) + 1.0f) + (split.n << 23));
  return x < -126.0f ? Vec{} : scaled;
#endif
}

// Relative error of a few 1e-7, also for small x, where 1 - 2 / (exp(2 x) + 1) would lose digits.
INFLIGHT_INLINE Vec tanh(Vec x) {
  Vec twice = (x < 0.0f ? -x : x) * 2.88539008f;  // log2 of exp(2 |x|)
  twice = twice > 60.0f ? splat(60.0f) : twice;
  const Split split = split_integer(twice);
  const Vec power = (Vec)((split.n << 23) + 0x3f800000u);
  const Vec above_1 = exp2_minus_1(split.r) * power + (power - 1.0f);
  const Vec result = above_1 / (above_1 + 2.0f);
  return x < 0.0f ? -result : result;
}

INFLIGHT_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  // After the shift the exponent is too small by 112; the multiplication corrects it, also for
  // subnormal numbers.
  uint32_t bits = rest << 13;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  __builtin_memcpy(&bits, &value, 4);
  if (rest >= 0x7c00) bits |= 0x7f800000;  // infinity, NaN
  bits |= sign;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest, ties to even; overflow to infinity.
INFLIGHT_INLINE uint16_t float_to_half(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
  if (bits < 0x38800000) {                       // subnormal: the sum's low bits are the result
    float magnitude, magic = 0.5f;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude += magic;
    __builtin_memcpy(&bits, &magnitude, 4);
    return sign | uint16_t(bits - 0x3f000000);
  }
  bits += 0xfff + ((bits >> 13) & 1) - (uint32_t(112) << 23);
  return sign | uint16_t(bits >> 13);
}

INFLIGHT_INLINE float bfloat_to_float(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

INFLIGHT_INLINE uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

// Operand types: how one step of a matrix product reads a lane's elements from the packed layout.
//   Elem       type that queries and softmax weights are packed as
//   Sum        lanes of a running sum
//   kDepth     elements of the summed dimension per step, multiplied in kParts equal parts
//   kLaneBytes bytes of a lane in memory
//   Left       elements of a row, broadcast to all lanes; Right: kLanes columns
//   kScaled    a token's elements have a scale, stored separately (cpu_int8.h)
//   kQuantized Elem is an integer, and rows of queries and softmax weights have scales, too

struct Float32 {
  using Elem = float;
  using Sum = Vec;
  using Left = Vec;
  using Right = Vec;
  static constexpr int kDepth = 1;
  static constexpr int kParts = 1;
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = false;
  static constexpr bool kQuantized = false;
  static INFLIGHT_INLINE Left broadcast(const float* a) { return splat(*a); }
  static INFLIGHT_INLINE Right right(const char* b) { return load(reinterpret_cast<const float*>(b)); }
  static INFLIGHT_INLINE Right first_of_pair(Right b) { return b; }
  static INFLIGHT_INLINE Vec fma(Vec sum, Left a, Right b) { return a * b + sum; }
};

struct Float16 : Float32 {
  static constexpr int kLaneBytes = 2;
  static INFLIGHT_INLINE Right right(const char* b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
#else
    uint16_t halves[kLanes];
    float floats[kLanes];
    __builtin_memcpy(halves, b, sizeof halves);
    for (int i = 0; i < kLanes; ++i) floats[i] = half_to_float(halves[i]);
    return load(floats);
#endif
  }
};

// bfloat16 pairs, multiplied in float32.
struct Bfloat16 {
  struct Pair {
    Vec first, second;
  };
  using Elem = float;
  using Sum = Vec;
  using Left = Pair;
  using Right = Pair;
  static constexpr int kDepth = 2;
  static constexpr int kParts = 1;
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = false;
  static constexpr bool kQuantized = false;
  static INFLIGHT_INLINE Left broadcast(const float* a) { return {splat(a[0]), splat(a[1])}; }
  static INFLIGHT_INLINE Right right(const char* b) {
    UintVec bits;
    __builtin_memcpy(&bits, b, sizeof bits);
    return {(Vec)(bits << 16), (Vec)(bits & 0xffff0000u)};
  }
  static INFLIGHT_INLINE Right first_of_pair(Right b) { return {b.first, Vec{}}; }
  static INFLIGHT_INLINE Vec fma(Vec sum, Left a, Right b) {
    sum = a.first * b.first + sum;
    return a.second * b.second + sum;
  }
};

#if defined(__AVX512BF16__)
// bfloat16 pairs, multiplied and added by one instruction; queries and softmax weights are bfloat16, too.
struct Bfloat16Dot {
  using Elem = uint16_t;
  using Sum = Vec;
  using Left = __m512i;
  using Right = __m512i;
  static constexpr int kDepth = 2;
  static constexpr int kParts = 1;
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = false;
  static constexpr bool kQuantized = false;
  static INFLIGHT_INLINE Left broadcast(const uint16_t* a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return _mm512_set1_epi32(pair);
  }
  static INFLIGHT_INLINE Right right(const char* b) { return _mm512_loadu_si512(b); }
  static INFLIGHT_INLINE Right first_of_pair(Right b) { return _mm512_and_si512(b, _mm512_set1_epi32(0xffff)); }
  static INFLIGHT_INLINE Vec fma(Vec sum, Left a, Right b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// Store softmax weights as the left operand of the product with the values.
INFLIGHT_INLINE void store_weights(float* to, Vec x) { store(to, x); }
#if defined(__AVX512BF16__)
INFLIGHT_INLINE void store_weights(uint16_t* to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#endif

}  // namespace INFLIGHT_ISA
}  // namespace inflight
