// Panels of a checkpoint's codes; see StoredCodes in cpu_ops.h and CodeBlock in cpu_stored_codes.h.
#include <cstring>

#include "cpu_ops.h"
#include "cpu_work.h"

namespace inflight {
namespace {

// One code of a block: in a byte, or four bits of a byte and two of another.
template <int kBits>
struct Place {
  uint8_t* lower;
  uint8_t* upper;  // of six bits
  int shift, upper_shift;

  Place(uint8_t* block, int64_t column, int64_t input) {
    const int64_t step = input / 4, element = input % 4;
    if (kBits == 8) {
      lower = block + (step * kPanel + column) * 4 + element;
      return;
    }
    lower = block + step * kPanel * 2 + column % (kPanel / 2) * 4 + element;
    shift = column < kPanel / 2 ? 0 : 4;
    upper = block + 4 * kPanel * 2 + column * 4 + element;
    upper_shift = int(2 * step);
  }

  // The block was all zeros.
  void set(uint8_t code) const {
    *lower |= kBits == 8 ? code : uint8_t((code & 15) << shift);
    if (kBits == 6) *upper |= uint8_t((code >> 4) << upper_shift);
  }

  uint8_t get() const {
    if (kBits == 8) return *lower;
    return uint8_t((*lower >> shift & 15) | (kBits == 6 ? (*upper >> upper_shift & 3) << 4 : 0));
  }
};

// Convert one panel from or to plain codes.
template <bool kUnpack>
class Repack {
 public:
  Repack(const Linear& linear, const PlainStored& plain, int64_t panel)
      : linear_(linear), stored_(linear.stored), plain_(plain), panel_(panel) {
    at_ = reinterpret_cast<uint8_t*>(const_cast<char*>(linear.panels)) + panel * linear.panel_bytes();
  }

  void run() {
    if (!kUnpack) std::memset(at_, 0, linear_.panel_bytes());
    const int64_t spans = linear_.in_features / stored_.span, in_span = stored_.span / stored_.group;
    for (int64_t span = 0; span < spans; ++span) {
      if (stored_.has_units()) numbers(plain_.units, 2, spans, span);
      if (stored_.minimum == StoredCodes::kByteOfMinimum) numbers(plain_.minimum_units, 2, spans, span);
      for (int64_t group = span * in_span; group < (span + 1) * in_span; ++group) {
        numbers(plain_.scales, stored_.scale_size(), spans * in_span, group);
        if (stored_.minimum_size() > 0) numbers(plain_.minimums, stored_.minimum_size(), spans * in_span, group);
        switch (stored_.bits) {
          case 4: codes<4>(group); break;
          case 6: codes<6>(group); break;
          default: codes<8>(group);
        }
      }
    }
  }

 private:
  // Number `index` of the `count` that each feature has.
  void numbers(char* plain, int64_t size, int64_t count, int64_t index) {
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t feature = linear_.feature_of(panel_, column);
      if (feature >= linear_.out_features) continue;
      char* number = plain + (feature * count + index) * size;
      if (kUnpack) std::memcpy(number, at_ + column * size, size);
      else std::memcpy(at_ + column * size, number, size);
    }
    at_ += kPanel * size;
  }

  template <int kBits>
  void codes(int64_t group) {
    constexpr int64_t kInputs = StoredCodes::kBlockInputs;
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t feature = linear_.feature_of(panel_, column);
      if (feature >= linear_.out_features) continue;
      uint8_t* code = plain_.codes + feature * linear_.in_features + group * stored_.group;
      uint8_t* block = at_;
      for (int64_t i = 0; i < stored_.group; i += kInputs, block += stored_.block_bytes()) {
        for (int64_t input = 0; input < kInputs; ++input, ++code) {
          const Place<kBits> place(block, column, input);
          if (kUnpack) *code = place.get();
          else place.set(*code);
        }
      }
    }
    at_ += stored_.group / kInputs * stored_.block_bytes();
  }

  const Linear& linear_;
  const StoredCodes& stored_;
  const PlainStored& plain_;
  int64_t panel_;
  uint8_t* at_;
};

template <bool kUnpack>
void repack(const Linear& linear, const PlainStored& plain, int threads) {
  Team team(threads);
  team.run([&](bool) {
    team.each(linear.num_panels(), [&](int64_t first, int64_t last) {
      for (int64_t panel = first; panel < last; ++panel) Repack<kUnpack>(linear, plain, panel).run();
    });
  });
}

// out [size] = (codes - zero) * scale - minimum
void dequantize_group(const uint8_t* codes, int64_t size, float zero, float scale, float minimum, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = (float(codes[i]) - zero) * scale - minimum;
}

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// Fill the panels of stored codes.
void inflight_ops_pack_stored(const Linear* linear, const PlainStored* plain, int32_t threads) {
  repack<false>(*linear, *plain, threads);
}

// The inverse.
void inflight_ops_unpack_stored(const Linear* linear, const PlainStored* plain, int32_t threads) {
  repack<true>(*linear, *plain, threads);
}

// Numbers of plain codes, in `groups` of `size`; zeros, scales and minimums [groups], the last perhaps null.
void inflight_ops_dequantize(const uint8_t* codes, int64_t groups, int64_t size, const float* zeros, const float* scales,
                             const float* minimums, float* out, int32_t threads) {
  Team team(threads);
  team.run([&](bool) {
    team.each(groups, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float minimum = minimums == nullptr ? 0.0f : minimums[i];
        dequantize_group(codes + i * size, size, zeros[i], scales[i], minimum, out + i * size);
      }
    });
  });
}

}  // extern "C"
#pragma GCC visibility pop
