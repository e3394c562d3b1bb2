// Product of rows of quantized inputs and the codes of a checkpoint, kept as they are (see StoredCodes in cpu_ops.h).
#pragma once

#include "cpu_codes.h"

namespace inflight {
namespace INFLIGHT_ISA {

// Codes of a block of kBlockInputs inputs, four of each feature at a time.
template <int kBits>
struct CodeBlock;

// As Codes4.
template <>
struct CodeBlock<4> {
  static constexpr int kStepBytes = kPanel * 2;
  static constexpr int kBytes = 4 * kStepBytes;
  static INFLIGHT_INLINE void read(const char* from, int step, IntVec* codes) {
    Codes4::read(from + step * kStepBytes, codes);
  }
  // What the sum number n starts with, so that `finish` makes `sum` of it.
  static INFLIGHT_INLINE int32_t start(int32_t sum, int n) { return n < kPanelVectors / 2 ? 17 * sum : 16 * sum; }
  static INFLIGHT_INLINE void finish(IntVec* sums) { Codes4::finish(sums); }
};

template <>
struct CodeBlock<8> {
  static constexpr int kStepBytes = kPanel * 4;
  static constexpr int kBytes = 4 * kStepBytes;
  static INFLIGHT_INLINE void read(const char* from, int step, IntVec* codes) {
    Codes8<kFineGroup>::read(from + step * kStepBytes, codes);
  }
  static INFLIGHT_INLINE int32_t start(int32_t sum, int) { return sum; }
  static INFLIGHT_INLINE void finish(IntVec*) {}
};

// The lower four bits as Codes4.  Behind them the upper two of all steps, those of the first one lowest.
template <>
struct CodeBlock<6> {
  static constexpr int kStepBytes = kPanel * 2;
  static constexpr int kBytes = 4 * kStepBytes + kPanel * 4;
  static INFLIGHT_INLINE void read(const char* from, int step, IntVec* codes) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors / 2; ++n) {
      const IntVec pairs = load_bits(from + step * kStepBytes + n * kLanes * 4);
      codes[n] = pairs & 0x0f0f0f0f;
      codes[kPanelVectors / 2 + n] = (pairs >> 4) & 0x0f0f0f0f;
    }
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) {
      const UintVec upper = (UintVec)load_bits(from + 4 * kStepBytes + n * kLanes * 4);
      const UintVec shifted = step < 2 ? upper << (4 - 2 * step) : upper >> (2 * step - 4);
      codes[n] |= (IntVec)(shifted & 0x30303030u);
    }
  }
  static INFLIGHT_INLINE int32_t start(int32_t sum, int) { return sum; }
  static INFLIGHT_INLINE void finish(IntVec*) {}
};

INFLIGHT_INLINE Vec load_bfloats(const char* from) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
#else
  uint16_t words[kLanes];
  float floats[kLanes];
  __builtin_memcpy(words, from, sizeof words);
  for (int i = 0; i < kLanes; ++i) floats[i] = bfloat_to_float(words[i]);
  return load(floats);
#endif
}

INFLIGHT_INLINE Vec load_signed(const char* from) {
  const Vec bytes = load_unsigned(from);
  return bytes > 127.0f ? bytes - 256.0f : bytes;
}

// Scales and minimums of the group at hand, as numbers.
struct GroupHeader {
  const StoredCodes& stored;
  Vec scales[kPanelVectors] = {};
  Vec minimums[kPanelVectors] = {};
  Vec units[kPanelVectors];
  Vec minimum_units[kPanelVectors];

  // Returns: what follows.
  INFLIGHT_INLINE const char* read_span(const char* from) {
    if (!stored.has_units()) return from;
    for (int n = 0; n < kPanelVectors; ++n) units[n] = Float16::right(from + n * kLanes * 2);
    from += kPanel * 2;
    if (stored.minimum != StoredCodes::kByteOfMinimum) return from;
    for (int n = 0; n < kPanelVectors; ++n) minimum_units[n] = Float16::right(from + n * kLanes * 2);
    return from + kPanel * 2;
  }

  INFLIGHT_INLINE const char* read_group(const char* from) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) scales[n] = scale(from, n);
    from += kPanel * stored.scale_size();
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) minimums[n] = minimum(from, n);
    return from + kPanel * stored.minimum_size();
  }

  INFLIGHT_INLINE Vec scale(const char* from, int n) const {
    switch (stored.scale) {
      case StoredCodes::kHalf: return Float16::right(from + n * kLanes * 2);
      case StoredCodes::kBfloat: return load_bfloats(from + n * kLanes * 2);
      case StoredCodes::kFloat: return load(reinterpret_cast<const float*>(from) + n * kLanes);
      case StoredCodes::kUnsignedByte: return load_unsigned(from + n * kLanes) * units[n];
      default: return load_signed(from + n * kLanes) * units[n];
    }
  }

  INFLIGHT_INLINE Vec minimum(const char* from, int n) const {
    switch (stored.minimum) {
      case StoredCodes::kZero: return load_signed(from + n * kLanes) * scales[n];
      case StoredCodes::kHalfMinimum: return Float16::right(from + n * kLanes * 2);
      case StoredCodes::kByteOfMinimum: return load_unsigned(from + n * kLanes) * minimum_units[n];
      default: return Vec{};
    }
  }
};

template <int kBits, int kRows>
INFLIGHT_INLINE void add_block(Cursor<kRows>& at, IntVec (&sums)[kRows][kPanelVectors]) {
  using Block = CodeBlock<kBits>;
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
    IntVec codes[kPanelVectors];
    Block::read(at.panel, step, codes);
    __builtin_prefetch(at.ahead.from, 0, 2);
    if (kBits > 4) __builtin_prefetch(at.ahead.from + 64, 0, 2);
    at.ahead.from += at.ahead.step;
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Dot::Left left = Dot::left(at.bases[m / 3] + (m % 3) * at.stride + 4 * step);
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) {
        sums[m][n] = Dot::add(sums[m][n], left, codes[n]);
        stay_in_a_register(sums[m][n]);
      }
    }
  }
  at.panel += Block::kBytes;
#pragma GCC unroll 8
  for (int i = 0; i < at.kBases; ++i) {
    at.bases[i] += StoredCodes::kBlockInputs;
    asm("" : "+r"(at.bases[i]));
  }
}

// tile [kRows][kPanel] = rows of quantized inputs x one panel.
template <int kBits, int kRows>
void multiply_stored(const Linear& linear, const Matrix& x, int64_t row, const char* panel, Prefetch ahead, float* tile) {
  Cursor<kRows> at = {{}, x.stride, panel, ahead};
  for (int i = 0; i < at.kBases; ++i) at.bases[i] = reinterpret_cast<const int8_t*>(x.data) + (row + 3 * i) * x.stride;
  const GroupSums* groups = x.groups + row;
  const int32_t zero = linear.stored.zero;
  const int64_t in_group = linear.stored.group / linear.input_group;
  const int64_t in_span = linear.stored.span / linear.input_group;
  const int64_t blocks = linear.input_group / StoredCodes::kBlockInputs;
  int64_t of_group = 0, of_span = 0;  // groups of inputs that are left
  GroupHeader header = {linear.stored};
  Vec results[kRows][kPanelVectors] = {};
  for (int64_t left = linear.in_features / linear.input_group; left > 0; --left, groups += x.rows) {
    if (of_span == 0) {
      at.panel = header.read_span(at.panel);
      of_span = in_span;
    }
    if (of_group == 0) {
      at.panel = header.read_group(at.panel);
      of_group = in_group;
    }
    --of_span;
    --of_group;
    IntVec sums[kRows][kPanelVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) sums[m][n] = splat_bits(CodeBlock<kBits>::start((groups[m].start >> 7) * zero, n));
    }
    for (int64_t i = 0; i < blocks; ++i) add_block<kBits, kRows>(at, sums);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      CodeBlock<kBits>::finish(sums[m]);
#pragma GCC unroll 8
      for (int n = 0; n < kPanelVectors; ++n) {
        const Vec scaled = __builtin_convertvector(sums[m][n], Vec) * groups[m].scale;
        results[m][n] = scaled * header.scales[n] + results[m][n];
        results[m][n] = results[m][n] - header.minimums[n] * groups[m].shift;
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kPanelVectors; ++n) store(tile + m * kPanel + n * kLanes, results[m][n]);
  }
}

template <int kBits, int kRows>
INFLIGHT_INLINE void multiply_stored_of(int rows, const Linear& linear, const Matrix& x, int64_t row, const char* panel,
                                        Prefetch ahead, float* tile) {
  if (rows == kRows) {
    multiply_stored<kBits, kRows>(linear, x, row, panel, ahead, tile);
  } else if constexpr (kRows > 1) {
    multiply_stored_of<kBits, kRows - 1>(rows, linear, x, row, panel, ahead, tile);
  }
}

template <int kBits>
void multiply_stored_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  each_block<kMaxCodeRows>(linear, 0, x.rows, first, last, result, [&](const Block& block, const char* data, Prefetch ahead) {
    multiply_stored_of<kBits, kMaxCodeRows>(block.rows, linear, x, block.row, data, ahead, block.tile);
  });
}

inline void multiply_stored_panels(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  switch (linear.stored.bits) {
    case 4: return multiply_stored_panels<4>(linear, x, first, last, result);
    case 6: return multiply_stored_panels<6>(linear, x, first, last, result);
    default: return multiply_stored_panels<8>(linear, x, first, last, result);
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
