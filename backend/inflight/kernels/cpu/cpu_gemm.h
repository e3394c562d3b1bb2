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

// tile [kRows][kPanel] = rows a [kRows][steps * kDepth] x one panel; kAdds: added to what the tile holds.
template <class Op, int kRows, bool kAdds = false>
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
  if constexpr (kAdds) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) sums[m][n] = load(tile + m * kPanel + n * kLanes);
    }
  }
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

template <class Op, int kRows, bool kAdds = false>
INFLIGHT_INLINE void multiply_rows(int rows, const typename Op::Elem* a, int64_t stride, const char* panel,
                                   int64_t steps, Prefetch ahead, float* tile) {
  if (rows == kRows) {
    multiply_block<Op, kRows, kAdds>(a, stride, panel, steps, ahead, tile);
  } else if constexpr (kRows > 1) {
    multiply_rows<Op, kRows - 1, kAdds>(rows, a, stride, panel, steps, ahead, tile);
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

// Blocks that read the next panel: with two of them, products of single floats wait for memory.  Others were not measured.
template <class Op>
constexpr int64_t kBlocksAhead = Op::kDepth == 1 ? 8 : 2;

// The prefetches of block `block` of `blocks`, of which the first `parts` read the `bytes` at `next`.
INFLIGHT_INLINE Prefetch part_ahead(const char* next, int64_t bytes, int64_t steps, int64_t block, int64_t parts) {
  return block < parts ? Prefetch{next + block * bytes / parts, bytes / parts / steps} : Prefetch{next, 0};
}

// The prefetches of a block, one in each of its `steps`.  The first blocks of a panel read the next one.  A single block of
// few rows takes less time than its panel needs to arrive: its prefetches keep close ahead of it.
INFLIGHT_INLINE Prefetch ahead_of(const char* data, int64_t bytes, int64_t steps, int rows, int64_t block, int64_t blocks,
                                   int64_t parts) {
  constexpr int64_t kFastRows = 4;
  const int64_t step = bytes / steps;
  if (blocks == 1) return {data + (rows * kPanel * 4 <= kFastRows * step ? prefetch_distance() : bytes), step};
  return part_ahead(data + bytes, bytes, steps, block, std::min(blocks, parts));
}

// Compute panels first .. last of rows start .. start + rows in blocks of up to kRows rows: `multiply(block, data, ahead)`
// fills the block's tile.
template <int kRows, int64_t kParts = 2, class Function>
INFLIGHT_INLINE void each_block(const Linear& linear, int64_t start, int64_t rows, int64_t first, int64_t last,
                                const Result& result, Function multiply) {
  alignas(64) float tile[kRows * kPanel];
  const int64_t bytes = linear.panel_bytes(), blocks = (rows + kRows - 1) / kRows;
  for (int64_t panel = first; panel < last; ++panel) {
    const char* data = linear.panels + panel * bytes;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t row = rows * i / blocks;
      const Block block = {tile, int(rows * (i + 1) / blocks - row), start + row, panel};
      multiply(block, data, ahead_of(data, bytes, linear.steps(), block.rows, i, blocks, kParts));
      finish_block(linear, block, result);
    }
  }
}

// Rows of single floats stay in the second-level cache while the panels pass by, in chunks of so many bytes.  Pairs were not
// measured.
constexpr int64_t kChunkBytes = 512 << 10;
constexpr int64_t kFewestBlocks = 12;

// Long rows would make chunks of so few blocks that reading the panels again costs more.  They are cut instead: one slice of
// a chunk's rows meets its part of some panels, and the sums wait in tiles for the next slice.
constexpr int64_t kSliceSteps = 768;
constexpr int64_t kSliceRows = 168;    // at most
constexpr int64_t kSlicePanels = 12;   // at most
constexpr int64_t kFewestSliced = 48;  // rows; with fewer, reading the panels takes the time

// Panels first .. last, kSlicePanels at most, of kSliceRows rows at most.  The sums are those of whole rows, to the bit.
template <class Op>
void multiply_slices(const Linear& linear, const Matrix& x, int64_t start, int64_t rows, int64_t first, int64_t last,
                     const Result& result) {
  alignas(64) float tiles[kSlicePanels * kSliceRows * kPanel];
  constexpr int64_t kStepBytes = kPanel * Op::kLaneBytes;
  const auto* a = reinterpret_cast<const typename Op::Elem*>(x.data) + start * x.stride;
  const int64_t steps = linear.steps(), slices = (steps + kSliceSteps - 1) / kSliceSteps;
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t slice = 0; slice < slices; ++slice) {
    const int64_t step = steps * slice / slices, end = steps * (slice + 1) / slices, count = end - step;
    for (int64_t panel = first; panel < last; ++panel) {
      const char* data = linear.panels + panel * linear.panel_bytes() + step * kStepBytes;
      const char* next = panel + 1 < last ? data + linear.panel_bytes()
                                          : linear.panels + first * linear.panel_bytes() + end * kStepBytes;
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t row = rows * i / blocks;
        const Block block = {tiles + ((panel - first) * rows + row) * kPanel, int(rows * (i + 1) / blocks - row),
                             start + row, panel};
        const auto* from = a + row * x.stride + step;
        const Prefetch ahead = part_ahead(next, count * kStepBytes, count, i, std::min(blocks, kBlocksAhead<Op>));
        if (slice == 0) {
          multiply_rows<Op, kMaxRows>(block.rows, from, x.stride, data, count, ahead, block.tile);
        } else {
          multiply_rows<Op, kMaxRows, true>(block.rows, from, x.stride, data, count, ahead, block.tile);
        }
        if (slice == slices - 1) finish_block(linear, block, result);
      }
    }
  }
}

template <class Op>
void multiply_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  const auto* a = reinterpret_cast<const typename Op::Elem*>(x.data);
  const int64_t blocks = kChunkBytes / (x.stride * int64_t(sizeof(typename Op::Elem)) * kMaxRows);
  const bool is_long = blocks < kFewestBlocks, is_one = Op::kDepth > 1 || is_long;
  const bool is_sliced = Op::kDepth == 1 && is_long && x.rows >= kFewestSliced;
  const int64_t whole = std::max(int64_t(1), x.rows);
  const int64_t most = is_sliced ? kSliceRows : is_one ? whole : blocks * kMaxRows, chunks = (x.rows + most - 1) / most;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t start = x.rows * i / chunks, rows = x.rows * (i + 1) / chunks - start;
    if constexpr (Op::kDepth == 1) {
      if (is_sliced) {
        for (int64_t panel = first; panel < last; panel += kSlicePanels) {
          multiply_slices<Op>(linear, x, start, rows, panel, std::min(last, panel + kSlicePanels), result);
        }
        continue;
      }
    }
    each_block<kMaxRows, kBlocksAhead<Op>>(linear, start, rows, first, last, result,
                         [&](const Block& block, const char* data, Prefetch ahead) {
      const auto* from = a + block.row * x.stride;
      multiply_rows<Op, kMaxRows>(block.rows, from, x.stride, data, linear.steps(), ahead, block.tile);
    });
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
