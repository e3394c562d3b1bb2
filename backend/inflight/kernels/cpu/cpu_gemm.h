// Product of rows of activations and the packed panels of a linear layer, blocked for registers.
#pragma once

#include <algorithm>

#include "cpu_expand.h"
#include "cpu_gelu.h"
#include "cpu_ops.h"
#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {

constexpr int kPanelVectors = kPanel / kLanes;
// 24 accumulators out of AVX-512's 32 registers, 12 out of 16 otherwise (portable build: 8).
constexpr int kMaxRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;

// Prefetches a range of memory into the second-level cache, a few lines with every step of a block.
struct Prefetch {
  const char* from;
  int64_t step;
};

// tile [kRows][kPanel] = rows a [kRows][steps * kDepth] x one panel.
template <class Op, int kRows>
void multiply_block(const typename Op::Elem* a, int64_t stride, const char* panel, int64_t steps, Prefetch ahead,
                    float* tile) {
  // One pointer per three rows: addressing modes reach the others.
  constexpr int kBases = (kRows + 2) / 3;
  const char* bases[kBases];
#pragma GCC unroll 8
  for (int i = 0; i < kBases; ++i) {
    bases[i] = reinterpret_cast<const char*>(a + 3 * i * stride);
    asm("" : "+r"(bases[i]));  // otherwise GCC computes them as a vector, and keeps that in memory
  }
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
      asm("" : "+r"(bases[i]));  // otherwise GCC keeps a pointer per row, and spills them
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
  const auto words = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  if (count >= kLanes) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
  const __mmask16 mask = (1u << count) - 1;
  _mm256_mask_storeu_epi16(to, mask, words);
}
#endif

// A block of rows times one panel, and its first row.
struct Block {
  float* tile;
  int rows;
  int64_t row;
  int64_t panel;
};

INFLIGHT_INLINE void store_activations(char* to, int32_t dtype, int64_t at, Vec x, int64_t count) {
#if defined(__AVX512BF16__)
  if (dtype == kBfloat16) return store_some(reinterpret_cast<uint16_t*>(to) + at, x, count);
#endif
  (void)dtype;
  store_some(reinterpret_cast<float*>(to) + at, x, count);
}

// Apply adapters, bias and gate to a block's tile and store the result.
inline void finish_block(const Linear& linear, const Block& block, const Result& result) {
  if (result.deltas != nullptr) add_deltas(result.deltas + block.row, result.part, block.rows, block.panel, block.tile);
  const int64_t width = linear.panel_results(), first = block.panel * width, num_results = linear.num_results();
  for (int m = 0; m < block.rows; ++m) {
    const float* from = block.tile + m * kPanel;
    for (int64_t i = 0; i < width && first + i < num_results; i += kLanes) {
      const int64_t column = first + i, count = num_results - column;
      Vec value = load(from + i);
      if (linear.bias != nullptr) value += load_some(linear.bias + column, count);
      if (linear.gated) {
        Vec other = load(from + kPanel / 2 + i);
        if (linear.bias != nullptr) other += load_some(linear.bias + num_results + column, count);
        value = silu(value) * other;
      }
      const int64_t at = (block.row + m) * result.stride + column;
      float* floats = reinterpret_cast<float*>(result.data) + at;
      switch (result.into) {
        case Into::kActivations: store_activations(result.data, result.dtype, at, value, count); break;
        case Into::kGelu: store_activations(result.data, result.dtype, at, gelu(value), count); break;
        case Into::kFloats: store_some(floats, value * result.factor, count); break;
        case Into::kResidual: store_some(floats, load_some(floats, count) + value * result.factor, count);
      }
    }
  }
}

// The prefetches of a block, one in each of its `steps`.  The first blocks of a panel read the next one.  A single block of
// few rows takes less time than its panel needs to arrive: its prefetches keep close ahead of it.
INFLIGHT_INLINE Prefetch ahead_of(const char* data, int64_t bytes, int64_t steps, int rows, int64_t block, int64_t blocks) {
  constexpr int64_t kFastRows = 4;
  const int64_t step = bytes / steps;
  if (blocks == 1) return {data + (rows * kPanel * 4 <= kFastRows * step ? prefetch_distance() : bytes), step};
  if (block < 2) return {data + bytes + block * bytes / 2, bytes / 2 / steps};
  return {data, 0};
}

// Compute panels first .. last of rows start .. start + rows in blocks of up to kRows rows: `multiply(block, data, ahead)`
// fills the block's tile.
template <int kRows, class Function>
INFLIGHT_INLINE void each_block(const Linear& linear, int64_t start, int64_t rows, int64_t first, int64_t last,
                                const Result& result, Function multiply) {
  alignas(64) float tile[kRows * kPanel];
  const int64_t bytes = linear.panel_bytes(), blocks = (rows + kRows - 1) / kRows;
  for (int64_t panel = first; panel < last; ++panel) {
    const char* data = linear.panels + panel * bytes;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t row = rows * i / blocks;
      const Block block = {tile, int(rows * (i + 1) / blocks - row), start + row, panel};
      multiply(block, data, ahead_of(data, bytes, linear.steps(), block.rows, i, blocks));
      finish_block(linear, block, result);
    }
  }
}

// Rows of single floats stay in the second-level cache while the panels pass by, in chunks of so many bytes.  Long rows
// make chunks of so few blocks that reading the panels again costs more: they are one chunk.  Pairs were not measured.
constexpr int64_t kChunkBytes = 512 << 10;
constexpr int64_t kFewestBlocks = 12;

template <class Op>
void multiply_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  const auto* a = reinterpret_cast<const typename Op::Elem*>(x.data);
  const int64_t blocks = kChunkBytes / (x.stride * int64_t(sizeof(typename Op::Elem)) * kMaxRows);
  const bool is_one = Op::kDepth > 1 || blocks < kFewestBlocks;
  const int64_t most = is_one ? std::max(int64_t(1), x.rows) : blocks * kMaxRows, chunks = (x.rows + most - 1) / most;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t start = x.rows * i / chunks, rows = x.rows * (i + 1) / chunks - start;
    each_block<kMaxRows>(linear, start, rows, first, last, result,
                         [&](const Block& block, const char* data, Prefetch ahead) {
      const auto* from = a + block.row * x.stride;
      multiply_rows<Op, kMaxRows>(block.rows, from, x.stride, data, linear.steps(), ahead, block.tile);
    });
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
