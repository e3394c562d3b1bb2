// Product of rows of activations with the packed panels of a linear layer, blocked for registers.
#pragma once

#include "../attention/cpu_simd.h"
#include "cpu_ops.h"

namespace inflight {
namespace INFLIGHT_ISA {

constexpr int kPanelVectors = kPanel / kLanes;
// 24 accumulators of AVX-512's 32 registers, 12 of 16 elsewhere (the portable build: 8).
constexpr int kMaxRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;

// Brings a piece of memory into the second-level cache, a few lines with every step of a block.
struct Prefetch {
  const char* from;
  int64_t step;
};

// tile [kRows][kPanel] = rows a [kRows][steps * kDepth] x one panel.
template <class Op, int kRows>
void multiply_block(const typename Op::Elem* a, int64_t stride, const char* panel, int64_t steps, Prefetch ahead,
                    float* tile) {
  // A pointer for every third row: the others are reached by the addressing modes.
  constexpr int kBases = (kRows + 2) / 3;
  const char* bases[kBases];
  for (int i = 0; i < kBases; ++i) bases[i] = reinterpret_cast<const char*>(a + 3 * i * stride);
  const int64_t pitch = stride * int64_t(sizeof(typename Op::Elem));
  Vec sums[kRows][kPanelVectors] = {};
  for (int64_t step = 0; step < steps; ++step) {
    typename Op::Right b[kPanelVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) b[n] = Op::right(panel + n * kLanes * Op::kLaneBytes);
    __builtin_prefetch(ahead.from, 0, 2);
    __builtin_prefetch(ahead.from + 64, 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const auto* from = reinterpret_cast<const typename Op::Elem*>(bases[m / 3] + (m % 3) * pitch);
      const typename Op::Left left = Op::broadcast(from);
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) sums[m][n] = Op::fma(sums[m][n], left, b[n]);
    }
    panel += kPanel * Op::kLaneBytes;
    ahead.from += ahead.step;
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) {
      bases[i] += Op::kDepth * sizeof(typename Op::Elem);
      asm("" : "+r"(bases[i]));  // else GCC keeps a pointer for each row, and spills them
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) store(tile + m * kPanel + n * kLanes, sums[m][n]);
  }
}

template <class Op, int kRows>
INFLIGHT_INLINE void multiply_rows(int rows, const typename Op::Elem* a, int64_t stride, const char* panel,
                                   int64_t steps, Prefetch ahead, float* tile) {
  if (rows == kRows) {
    multiply_block<Op, kRows>(a, stride, panel, steps, ahead, tile);
  } else if constexpr (kRows > 1) {
    multiply_rows<Op, kRows - 1>(rows, a, stride, panel, steps, ahead, tile);
  }
}

INFLIGHT_INLINE Vec silu(Vec x) {
  Vec power = x * -1.44269504f;
  power = power > 126.0f ? splat(126.0f) : power;
  return x / (exp2<true>(power) + 1.0f);
}

INFLIGHT_INLINE Vec load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load(lanes);
}

INFLIGHT_INLINE void store_some(float* to, Vec x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  float lanes[kLanes];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

#if defined(__AVX512BF16__)
INFLIGHT_INLINE void store_some(uint16_t* to, Vec x, int64_t count) {
  const __mmask16 mask = count >= 16 ? 0xffff : (1u << count) - 1;
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#endif

// Bias, gate and destination of a block's tile.
template <class Elem>
void finish_block(const Linear& linear, const float* tile, int rows, int64_t row, int64_t panel, const Result& result) {
  const int64_t width = linear.panel_results(), first = panel * width, num_results = linear.num_results();
  for (int m = 0; m < rows; ++m) {
    const float* from = tile + m * kPanel;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t column = first + i, count = num_results - column;
      if (count <= 0) break;
      Vec value = load(from + i);
      if (linear.bias != nullptr) value += load_some(linear.bias + column, count);
      if (linear.gated) {
        Vec other = load(from + kPanel / 2 + i);
        if (linear.bias != nullptr) other += load_some(linear.bias + num_results + column, count);
        value = silu(value) * other;
      }
      const int64_t at = (row + m) * result.stride + column;
      float* floats = reinterpret_cast<float*>(result.data) + at;
      switch (result.into) {
        case Into::kActivations: store_some(reinterpret_cast<Elem*>(result.data) + at, value, count); break;
        case Into::kFloats: store_some(floats, value * result.factor, count); break;
        case Into::kResidual: store_some(floats, load_some(floats, count) + value * result.factor, count);
      }
    }
  }
}

template <class Op>
void multiply_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  using Elem = typename Op::Elem;
  alignas(64) float tile[kMaxRows * kPanel];
  const auto* a = reinterpret_cast<const Elem*>(x.data);
  const int64_t steps = linear.in_features / Op::kDepth, bytes = linear.panel_bytes();
  const int64_t blocks = (x.rows + kMaxRows - 1) / kMaxRows;
  for (int64_t panel = first; panel < last; ++panel) {
    const char* data = linear.panels + panel * bytes;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = x.rows * block / blocks;
      const int rows = int(x.rows * (block + 1) / blocks - row);
      // The first blocks of a panel bring the next one.
      Prefetch ahead = {data, 0};
      if (blocks == 1) ahead = {data + bytes, 128};
      else if (block < 2) ahead = {data + bytes + block * bytes / 2, bytes / 2 / steps};
      multiply_rows<Op, kMaxRows>(rows, a + row * x.stride, x.stride, data, steps, ahead, tile);
      finish_block<Elem>(linear, tile, rows, row, panel, result);
    }
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
