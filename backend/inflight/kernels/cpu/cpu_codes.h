// Product of rows of quantized inputs and the panels of a linear layer whose weights are codes.
//
// Within a group of inputs, products of bytes and codes are summed as integers, exactly.  At its end the sums become
// numbers and are added to the results, group after group: in the same order for any number of rows.
#pragma once

#include <algorithm>

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

// kLanes bytes as floats.  (GCC converts a vector of bytes one element at a time.)
INFLIGHT_INLINE Vec load_unsigned(const char* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
  Vec result;
  for (int i = 0; i < kLanes; ++i) result[i] = float(uint8_t(from[i]));
  return result;
#endif
}

// A panel's part of the scales that features have for all groups.
struct PanelScales {
  alignas(64) float scales[kPanel];
  alignas(64) float mins[kPanel];
};

// Formats.  A panel is a sequence of groups, each a header and steps.
//   kGroup        inputs in a group
//   kHeaderBytes  what the constructor reads
//   kStepBytes    what `read` turns into codes, four inputs of each feature
//   kWhole        all groups have kGroup inputs; otherwise the last can be shorter
//   kBiased       codes are integers plus 128, whose contribution a row's sums start with
//   finish        turns a row's sums of what `read` returns into those of codes
//   add           a vector of a row's sums, times the row's scale, to its results; `shift` is the sum of the row's inputs

// Eight bits.  The features' scales are applied in the end.
template <int kInputs>
struct Codes8 {
  static constexpr int kGroup = kInputs;
  static constexpr int kHeaderBytes = 0;
  static constexpr int kStepBytes = kPanel * 4;
  static constexpr bool kWhole = false;
  static constexpr bool kBiased = true;
  INFLIGHT_INLINE Codes8(const char*, const PanelScales&) {}
  static INFLIGHT_INLINE void read(const char* from, IntVec* codes) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) codes[n] = load_bits(from + n * kLanes * 4);
  }
  static INFLIGHT_INLINE void finish(IntVec*) {}
  INFLIGHT_INLINE Vec add(Vec result, IntVec sums, int, float scale, float) const {
    return __builtin_convertvector(sums, Vec) * scale + result;
  }
};

// Four bits.  Byte i of a step: input i % 4 of the features i / 4 (low half) and kPanel / 2 + i / 4 (high half).  The
// header: for each feature a byte times its scale, then a byte times its minimum, which is subtracted.
struct Codes4 {
  static constexpr int kGroup = kFineGroup;
  static constexpr int kHeaderBytes = 2 * kPanel;
  static constexpr int kStepBytes = kPanel * 2;
  static constexpr bool kWhole = true;
  static constexpr bool kBiased = false;
  INFLIGHT_INLINE Codes4(const char* header, const PanelScales& panel) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) {
      scales[n] = load_unsigned(header + n * kLanes) * load(panel.scales + n * kLanes);
      mins[n] = load_unsigned(header + kPanel + n * kLanes) * load(panel.mins + n * kLanes);
    }
  }
  // As they lie there: `low + 16 * high`, and `16 * high`, which takes one operation less than `low` and `high` do twice.
  static INFLIGHT_INLINE void read(const char* from, IntVec* codes) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors / 2; ++n) {
      codes[n] = load_bits(from + n * kLanes * 4);
      codes[kPanelVectors / 2 + n] = codes[n] & int32_t(0xf0f0f0f0);
    }
  }
  static INFLIGHT_INLINE void finish(IntVec* sums) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors / 2; ++n) {
      IntVec& high = sums[kPanelVectors / 2 + n];
      sums[n] -= high;
      high >>= 4;
    }
  }
  INFLIGHT_INLINE Vec add(Vec result, IntVec sums, int n, float scale, float shift) const {
    result = (__builtin_convertvector(sums, Vec) * scale) * scales[n] + result;
    return result - mins[n] * shift;
  }
  Vec scales[kPanelVectors], mins[kPanelVectors];
};

// Sums and results take twelve registers each; AVX2 and the portable build: six and eight.
constexpr int kMaxCodeRows = kLanes == 16 ? 6 : 1;

// Keeps GCC from copying all sums in every step.
INFLIGHT_INLINE void stay_in_a_register(IntVec& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX2__)
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

// A place in rows, a panel and what is prefetched.
template <int kRows>
struct Cursor {
  static constexpr int kBases = (kRows + 2) / 3;  // see multiply_block
  const int8_t* bases[kBases];
  int64_t stride;
  const char* panel;
  Prefetch ahead;
};

template <class Codes, int kRows>
INFLIGHT_INLINE void add_steps(int64_t count, Cursor<kRows>& at, IntVec (&sums)[kRows][kPanelVectors]) {
  for (int64_t step = 0; step < count; ++step) {
    IntVec codes[kPanelVectors];
    Codes::read(at.panel, codes);
    __builtin_prefetch(at.ahead.from, 0, 2);
    if (Codes::kStepBytes > 64) __builtin_prefetch(at.ahead.from + 64, 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Dot::Left left = Dot::left(at.bases[m / 3] + (m % 3) * at.stride);
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) {
        sums[m][n] = Dot::add(sums[m][n], left, codes[n]);
        stay_in_a_register(sums[m][n]);
      }
    }
    at.panel += Codes::kStepBytes;
    at.ahead.from += at.ahead.step;
#pragma GCC unroll 8
    for (int i = 0; i < at.kBases; ++i) {
      at.bases[i] += 4;
      asm("" : "+r"(at.bases[i]));
    }
  }
}

// tile [kRows][kPanel] = rows of quantized inputs x one panel.
template <class Codes, int kRows>
void multiply_codes(const Linear& linear, const Matrix& x, int64_t row, const char* panel, const PanelScales& panel_scales,
                    Prefetch ahead, float* tile) {
  constexpr int64_t kSteps = Codes::kGroup / 4;
  Cursor<kRows> at = {{}, x.stride, panel, ahead};
  for (int i = 0; i < at.kBases; ++i) at.bases[i] = reinterpret_cast<const int8_t*>(x.data) + (row + 3 * i) * x.stride;
  const GroupSums* groups = x.groups + row;
  Vec results[kRows][kPanelVectors] = {};
  for (int64_t steps = linear.steps(); steps > 0; steps -= kSteps, groups += x.rows) {
    const Codes format(at.panel, panel_scales);
    at.panel += Codes::kHeaderBytes;
    IntVec sums[kRows][kPanelVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) sums[m][n] = splat_bits(Codes::kBiased ? groups[m].start : 0);
    }
    if (Codes::kWhole || steps >= kSteps) {
      add_steps<Codes, kRows>(kSteps, at, sums);
    } else {
      add_steps<Codes, kRows>(steps, at, sums);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      Codes::finish(sums[m]);
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) {
        results[m][n] = format.add(results[m][n], sums[m][n], n, groups[m].scale, groups[m].shift);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) store(tile + m * kPanel + n * kLanes, results[m][n]);
  }
}

template <class Codes, int kRows>
INFLIGHT_INLINE void multiply_codes_of(int rows, const Linear& linear, const Matrix& x, int64_t row, const char* panel,
                                       const PanelScales& panel_scales, Prefetch ahead, float* tile) {
  if (rows == kRows) {
    multiply_codes<Codes, kRows>(linear, x, row, panel, panel_scales, ahead, tile);
  } else if constexpr (kRows > 1) {
    multiply_codes_of<Codes, kRows - 1>(rows, linear, x, row, panel, panel_scales, ahead, tile);
  }
}

// The features of a panel's columns; zeros in its padding.
inline void take_panel(const Linear& linear, const float* of_features, int64_t panel, float* to) {
  const int64_t width = linear.panel_results(), results = linear.num_results(), first = panel * width;
  const int64_t count = std::min(width, results - first);
  for (int64_t column = 0; column < kPanel; column += width, of_features += results) {
    std::fill(std::copy_n(of_features + first, count, to + column), to + column + width, 0.0f);
  }
}

template <class Codes>
void multiply_code_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  PanelScales scales;
  int64_t panel = -1;
  each_block<kMaxCodeRows>(linear, 0, x.rows, first, last, result, [&](const Block& block, const char* data, Prefetch ahead) {
    if (block.panel != panel) {
      panel = block.panel;
      take_panel(linear, linear.scales, panel, scales.scales);
      if (Codes::kHeaderBytes > 0) take_panel(linear, linear.mins, panel, scales.mins);
    }
    multiply_codes_of<Codes, kMaxCodeRows>(block.rows, linear, x, block.row, data, scales, ahead, block.tile);
    if (Codes::kHeaderBytes > 0) return;
    for (int m = 0; m < block.rows; ++m) {
      for (int i = 0; i < kPanel; i += kLanes) {
        float* at = block.tile + m * kPanel + i;
        store(at, load(at) * load(scales.scales + i));
      }
    }
  });
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
