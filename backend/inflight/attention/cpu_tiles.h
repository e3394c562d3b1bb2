// The two matrix products of attention, blocked for registers: scores = queries x keys, and
// out = out * rescale + weights x values.  Row blocks have 6, 4, 2 or 1 rows.
#pragma once

#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {

// Vectors side by side in a register block with `rows` rows: 24 accumulators of AVX-512's 32
// registers, 12 of 16 elsewhere; enough of them at few rows to hide the latency of an addition.
constexpr int block_width(int rows) { return kLanes == 16 || rows <= 2 ? 4 : 2; }

INFLIGHT_INLINE int next_row_block(int rows_left) {
  return rows_left >= 5 ? 6 : rows_left >= 3 ? 4 : rows_left;
}

// One step: sums[m][n] += a[m] * b[n].
template <class Op, int kRows, int kWidth>
INFLIGHT_INLINE void multiply_add(Vec (&sums)[kRows][kWidth], const typename Op::Elem* a, int a_stride,
                                  const typename Op::Right (&b)[kWidth]) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    const typename Op::Left left = Op::broadcast(a + m * a_stride);
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) sums[m][n] = Op::fma(sums[m][n], left, b[n]);
  }
}

// queries: a panel [steps][kRows][kDepth]; keys[n]: lane vector n of [steps][16 lanes]; ahead: what
// to fetch meanwhile, laid out alike.  scores: row stride kTile.
template <class Op, int kRows, int kWidth>
inline void score_block(const typename Op::Elem* queries, const char* const* keys, const char* const* ahead, int steps,
                        float* scores) {
  Vec sums[kRows][kWidth] = {};
  for (int64_t step = 0, offset = 0; step < steps; ++step, offset += kGroup * Op::kLaneBytes) {
    typename Op::Right b[kWidth];
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) {
      b[n] = Op::right(keys[n] + offset);
      __builtin_prefetch(ahead[n] + offset, 0, 2);
    }
    multiply_add<Op, kRows, kWidth>(sums, queries + step * kRows * Op::kDepth, Op::kDepth, b);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) store(scores + m * kTile + n * kLanes, sums[m][n]);
  }
}

template <class Op, int kRows>
inline void score_row_block(const typename Op::Elem* queries, const char* const* keys, const char* const* ahead,
                            int vectors, int steps, float* scores) {
  constexpr int kWidth = block_width(kRows);
  int v = 0;
  for (; v + kWidth <= vectors; v += kWidth) {
    score_block<Op, kRows, kWidth>(queries, keys + v, ahead + v, steps, scores + v * kLanes);
  }
  if (kWidth > 2 && v + 2 <= vectors) {
    score_block<Op, kRows, 2>(queries, keys + v, ahead + v, steps, scores + v * kLanes);
    v += 2;
  }
  if (v < vectors) score_block<Op, kRows, 1>(queries, keys + v, ahead + v, steps, scores + v * kLanes);
}

// queries: packed panels of `rows` rows; keys, ahead: `vectors` lane vectors; scores [rows][kTile].
template <class Op>
inline void score_tile(const typename Op::Elem* queries, int rows, const char* const* keys, const char* const* ahead,
                       int vectors, int steps, float* scores) {
  // Four vectors of keys stay in the first-level cache while all rows pass over them.
  for (int v = 0; v < vectors; v += 4) {
    const int count = vectors - v < 4 ? vectors - v : 4;
    const typename Op::Elem* panel = queries;
    for (int m = 0; m < rows;) {
      const int block = next_row_block(rows - m);
      float* to = scores + int64_t(m) * kTile + v * kLanes;
      switch (block) {
        case 6: score_row_block<Op, 6>(panel, keys + v, ahead + v, count, steps, to); break;
        case 4: score_row_block<Op, 4>(panel, keys + v, ahead + v, count, steps, to); break;
        case 2: score_row_block<Op, 2>(panel, keys + v, ahead + v, count, steps, to); break;
        default: score_row_block<Op, 1>(panel, keys + v, ahead + v, count, steps, to);
      }
      panel += int64_t(block) * steps * Op::kDepth;
      m += block;
    }
  }
}

// The part of a tile's values that a product reads: groups [kGroup / kDepth][value_size][kDepth].
struct ValueTile {
  const char* const* groups;
  const char* const* ahead;
  int keys;           // how many of the groups' tokens count; what lies behind is not read as a number
  int64_t row_bytes;  // from one step to the next
};

// weights [kRows][kTile]; out: row stride `out_stride`; rescale [kRows].
template <class Op, int kRows, int kWidth>
inline void value_block(const typename Op::Elem* weights, const ValueTile& tile, int64_t column_bytes,
                        const float* rescale, float* out, int64_t out_stride) {
  constexpr int kSteps = kGroup / Op::kDepth;
  Vec sums[kRows][kWidth];
  typename Op::Right b[kWidth];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) sums[m][n] = load(out + m * out_stride + n * kLanes) * rescale[m];
  }
  for (int first = 0; first < tile.keys; first += kGroup) {
    const char* from = tile.groups[first / kGroup] + column_bytes;
    const char* ahead = tile.ahead[first / kGroup] + column_bytes;
    const int keys = tile.keys - first < kGroup ? tile.keys - first : kGroup;
    const int steps = keys == kGroup ? kSteps : keys / Op::kDepth;
    for (int step = 0; step < steps; ++step, from += tile.row_bytes, ahead += tile.row_bytes) {
#pragma GCC unroll 4
      for (int n = 0; n < kWidth; ++n) {
        b[n] = Op::right(from + n * kLanes * Op::kLaneBytes);
        __builtin_prefetch(ahead + n * kLanes * Op::kLaneBytes, 0, 2);
      }
      multiply_add<Op, kRows, kWidth>(sums, weights + first + step * Op::kDepth, kTile, b);
    }
    if (Op::kDepth == 2 && keys % 2) {
#pragma GCC unroll 4
      for (int n = 0; n < kWidth; ++n) b[n] = Op::first_of_pair(Op::right(from + n * kLanes * Op::kLaneBytes));
      multiply_add<Op, kRows, kWidth>(sums, weights + first + keys - 1, kTile, b);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) store(out + m * out_stride + n * kLanes, sums[m][n]);
  }
}

template <class Op, int kRows>
inline void value_row_block(const typename Op::Elem* weights, const ValueTile& tile, int vectors, const float* rescale,
                            float* out, int64_t out_stride) {
  constexpr int kWidth = block_width(kRows);
  constexpr int64_t kVectorBytes = kLanes * Op::kLaneBytes;
  int v = 0;
  for (; v + kWidth <= vectors; v += kWidth) {
    value_block<Op, kRows, kWidth>(weights, tile, v * kVectorBytes, rescale, out + v * kLanes, out_stride);
  }
  if (kWidth > 2 && v + 2 <= vectors) {
    value_block<Op, kRows, 2>(weights, tile, v * kVectorBytes, rescale, out + v * kLanes, out_stride);
    v += 2;
  }
  if (v < vectors) value_block<Op, kRows, 1>(weights, tile, v * kVectorBytes, rescale, out + v * kLanes, out_stride);
}

// out [rows][out_stride] = out * rescale + weights [rows][kTile] x values, `vectors` vectors wide.
template <class Op>
inline void value_tile(const typename Op::Elem* weights, int rows, const ValueTile& tile, int vectors,
                       const float* rescale, float* out, int64_t out_stride) {
  for (int m = 0; m < rows;) {
    const int block = next_row_block(rows - m);
    const typename Op::Elem* from = weights + int64_t(m) * kTile;
    float* to = out + m * out_stride;
    switch (block) {
      case 6: value_row_block<Op, 6>(from, tile, vectors, rescale + m, to, out_stride); break;
      case 4: value_row_block<Op, 4>(from, tile, vectors, rescale + m, to, out_stride); break;
      case 2: value_row_block<Op, 2>(from, tile, vectors, rescale + m, to, out_stride); break;
      default: value_row_block<Op, 1>(from, tile, vectors, rescale + m, to, out_stride);
    }
    m += block;
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
