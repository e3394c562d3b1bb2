// The two matrix products of attention, blocked for registers: scores = queries x keys, and
// out = out * rescale + weights x values.  Row blocks have 6, 4, 2 or 1 rows.
#pragma once

#include "cpu_int8.h"

namespace inflight {
namespace INFLIGHT_ISA {

constexpr int kTileGroups = kTile / kGroup;
constexpr int kMaxWidth = 8;

// Width, in vectors, of a register block with `rows` rows: up to 24 accumulators out of AVX-512's 32
// registers, 12 out of 16 otherwise.  With few rows many groups of keys are read concurrently, which is
// faster than one after the other.
constexpr int block_width(int rows) {
  if (kLanes < 16) return rows <= 2 ? 4 : 2;
  return rows <= 2 ? kMaxWidth : rows <= 4 ? 6 : 4;
}

INFLIGHT_INLINE int next_row_block(int rows_left) {
  return rows_left >= 5 ? 6 : rows_left >= 3 ? 4 : rows_left;
}

// A tile's groups are read in turn, line by line.  The lines that follow in memory are read next from
// that group: its values, then the next head's panel.
constexpr int kAhead = 2048;
constexpr int kNear = 128;  // into the first-level cache
// Lines of the values to prefetch, per group and row, during the softmax, when memory would otherwise be idle.
constexpr int kLinesPerRow = 4;
constexpr int kFewRows = 8;  // with more, memory is not the bottleneck

INFLIGHT_INLINE void prefetch(const char* from) { __builtin_prefetch(from, 0, 2); }  // into the second-level cache

template <class Op>
INFLIGHT_INLINE typename Op::Right read(const char* from) {
  prefetch(from + kAhead);
  __builtin_prefetch(from + kNear, 0, 3);
  return Op::right(from);
}

INFLIGHT_INLINE Vec to_floats(Vec sum) { return sum; }
INFLIGHT_INLINE Vec to_floats(IntVec sum) { return __builtin_convertvector(sum, Vec); }

// One step: sums[m][n] += a[m] * b[n].
template <class Op, int kRows, int kWidth>
INFLIGHT_INLINE void multiply_add(typename Op::Sum (&sums)[kRows][kWidth], const typename Op::Elem* a, int a_stride,
                                  const typename Op::Right (&b)[kWidth]) {
  if constexpr (Op::kParts == 1) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const auto left = Op::broadcast(a + m * a_stride);
#pragma GCC unroll 8
      for (int n = 0; n < kWidth; ++n) sums[m][n] = Op::fma(sums[m][n], left, b[n]);
    }
  } else {
    // Column by column: an unpacked column takes few registers.
#pragma GCC unroll 32
    for (int i = 0; i < kWidth * Op::kParts; ++i) {
      const int n = i / Op::kParts, j = i % Op::kParts;
      const auto right = Op::part(b[n], j);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        sums[m][n] = Op::fma(sums[m][n], Op::broadcast(a + m * a_stride + j * (Op::kDepth / Op::kParts)), right);
      }
    }
  }
}

// queries: packed [steps][kRows][kDepth]; keys[n] + offset: lane vector n of [steps][16 lanes]; scores:
// row stride kTile.
template <class Op, int kRows, int kWidth>
inline void score_block(const typename Op::Elem* queries, const char* const* keys, int64_t offset,
                        int steps, float* scores) {
  typename Op::Sum sums[kRows][kWidth] = {};
  for (int64_t step = 0; step < steps; ++step, offset += kGroup * Op::kLaneBytes) {
    typename Op::Right b[kWidth];
#pragma GCC unroll 8
    for (int n = 0; n < kWidth; ++n) b[n] = read<Op>(keys[n] + offset);
    multiply_add<Op, kRows, kWidth>(sums, queries + step * kRows * Op::kDepth, Op::kDepth, b);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kWidth; ++n) store(scores + m * kTile + n * kLanes, to_floats(sums[m][n]));
  }
}

template <class Op, int kRows>
inline void score_row_block(const typename Op::Elem* queries, const char* const* keys, int64_t offset,
                            int vectors, int steps, float* scores) {
  constexpr int kWidth = block_width(kRows);
  int v = 0;
  for (; v + kWidth <= vectors; v += kWidth) {
    score_block<Op, kRows, kWidth>(queries, keys + v, offset, steps, scores + v * kLanes);
  }
  if (kWidth > 4 && v + 4 <= vectors) {
    score_block<Op, kRows, 4>(queries, keys + v, offset, steps, scores + v * kLanes);
    v += 4;
  }
  if (kWidth > 2 && v + 2 <= vectors) {
    score_block<Op, kRows, 2>(queries, keys + v, offset, steps, scores + v * kLanes);
    v += 2;
  }
  if (v < vectors) score_block<Op, kRows, 1>(queries, keys + v, offset, steps, scores + v * kLanes);
}

// queries: packed row blocks, `rows` in all; keys + offset: `vectors` lane vectors; scores [rows][kTile].
template <class Op>
inline void score_tile(const typename Op::Elem* queries, int rows, const char* const* keys, int64_t offset, int vectors,
                       int steps, float* scores) {
  // The vectors of keys of the widest block stay in the first-level cache.
  const int width = kLanes == 16 ? block_width(rows) : 4;
  for (int v = 0; v < vectors; v += width) {
    const int count = vectors - v < width ? vectors - v : width;
    const typename Op::Elem* from = queries;
    for (int m = 0; m < rows;) {
      const int block = next_row_block(rows - m);
      float* to = scores + int64_t(m) * kTile + v * kLanes;
      switch (block) {
        case 6: score_row_block<Op, 6>(from, keys + v, offset, count, steps, to); break;
        case 4: score_row_block<Op, 4>(from, keys + v, offset, count, steps, to); break;
        case 2: score_row_block<Op, 2>(from, keys + v, offset, count, steps, to); break;
        default: score_row_block<Op, 1>(from, keys + v, offset, count, steps, to);
      }
      from += int64_t(block) * steps * Op::kDepth;
      m += block;
    }
  }
}

// The values that a product reads: groups [kGroup / kDepth][value_size][kDepth].
struct ValueTile {
  const char* const* groups;
  int64_t offset;     // added to each
  int keys;           // tokens to read; the rest of the last group may be uninitialised and must not be
                      // read as floats (bytes are always valid: all of the groups' tokens)
  int64_t row_bytes;  // between steps
};

// How a product joins the previous sums: out = out * rescale + product * scale.
struct Scaling {
  const float* rescale;  // [rows]
  const float* scale;    // [rows]; used with integer weights only

  Scaling from(int row) const { return {rescale + row, scale + row}; }
};

// weights [kRows][kTile]; out: row stride `out_stride`.  The groups take turns, step by step, which makes
// better use of memory; the order of summation is the same for every tile.
template <class Op, int kRows, int kWidth>
inline void value_block(const typename Op::Elem* weights, const ValueTile& tile, int64_t column_bytes,
                        const Scaling& scaling, float* out, int64_t out_stride) {
  typename Op::Sum sums[kRows][kWidth] = {};
  typename Op::Right b[kWidth];
  if constexpr (!Op::kQuantized) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kWidth; ++n) sums[m][n] = load(out + m * out_stride + n * kLanes) * scaling.rescale[m];
    }
  }
  const int groups = (tile.keys + kGroup - 1) / kGroup, rest = tile.keys - (groups - 1) * kGroup;
  const int last_steps = rest / Op::kDepth;  // complete steps in the last group
  int64_t offset = tile.offset + column_bytes;
  for (int step = 0; step < kGroup / Op::kDepth; ++step, offset += tile.row_bytes) {
    const int count = step < last_steps ? groups : groups - 1;
    for (int g = 0; g < count; ++g) {
      const char* from = tile.groups[g] + offset;
      asm("" : "+r"(from));  // one register for all vectors; otherwise GCC keeps one per vector, and spills
#pragma GCC unroll 8
      for (int n = 0; n < kWidth; ++n) b[n] = read<Op>(from + n * kLanes * Op::kLaneBytes);
      multiply_add<Op, kRows, kWidth>(sums, weights + g * kGroup + step * Op::kDepth, kTile, b);
    }
    if constexpr (Op::kDepth == 2) {
      if (rest % 2 == 0 || step != last_steps) continue;
      const char* from = tile.groups[count] + offset;
#pragma GCC unroll 8
      for (int n = 0; n < kWidth; ++n) b[n] = Op::first_of_pair(Op::right(from + n * kLanes * Op::kLaneBytes));
      multiply_add<Op, kRows, kWidth>(sums, weights + count * kGroup + step * Op::kDepth, kTile, b);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kWidth; ++n) {
      float* to = out + m * out_stride + n * kLanes;
      if constexpr (Op::kQuantized) {
        store(to, load(to) * scaling.rescale[m] + to_floats(sums[m][n]) * scaling.scale[m]);
      } else {
        store(to, sums[m][n]);
      }
    }
  }
}

template <class Op, int kRows>
inline void value_row_block(const typename Op::Elem* weights, const ValueTile& tile, int vectors,
                            const Scaling& scaling, float* out, int64_t out_stride) {
  constexpr int kWidth = block_width(kRows);
  constexpr int64_t kVectorBytes = kLanes * Op::kLaneBytes;
  int v = 0;
  for (; v + kWidth <= vectors; v += kWidth) {
    value_block<Op, kRows, kWidth>(weights, tile, v * kVectorBytes, scaling, out + v * kLanes, out_stride);
  }
  if (kWidth > 4 && v + 4 <= vectors) {
    value_block<Op, kRows, 4>(weights, tile, v * kVectorBytes, scaling, out + v * kLanes, out_stride);
    v += 4;
  }
  if (kWidth > 2 && v + 2 <= vectors) {
    value_block<Op, kRows, 2>(weights, tile, v * kVectorBytes, scaling, out + v * kLanes, out_stride);
    v += 2;
  }
  if (v < vectors) value_block<Op, kRows, 1>(weights, tile, v * kVectorBytes, scaling, out + v * kLanes, out_stride);
}

// out [rows][out_stride] = out * rescale + weights [rows][kTile] x values * scale, for `vectors` vectors.
template <class Op>
inline void value_tile(const typename Op::Elem* weights, int rows, const ValueTile& tile, int vectors,
                       const Scaling& scaling, float* out, int64_t out_stride) {
  for (int m = 0; m < rows;) {
    const int block = next_row_block(rows - m);
    const typename Op::Elem* from = weights + int64_t(m) * kTile;
    float* to = out + m * out_stride;
    switch (block) {
      case 6: value_row_block<Op, 6>(from, tile, vectors, scaling.from(m), to, out_stride); break;
      case 4: value_row_block<Op, 4>(from, tile, vectors, scaling.from(m), to, out_stride); break;
      case 2: value_row_block<Op, 2>(from, tile, vectors, scaling.from(m), to, out_stride); break;
      default: value_row_block<Op, 1>(from, tile, vectors, scaling.from(m), to, out_stride);
    }
    m += block;
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
