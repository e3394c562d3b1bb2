// The decoder's C ABI: packing weights, single products, and the whole forward pass as one call.
#include "cpu_ops.h"

#include <cstring>

#include "cpu_decoder.h"

namespace inflight {
namespace {

// Convert panels first .. last from or to the plain weight [out_features, in_features].  A word holds the
// elements that one step multiplies.
template <class Word, bool kUnpack>
void repack(const Linear& linear, char* plain, char* packed, int64_t first, int64_t last) {
  const int64_t words = linear.in_features / linear.depth();
  for (int64_t panel = first; panel < last; ++panel) {
    char* rows[kPanel];  // aligned to elements, not to words
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t feature = linear.feature_of(panel, column);
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

// Convert panels first .. last from or to plain codes of four bits; see Codes4 in cpu_codes.h.
template <bool kUnpack>
void repack4(const Linear& linear, const PlainCodes4& plain, uint8_t* packed, int64_t first, int64_t last) {
  const int64_t size = linear.in_features, groups = linear.num_groups(), bytes = linear.panel_bytes() / groups;
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t feature = linear.feature_of(panel, column);
      const bool low = column < kPanel / 2;
      for (int64_t group = 0; group < groups; ++group) {
        uint8_t* header = packed + panel * linear.panel_bytes() + group * bytes;
        if (feature >= linear.out_features) {
          if (!kUnpack) header[column] = header[kPanel + column] = 0;
        } else if (kUnpack) {
          plain.scales[feature * groups + group] = header[column];
          plain.mins[feature * groups + group] = header[kPanel + column];
        } else {
          header[column] = plain.scales[feature * groups + group];
          header[kPanel + column] = plain.mins[feature * groups + group];
        }
        for (int64_t i = 0; i < kFineGroup; ++i) {
          uint8_t& byte = header[2 * kPanel + i / 4 * 2 * kPanel + column % (kPanel / 2) * 4 + i % 4];
          uint8_t* code = plain.codes + feature * size + group * kFineGroup + i;
          if (kUnpack) {
            if (feature < linear.out_features) *code = low ? byte & 15 : byte >> 4;
          } else {
            const int value = feature < linear.out_features ? *code : 0;
            byte = uint8_t(low ? value : byte | value << 4);  // the low halves of a step come first
          }
        }
      }
    }
  }
}

template <bool kUnpack>
void repack4(const Linear& linear, const PlainCodes4& plain, int threads) {
  auto* panels = reinterpret_cast<uint8_t*>(const_cast<char*>(linear.panels));
  Team team(threads);
  team.run([&](bool) {
    team.each(linear.num_panels(),
              [&](int64_t first, int64_t last) { repack4<kUnpack>(linear, plain, panels, first, last); });
  });
}

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

int64_t inflight_ops_packed_bytes(const Linear* linear) { return linear->num_panels() * linear->panel_bytes(); }

// Fill the panels from `weight` [out_features, in_features], contiguous.
void inflight_ops_pack(const Linear* linear, char* weight, int32_t threads) {
  repack<false>(*linear, weight, const_cast<char*>(linear->panels), threads);
}

// The inverse of inflight_ops_pack.
void inflight_ops_unpack(const Linear* linear, char* weight, int32_t threads) {
  repack<true>(*linear, weight, const_cast<char*>(linear->panels), threads);
}

// The same for codes of four bits.
void inflight_ops_pack4(const Linear* linear, const PlainCodes4* plain, int32_t threads) {
  repack4<false>(*linear, *plain, threads);
}

void inflight_ops_unpack4(const Linear* linear, const PlainCodes4* plain, int32_t threads) {
  repack4<true>(*linear, *plain, threads);
}

// Choose codes of four bits for `weights` [features, size] of `dtype`; size is a multiple of the group.  `scales` and
// `mins`, [features], are the units of the bytes in `out`.  importance: see OpsKernels.
void inflight_ops_choose_codes(const char* weights, int32_t dtype, int64_t features, int64_t size,
                               const float* importance, const PlainCodes4* out, float* scales, float* mins,
                               int32_t threads) {
  Team team(threads);
  const OpsKernels& kernels = ops_kernels();
  team.run([&](bool) {
    thread_local Buffer buffer;
    auto* floats = reinterpret_cast<float*>(buffer.get(size * sizeof(float)));
    const int64_t groups = size / kFineGroup;
    team.each(features, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        kernels.to_floats(weights + i * size * element_size(dtype), dtype, 1.0f, floats, size);
        const PlainCodes4 to = {out->codes + i * size, out->scales + i * groups, out->mins + i * groups};
        kernels.choose_codes(floats, importance, size, to, scales + i, mins + i);
      }
    });
  });
}

// out [rows, results] = x [rows, in_features] times the weight; both contiguous, of `dtype`.
void inflight_ops_linear(const Linear* linear, const char* x, int64_t rows, int32_t dtype, char* out, int32_t threads) {
  run_linear(*linear, x, rows, dtype, out, threads);
}

// One forward pass.  logits: float32 [num_logits, vocabulary], of the tokens `logits_indices`.  adapters: see Tokens.
void inflight_ops_forward(const Decoder* decoder, const Batch* batch, const int64_t* input_ids,
                          const int64_t* positions, const int64_t* logits_indices, int64_t num_logits, float* logits,
                          const int64_t* hidden_indices, int64_t num_hidden, float* hidden,
                          const Adapter* const* adapters, int64_t inner, int32_t threads) {
  const Tokens tokens = {batch,  input_ids,      positions,  logits_indices, num_logits, logits,
                         hidden_indices, num_hidden, hidden, adapters, inner};
  run_decoder(*decoder, tokens, threads);
}

}  // extern "C"
#pragma GCC visibility pop
