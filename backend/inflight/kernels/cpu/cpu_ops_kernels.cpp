// The decoder's arithmetic.  Compiled once per instruction set; see cpu_attention_kernels.cpp.
#include <cmath>

#include "cpu_choose_codes.h"
#include "cpu_codes.h"
#include "cpu_layout.h"
#include "cpu_stored_codes.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

int32_t activation_dtype(int32_t weight_dtype) {
#if defined(__AVX512BF16__)
  if (weight_dtype == kBfloat16) return kBfloat16;
#endif
  (void)weight_dtype;
  return kFloat32;
}

void multiply(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result) {
  switch (linear.dtype) {
    case kFloat32: return multiply_panels<Float32>(linear, x, first, last, result);
    case kFloat16: return multiply_panels<Float16>(linear, x, first, last, result);
    case kCodes8:
      return linear.input_group == kInputGroup ? multiply_code_panels<Codes8<kInputGroup>>(linear, x, first, last, result)
                                               : multiply_code_panels<Codes8<kFineGroup>>(linear, x, first, last, result);
    case kCodes4: return multiply_code_panels<Codes4>(linear, x, first, last, result);
    case kStoredCodes: return multiply_stored_panels(linear, x, first, last, result);
    default:
#if defined(__AVX512BF16__)
      return multiply_panels<Bfloat16Dot>(linear, x, first, last, result);
#else
      return multiply_panels<Bfloat16>(linear, x, first, last, result);
#endif
  }
}

INFLIGHT_INLINE Vec load_row(const float* from, int64_t count) { return load_some(from, count); }

#if defined(__AVX512BF16__)
INFLIGHT_INLINE Vec load_row(const uint16_t* from, int64_t count) {
  const __mmask16 mask = count >= kLanes ? 0xffff : (1u << count) - 1;
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16);
}
#endif

INFLIGHT_INLINE void store_bytes(int8_t* to, UintVec x, int64_t count) {
#if defined(__AVX512F__)
  if (count >= kLanes) {
    return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
  }
#endif
  for (int64_t i = 0; i < kLanes && i < count; ++i) to[i] = int8_t(x[i]);
}

INFLIGHT_INLINE uint32_t reduce_sum(UintVec x) {
#if defined(__AVX512F__)
  return uint32_t(_mm512_reduce_add_epi32((__m512i)x));
#else
  uint32_t result = x[0];
  for (int i = 1; i < kLanes; ++i) result += x[i];
  return result;
#endif
}

// Quantize a group of `count` inputs, which is kGroup but at the end of a row.  A group with an element that is not finite
// gets the scale NaN, and so do all results of its row.
template <int kGroup, class Elem>
INFLIGHT_INLINE void quantize_group(const Elem* from, int64_t count, int8_t* to, GroupSums* group) {
  constexpr int kVectors = kGroup / kLanes;
  constexpr float kTiny = 1e-30f;  // smaller numbers are zero: their scale's inverse could overflow
  Vec x[kVectors];
  UintVec peaks = {};
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    x[i] = i * kLanes < count ? load_row(from + i * kLanes, count - i * kLanes) : Vec{};
    peaks = maximum_bits(peaks, x[i]);
  }
  const float peak = reduce_max_bits(peaks);
  const Vec inverse = splat(peak > kTiny && peak < INFINITY ? 127.0f / peak : 0.0f);
  UintVec sums = {};
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    if (i * kLanes >= count) break;
    const UintVec shifted = (UintVec)(x[i] * inverse + 12582912.0f);  // its low bits are the number rounded to an integer
    store_bytes(to + i * kLanes, shifted, count - i * kLanes);
    sums += shifted - 0x4b400000u;
  }
  const uint32_t sum = reduce_sum(sums);
  group->scale = peak < INFINITY ? peak / 127.0f : NAN;
  group->shift = group->scale * float(int32_t(sum));
  group->start = int32_t(-128u * sum);
}

// The elements order[0], order[1] and so on, until the next call.
template <class Elem>
const Elem* in_order(const Elem* from, int64_t size, const int32_t* order) {
  thread_local std::vector<Elem> elements;
  elements.resize(size);
  for (int64_t i = 0; i < size; ++i) elements[i] = from[order[i]];
  return elements.data();
}

template <int kGroup, class Elem>
void quantize_rows(const Elem* x, int64_t rows, int64_t size, const Quantized& out) {
  for (int64_t row = 0; row < rows; ++row) {
    const Elem* from = x + row * size;
    if (out.order != nullptr) from = in_order(from, size, out.order);
    int8_t* to = out.bytes + row * size;
    GroupSums* group = out.groups + row;
    int64_t i = 0;
    for (; i + kGroup <= size; i += kGroup, group += out.pitch) quantize_group<kGroup>(from + i, kGroup, to + i, group);
    if (i < size) quantize_group<kGroup>(from + i, size - i, to + i, group);
  }
}

template <class Elem>
void quantize_rows(const Elem* x, int64_t rows, int64_t size, const Quantized& out) {
  if (out.group == kInputGroup) quantize_rows<kInputGroup>(x, rows, size, out);
  else if (out.group == kFineGroup) quantize_rows<kFineGroup>(x, rows, size, out);
  else quantize_rows<kFinestGroup>(x, rows, size, out);
}

void quantize(const char* x, int32_t dtype, int64_t rows, int64_t size, const Quantized& out) {
#if defined(__AVX512BF16__)
  if (dtype == kBfloat16) return quantize_rows(reinterpret_cast<const uint16_t*>(x), rows, size, out);
#endif
  (void)dtype;
  quantize_rows(reinterpret_cast<const float*>(x), rows, size, out);
}

// Summed in a fixed order: per lane, then across lanes.
float sum_of_squares(const float* x, int64_t size) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    for (int n = 0; n < 4; ++n) {
      const Vec value = load(x + i + n * kLanes);
      sums[n] += value * value;
    }
  }
  for (; i < size; i += kLanes) {
    const Vec value = load_some(x + i, size - i);
    sums[0] += value * value;
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class Elem>
void norm_rows(const float* x, int64_t rows, int64_t size, const float* weight, float eps, Elem* out) {
  for (int64_t row = 0; row < rows; ++row, x += size, out += size) {
    const Vec scale = splat(1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps));
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t count = size - i;
      store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
    }
  }
}

void norm(const float* x, int64_t rows, int64_t size, const float* weight, float eps, char* out, int32_t dtype) {
#if defined(__AVX512BF16__)
  if (dtype == kBfloat16) return norm_rows(x, rows, size, weight, eps, reinterpret_cast<uint16_t*>(out));
#endif
  (void)dtype;
  norm_rows(x, rows, size, weight, eps, reinterpret_cast<float*>(out));
}

// Summed like sum_of_squares: a row's result depends on nothing but the row.
void layer_norm(float* x, int64_t rows, int64_t size, const float* weight, const float* shift, float eps) {
  for (int64_t row = 0; row < rows; ++row, x += size) {
    Vec sum = {};
    for (int64_t i = 0; i < size; i += kLanes) sum += load_some(x + i, size - i);
    const Vec mean = splat(reduce_add(sum) / float(size));
    for (int64_t i = 0; i < size; i += kLanes) store_some(x + i, load_some(x + i, size - i) - mean, size - i);
    const Vec scale = splat(1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps));
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t count = size - i;
      store_some(x + i, load_some(x + i, count) * scale * load_some(weight + i, count) + load_some(shift + i, count),
                 count);
    }
  }
}

void rotate(float* x, int half, Angles angles) {
  for (int i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Vec a = load_some(x + i, count), b = load_some(x + half + i, count);
    const Vec cos = load_some(angles.cos + i, count), sin = load_some(angles.sin + i, count);
    store_some(x + i, a * cos - b * sin, count);
    store_some(x + half + i, b * cos + a * sin, count);
  }
}

void place(const Decoder& decoder, const DecoderLayer& layer, Angles angles, char* row, int32_t dtype) {
  constexpr int kMaxSize = 1024;
  alignas(64) float floats[kMaxSize];
  const Layer& attention = *layer.attention;
  const int size = attention.key_size, half = decoder.rotary_size / 2;
  for (int head = 0; head < attention.num_heads + attention.num_kv_heads; ++head, row += size * element_size(dtype)) {
    const float* weight = head < attention.num_heads ? layer.query_norm : layer.key_norm;
    if (weight == nullptr && !layer.rotary) continue;
    float* x = dtype == kFloat32 ? reinterpret_cast<float*>(row) : floats;
    if (x == floats) row_to_floats(row, dtype, x, size);
    if (weight != nullptr) norm_rows(x, 1, size, weight, decoder.eps, x);
    if (layer.rotary) rotate(x, half, angles);
    if (x == floats) row_from_floats(x, dtype, row, size);
  }
}

void to_floats(const char* from, int32_t dtype, float factor, float* to, int64_t count) {
  row_to_floats(from, dtype, to, count);
  if (factor != 1.0f) {
    for (int64_t i = 0; i < count; ++i) to[i] *= factor;
  }
}

void from_floats(const float* from, int32_t dtype, char* to, int64_t count) { row_from_floats(from, dtype, to, count); }

}  // namespace

#define INFLIGHT_STRING_(x) #x
#define INFLIGHT_STRING(x) INFLIGHT_STRING_(x)
extern const OpsKernels ops_kernels;
const OpsKernels ops_kernels = {
    INFLIGHT_STRING(INFLIGHT_ISA), activation_dtype, multiply, quantize, choose_codes, norm, layer_norm, place, to_floats,
    from_floats};

}  // namespace INFLIGHT_ISA
}  // namespace inflight
