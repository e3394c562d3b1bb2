// Packing an adapter, as cpu_lora.h reads it, from the matrices of its file: on one thread, beside forward passes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_ops.h"

extern "C" void inflight_ops_pack(const inflight::Linear* linear, char* weight, int32_t threads);

namespace inflight {

// The matrices of one linear layer, contiguous, of float types: a [rank, in_features], b [features, rank].
struct StoredPair {
  const char* a;
  const char* b;
  int64_t start;  // the layer's first feature among those of its projection
  int64_t features;
  int32_t rank;
  int32_t a_dtype;
  int32_t b_dtype;
  float scale;  // of b
};

namespace {

constexpr int64_t kHalf = kPanel / 2;

template <class Word>
bool is_finite(const Word* words, int64_t count, Word exponent) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= (words[i] & exponent) != exponent;
  return finite;
}

// Numbers of one float type, times `factor`, in another one.  Returns: whether all results are finite.
bool convert(const char* from, int32_t from_dtype, float factor, int64_t count, int32_t dtype, char* to) {
  constexpr int64_t kPiece = 1024;
  float floats[kPiece];
  bool finite = true;
  const OpsKernels& kernels = ops_kernels();
  for (int64_t at = 0; at < count; at += kPiece) {
    const int64_t size = std::min(kPiece, count - at);
    char* out = to + at * element_size(dtype);
    kernels.to_floats(from + at * element_size(from_dtype), from_dtype, factor, floats, size);
    kernels.from_floats(floats, dtype, out, size);
    finite &= dtype == kFloat32 ? is_finite(reinterpret_cast<const uint32_t*>(out), size, 0x7f800000u)
                                : is_finite(reinterpret_cast<const uint16_t*>(out), size,
                                            uint16_t(dtype == kBfloat16 ? 0x7f80 : 0x7c00));
  }
  return finite;
}

// The share of a feature of a Linear in B: `rank` numbers from input `first` on.
struct Column {
  int64_t pair = -1;  // none
  int64_t row = 0;    // of the pair's b
  int64_t first = 0;
  int64_t rank = 0;
};

// start: first feature of the Linear among those of its projection.
Column column_of(const Linear& linear, int64_t start, const StoredPair* pairs, int64_t count, int64_t panel, int64_t n) {
  const int64_t feature = linear.feature_of(panel, n);
  Column column;
  if (feature >= linear.out_features) return column;
  int64_t first = 0;
  for (int64_t i = 0; i < count; first += pairs[i++].rank) {
    const int64_t row = start + feature - pairs[i].start;
    if (row >= 0 && row < pairs[i].features) return {i, row, first, pairs[i].rank};
  }
  return column;
}

// b: of each pair, in the type of the values.
template <class Word>
void fill(const Linear& linear, int64_t start, const StoredPair* pairs, int64_t count, const std::vector<char>* b,
          const Expand& expand, char* values) {
  for (int64_t panel = 0; panel < linear.num_panels(); ++panel) {
    for (int64_t half = 0; half < 2; ++half) {
      const HalfPanel& place = expand.halves[panel * 2 + half];
      Word* block = reinterpret_cast<Word*>(values) + place.offset;
      std::memset(block, 0, sizeof(Word) * kHalf * place.depth);
      for (int64_t n = 0; n < kHalf && place.depth > 0; ++n) {
        const Column column = column_of(linear, start, pairs, count, panel, half * kHalf + n);
        if (column.pair < 0) continue;
        const Word* row = reinterpret_cast<const Word*>(b[column.pair].data()) + column.row * column.rank;
        Word* to = block + (column.first - place.first) * kHalf + n;
        for (int64_t k = 0; k < column.rank; ++k) to[k * kHalf] = row[k];
      }
    }
  }
}

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// Fill the panels of A of the pairs, one below the other.
// Returns: 0; or 1 + the index of a pair whose a has numbers that are not finite in the panels' type.
int64_t inflight_lora_shrink(const Linear* shrink, const StoredPair* pairs, int64_t count) {
  const int64_t row = shrink->in_features * element_size(shrink->dtype);
  std::vector<char> rows(shrink->out_features * row);
  char* at = rows.data();
  for (int64_t i = 0; i < count; at += pairs[i++].rank * row) {
    if (!convert(pairs[i].a, pairs[i].a_dtype, 1.0f, pairs[i].rank * shrink->in_features, shrink->dtype, at)) return i + 1;
  }
  inflight_ops_pack(shrink, rows.data(), 1);
  return 0;
}

// Describe the half panels [panels][2] of B for one Linear of the projection, whose features begin at `start`.
// Returns: how many numbers they have.
int64_t inflight_lora_halves(const Linear* linear, int64_t start, const StoredPair* pairs, int64_t count,
                             HalfPanel* halves) {
  int64_t offset = 0;
  for (int64_t index = 0; index < linear->num_panels() * 2; ++index) {
    int64_t first = INT32_MAX, end = 0;
    for (int64_t n = 0; n < kHalf; ++n) {
      const Column column = column_of(*linear, start, pairs, count, index / 2, index % 2 * kHalf + n);
      if (column.pair < 0) continue;
      first = std::min(first, column.first);
      end = std::max(end, column.first + column.rank);
    }
    halves[index] = {offset, int32_t(end > 0 ? first : 0), int32_t(end > 0 ? end - first : 0)};
    offset += halves[index].depth * kHalf;
  }
  return offset;
}

// Fill the values of those half panels.
// Returns: 0; or 1 + the index of a pair whose scaled b has numbers that are not finite in the values' type.
int64_t inflight_lora_expand(const Linear* linear, int64_t start, const StoredPair* pairs, int64_t count,
                             const Expand* expand) {
  std::vector<std::vector<char>> b(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = pairs[i].features * pairs[i].rank;
    b[i].resize(size * element_size(expand->dtype));
    if (!convert(pairs[i].b, pairs[i].b_dtype, pairs[i].scale, size, expand->dtype, b[i].data())) return i + 1;
  }
  char* values = const_cast<char*>(expand->values);
  if (expand->dtype == kFloat32) fill<uint32_t>(*linear, start, pairs, count, b.data(), *expand, values);
  else fill<uint16_t>(*linear, start, pairs, count, b.data(), *expand, values);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
