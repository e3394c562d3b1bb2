// The part of an adapter in a product: each row of a block's tile grows by B of the row's own adapter.
//
// An element's sum over the inputs of B is in order, in one accumulator, and then added: a row's result depends neither on
// its neighbours nor on their adapters.  Rows without an adapter are not touched.
#pragma once

#include "cpu_ops.h"
#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {

constexpr int kHalfVectors = kPanel / 2 / kLanes;
constexpr int kExpandRows = 4;  // independent sums, while each waits for its last addition

// bfloat16, one after the other.
struct BfloatLanes : Float32 {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  static constexpr int kLaneBytes = 2;
  static INFLIGHT_INLINE Right right(const char* b) {
    Halves halves;
    __builtin_memcpy(&halves, b, sizeof halves);
    return (Vec)(__builtin_convertvector(halves, UintVec) << 16);
  }
};

// The first kPanel / 2 columns of tile [kRows][kPanel] grow by inner [kRows][depth] x values [depth][kPanel / 2].
template <class Op, int kRows>
void expand_block(const char* values, int64_t depth, const float* const* inner, float* tile) {
  Vec sums[kRows][kHalfVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec b[kHalfVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kHalfVectors; ++n) b[n] = Op::right(values + n * kLanes * Op::kLaneBytes);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Vec left = splat(inner[m][k]);
#pragma GCC unroll 4
      for (int n = 0; n < kHalfVectors; ++n) sums[m][n] = left * b[n] + sums[m][n];
    }
    values += kPanel / 2 * Op::kLaneBytes;
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kHalfVectors; ++n) {
      float* at = tile + m * kPanel + n * kLanes;
      store(at, load(at) + sums[m][n]);
    }
  }
}

template <class Op, int kRows = kExpandRows>
INFLIGHT_INLINE void expand_rows(int rows, const Expand& expand, const HalfPanel& half, const Delta* deltas, float* tile) {
  if (rows == kRows) {
    const float* inner[kRows];
    for (int m = 0; m < kRows; ++m) inner[m] = deltas[m].inner + half.first;
    expand_block<Op, kRows>(expand.values + half.offset * Op::kLaneBytes, half.depth, inner, tile);
  } else if constexpr (kRows > 1) {
    expand_rows<Op, kRows - 1>(rows, expand, half, deltas, tile);
  }
}

// Add the deltas of a block's rows to its tile [rows][kPanel].
inline void add_deltas(const Delta* deltas, int64_t part, int rows, int64_t panel, float* tile) {
  for (int m = 0; m < rows;) {
    const Expand* parts = deltas[m].parts;
    int count = 1;
    while (count < kExpandRows && m + count < rows && deltas[m + count].parts == parts) ++count;
    if (parts != nullptr) {
      const Expand& expand = parts[part];
      for (int side = 0; side < 2; ++side) {
        const HalfPanel& half = expand.halves[2 * panel + side];
        float* at = tile + m * kPanel + side * kPanel / 2;
        if (half.depth == 0) continue;
        switch (expand.dtype) {
          case kFloat32: expand_rows<Float32>(count, expand, half, deltas + m, at); break;
          case kFloat16: expand_rows<Float16>(count, expand, half, deltas + m, at); break;
          default: expand_rows<BfloatLanes>(count, expand, half, deltas + m, at);
        }
      }
    }
    m += count;
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
