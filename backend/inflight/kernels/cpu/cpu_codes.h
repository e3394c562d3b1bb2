// Product of rows of quantized inputs and the panels of a linear layer whose weights are codes.
//
// Within a group of inputs, products of bytes and codes are summed as integers, exactly.  At its end the sums become
// numbers and are added to the results, group after group: in the same order for any number of rows.
#pragma once

#include "cpu_gemm.h"

namespace inflight {
namespace INFLIGHT_ISA {

INFLIGHT_INLINE IntVec splat_bits(int32_t x) { return x - IntVec{}; }

INFLIGHT_INLINE IntVec load_bits(const char* from) {
  IntVec result;
  __builtin_memcpy(&result, from, sizeof result);
  return result;
}

// Adds the products of four bytes of a row, broadcast to all lanes, and four codes in each lane.
struct Dot {
#if defined(__AVX512VNNI__)
  using Left = IntVec;
  static INFLIGHT_INLINE Left left(const int8_t* a) {
    int32_t four;
    __builtin_memcpy(&four, a, 4);
    return splat_bits(four);
  }
  static INFLIGHT_INLINE IntVec add(IntVec sum, Left a, IntVec codes) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)a);
  }
#else
  // Words, since a sum of two products of a byte and a code may need more than 16 bits.
  struct Left {
    IntVec even, odd;
  };
  static INFLIGHT_INLINE IntVec words(int8_t low, int8_t high) {
    return splat_bits(int32_t(uint32_t(uint16_t(low)) | uint32_t(uint16_t(high)) << 16));
  }
  static INFLIGHT_INLINE Left left(const int8_t* a) { return {words(a[0], a[2]), words(a[1], a[3])}; }
  static INFLIGHT_INLINE IntVec products(IntVec a, IntVec b) {
#if defined(__AVX512BW__)
    return (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return ((a << 16) >> 16) * (b & 0xffff) + (a >> 16) * (b >> 16);
#endif
  }
  static INFLIGHT_INLINE IntVec add(IntVec sum, Left a, IntVec codes) {
    const IntVec odd = (IntVec)((UintVec)codes >> 8) & 0x00ff00ff;
    return sum + products(a.even, codes & 0x00ff00ff) + products(a.odd, odd);
  }
#endif
};

// How one step of a panel holds the codes of its features.
struct Bytes {
  static constexpr int kStepBytes = kPanel * 4;
  static INFLIGHT_INLINE void read(const char* from, IntVec* codes) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) codes[n] = load_bits(from + n * kLanes * 4);
  }
};

// tile [kRows][kPanel] = rows of quantized inputs x one panel, without the features' scales.
template <class Codes, int kRows>
void multiply_codes(const Linear& linear, const Matrix& x, int64_t row, const char* panel, Prefetch ahead, float* tile) {
  constexpr int kBases = (kRows + 2) / 3;  // see multiply_block
  const auto* a = reinterpret_cast<const int8_t*>(x.data) + row * x.stride;
  const int8_t* bases[kBases];
  for (int i = 0; i < kBases; ++i) bases[i] = a + 3 * i * x.stride;
  const float* scales = x.scales + row;
  const int32_t* starts = x.starts + row;
  for (int i = 0; i < kRows * kPanel; i += kLanes) store(tile + i, Vec{});
  constexpr int64_t kSteps = kInputGroup / 4;
  for (int64_t steps = linear.steps(); steps > 0; steps -= kSteps) {
    IntVec sums[kRows][kPanelVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) sums[m][n] = splat_bits(starts[m]);
    }
    const int64_t count = steps < kSteps ? steps : kSteps;
    for (int64_t step = 0; step < count; ++step) {
      IntVec codes[kPanelVectors];
      Codes::read(panel, codes);
      __builtin_prefetch(ahead.from, 0, 2);
      if (Codes::kStepBytes > 64) __builtin_prefetch(ahead.from + 64, 0, 2);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Dot::Left left = Dot::left(bases[m / 3] + (m % 3) * x.stride);
#pragma GCC unroll 8
        for (int n = 0; n < kPanelVectors; ++n) sums[m][n] = Dot::add(sums[m][n], left, codes[n]);
      }
      panel += Codes::kStepBytes;
      ahead.from += ahead.step;
#pragma GCC unroll 8
      for (int i = 0; i < kBases; ++i) {
        bases[i] += 4;
        asm("" : "+r"(bases[i]));
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) {
        float* at = tile + m * kPanel + n * kLanes;
        store(at, __builtin_convertvector(sums[m][n], Vec) * scales[m] + load(at));
      }
    }
    scales += x.rows;
    starts += x.rows;
  }
}

template <class Codes, int kRows>
INFLIGHT_INLINE void multiply_codes_of(int rows, const Linear& linear, const Matrix& x, int64_t row, const char* panel,
                                       Prefetch ahead, float* tile) {
  if (rows == kRows) {
    multiply_codes<Codes, kRows>(linear, x, row, panel, ahead, tile);
  } else if constexpr (kRows > 1) {
    multiply_codes_of<Codes, kRows - 1>(rows, linear, x, row, panel, ahead, tile);
  }
}

// Multiply a block's sums by the scales of its features.
inline void scale_block(const Linear& linear, const Block& block) {
  const int64_t width = linear.panel_results();
  for (int half = 0; half < kPanel / width; ++half) {
    const int64_t first = block.panel * width;
    const float* scales = linear.scales + half * linear.num_results() + first;
    for (int64_t i = 0; i < width && first + i < linear.num_results(); i += kLanes) {
      const Vec scale = load_some(scales + i, linear.num_results() - first - i);
      for (int m = 0; m < block.rows; ++m) {
        float* at = block.tile + m * kPanel + half * width + i;
        store(at, load(at) * scale);
      }
    }
  }
}

template <class Codes>
void multiply_code_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  each_block(linear, x.rows, first, last, result, [&](const Block& block, const char* data, Prefetch ahead) {
    multiply_codes_of<Codes, kMaxRows>(block.rows, linear, x, block.row, data, ahead, block.tile);
    scale_block(linear, block);
  });
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
