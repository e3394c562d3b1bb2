// int8 keys and values: symmetric, with a bfloat16 scale per token and head.  A value is its byte times its
// scale; scales are applied to the scores and to the softmax weights, so that products involve bytes only.
#pragma once

#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {

constexpr float kByteLevels = 127.0f;
constexpr float kWordLevels = 32767.0f;
constexpr float kSmallest = 0x1p-100f;  // smaller peaks are treated as zero: the inverse would overflow

// Quantize a row for the pool, so that to[i] * scale is nearest to from[i].  Returns the bits of the scale,
// rounded up so that no magnitude exceeds 127; NaN if an element is not finite.  Bitwise the same as
// attention/int8_kv.py.
inline uint16_t quantize_row(const float* from, int8_t* to, int64_t size) {
  uint32_t peak_bits = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, from + i, 4);
    bits &= 0x7fffffff;
    peak_bits = bits > peak_bits ? bits : peak_bits;
  }
  float scale;
  __builtin_memcpy(&scale, &peak_bits, 4);
  scale /= kByteLevels;
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, 4);
  const bool finite = peak_bits < 0x7f800000;
  const uint16_t stored = !finite ? 0x7fc0 : scale < kSmallest ? 0 : uint16_t((bits + 0xffff) >> 16);
  const float inverse = finite && stored != 0 ? 1.0f / bfloat_to_float(stored) : 0.0f;
  if (inverse == 0.0f) {
    std::memset(to, 0, size);
    return stored;
  }
  for (int64_t i = 0; i < size; ++i) to[i] = int8_t(__builtin_rintf(from[i] * inverse));
  return stored;
}

// Bytes converted to float32: four products for the four bytes of a lane.
struct Int8 {
  using Elem = float;
  using Sum = Vec;
  using Right = UintVec;
  static constexpr int kDepth = 4;
  static constexpr int kParts = 4;
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = true;
  static constexpr bool kQuantized = false;
  static INFLIGHT_INLINE Right right(const char* b) {
    UintVec bits;
    __builtin_memcpy(&bits, b, sizeof bits);
    return bits;
  }
  // Element j of the four, which are stored in the order 0, 2, 1, 3.
  static INFLIGHT_INLINE Vec part(Right b, int j) {
    const int byte = j == 1 ? 2 : j == 2 ? 1 : j;
    return __builtin_convertvector((IntVec)(b << (24 - 8 * byte)) >> 24, Vec);
  }
  static INFLIGHT_INLINE Vec broadcast(const float* a) { return splat(*a); }
  static INFLIGHT_INLINE Vec fma(Vec sum, Vec a, Vec b) { return a * b + sum; }
};

#if defined(__AVX2__)
typedef int16_t ShortVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UshortVec __attribute__((vector_size(4 * kLanes)));

// Bytes times 16-bit integers, in pairs, summed exactly.  Queries, and the softmax weights of one tile, are
// quantized to 16 bits with one scale per row.  Twice as fast as float32, and more precise than bfloat16.
struct Int8Dot {
  using Elem = int16_t;
  using Sum = IntVec;
  using Right = UshortVec;
  static constexpr int kDepth = 4;
  static constexpr int kParts = 2;
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = true;
  static constexpr bool kQuantized = true;
  static INFLIGHT_INLINE Right right(const char* b) {
    UshortVec bits;
    __builtin_memcpy(&bits, b, sizeof bits);
    return bits;
  }
  // Elements 2 j and 2 j + 1 of the four.
  static INFLIGHT_INLINE ShortVec part(Right b, int j) {
    return j == 0 ? (ShortVec)(b << 8) >> 8 : (ShortVec)b >> 8;
  }
  static INFLIGHT_INLINE ShortVec broadcast(const int16_t* a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return (ShortVec)(pair - IntVec{});
  }
  static INFLIGHT_INLINE Sum fma(Sum sum, ShortVec a, ShortVec b) {
#if defined(__AVX512VNNI__)
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
    return sum + (Sum)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return sum + (Sum)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
  }
};

INFLIGHT_INLINE void store_words(int16_t* to, Vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)x)));
#else
  const __m256i words = _mm256_cvtps_epi32((__m256)x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#endif
}

// Quantize so that to[i] * (the returned scale) is nearest to from[i].  `peak` is the largest magnitude;
// `count` is a multiple of kLanes.
INFLIGHT_INLINE float quantize_words(const float* from, int16_t* to, int count, float peak, float levels) {
  const float inverse = peak < kSmallest ? 0.0f : levels / peak;
  for (int i = 0; i < count; i += kLanes) store_words(to + i, load(from + i) * inverse);
  return peak < kSmallest ? 0.0f : peak / levels;
}

// Quantize a query's row; sums of `size` products with bytes fit into 32 bits.
inline float quantize_query(float* from, int16_t* to, int size) {
  const int count = int(padded(size, kLanes));
  for (int i = size; i < count; ++i) from[i] = 0.0f;
  UintVec peak = {};
  for (int i = 0; i < count; i += kLanes) peak = maximum_bits(peak, load(from + i));
  return quantize_words(from, to, count, reduce_max_bits(peak), size > 512 ? kWordLevels / 2 : kWordLevels);
}
#endif

}  // namespace INFLIGHT_ISA
}  // namespace inflight
