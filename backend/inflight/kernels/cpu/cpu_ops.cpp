// The C ABI of the CPU decoder: packing of weights, single products, and a whole forward pass as one call.
#include "cpu_ops.h"

#include <sys/mman.h>

#include <cstring>
#include <string_view>

#include "cpu_decoder.h"

namespace inflight {

#define INFLIGHT_DECLARE_OPS(isa) \
  namespace isa {                 \
  extern const OpsKernels ops_kernels __attribute__((weak)); \
  }
INFLIGHT_DECLARE_OPS(avx512bf16)
INFLIGHT_DECLARE_OPS(avx512)
INFLIGHT_DECLARE_OPS(avx2)
INFLIGHT_DECLARE_OPS(portable)

// The attention kernels decide which instruction set runs.
const OpsKernels& ops_kernels() {
  const OpsKernels* const all[] = {&avx512bf16::ops_kernels, &avx512::ops_kernels, &avx2::ops_kernels};
  for (const OpsKernels* kernels : all) {
    if (kernels != nullptr && std::string_view(kernels->name) == attention_kernels().name) return *kernels;
  }
  return portable::ops_kernels;
}

namespace {

// Weight row of a panel's column; out_features or more where the panel is padded.
int64_t feature_of(const Linear& linear, int64_t panel, int64_t column) {
  const int64_t width = linear.panel_results(), result = panel * width + column % width;
  return result < linear.num_results() ? column / width * linear.num_results() + result : linear.out_features;
}

// Between plain [out_features, in_features] and the panels first .. last; a word holds what one step multiplies.
template <class Word, bool kUnpack>
void repack(const Linear& linear, char* plain, char* packed, int64_t first, int64_t last) {
  const int64_t words = linear.in_features / linear.depth();
  for (int64_t panel = first; panel < last; ++panel) {
    char* rows[kPanel];  // aligned to an element, which may be less than a word
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t feature = feature_of(linear, panel, column);
      rows[column] = feature < linear.out_features ? plain + feature * words * sizeof(Word) : nullptr;
    }
    Word* at = reinterpret_cast<Word*>(packed) + panel * words * kPanel;
    for (int64_t offset = 0; offset < words * int64_t(sizeof(Word)); offset += sizeof(Word)) {
      for (int64_t column = 0; column < kPanel; ++column, ++at) {
        if (!kUnpack) *at = 0;
        if (rows[column] == nullptr) continue;
        if (kUnpack) std::memcpy(rows[column] + offset, at, sizeof(Word));
        else std::memcpy(at, rows[column] + offset, sizeof(Word));
      }
    }
  }
}

template <bool kUnpack>
void repack(const Linear& linear, char* plain, char* packed, int threads) {
  Team team(threads);
  team.run([&](bool) {
    team.each(linear.num_panels(), [&](int64_t first, int64_t last) {
      if (linear.dtype == kFloat16) repack<uint16_t, kUnpack>(linear, plain, packed, first, last);
      else repack<uint32_t, kUnpack>(linear, plain, packed, first, last);
    });
  });
}

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// Raised whenever a struct or a signature changes; Python refuses another number.
int inflight_ops_abi() { return 2; }

int64_t inflight_ops_packed_bytes(const Linear* linear) { return linear->num_panels() * linear->panel_bytes(); }

// Fill the panels from `weight` [out_features, in_features], contiguous.
void inflight_ops_pack(const Linear* linear, char* weight, int32_t threads) {
  repack<false>(*linear, weight, const_cast<char*>(linear->panels), threads);
}

// The inverse.
void inflight_ops_unpack(const Linear* linear, char* weight, int32_t threads) {
  repack<true>(*linear, weight, const_cast<char*>(linear->panels), threads);
}

// The pages within, whose contents nobody reads again.
void inflight_ops_discard(char* data, int64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

// out [rows, results] = x [rows, in_features] times the weight; both contiguous, of `dtype`.
void inflight_ops_linear(const Linear* linear, const char* x, int64_t rows, int32_t dtype, char* out, int32_t threads) {
  run_linear(*linear, x, rows, dtype, out, threads);
}

// One forward pass.  logits: float32 [num_kept, vocabulary], of the tokens `kept`.
void inflight_ops_forward(const Decoder* decoder, const Batch* batch, const int64_t* input_ids,
                          const int64_t* positions, const int64_t* kept, int64_t num_kept, float* logits,
                          int32_t threads) {
  run_decoder(*decoder, {batch, input_ids, positions, kept, num_kept, logits}, threads);
}

}  // extern "C"
#pragma GCC visibility pop
