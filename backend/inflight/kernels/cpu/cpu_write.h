// Writes of keys and values to the pool.
#pragma once

#include "cpu_layout.h"

namespace inflight {
namespace INFLIGHT_ISA {

// One row of `rows`, converted to the pool's dtype, and its scale if that dtype has scales.  `floats` and
// `words` are buffers of `size` elements each.
inline const char* row_as(const Rows& rows, int64_t token, int32_t head, int32_t dtype, int64_t size, float* floats,
                          char* words, uint16_t* scale) {
  const char* from = rows.data + (token * rows.token_stride + head * rows.head_stride) * element_size(rows.dtype);
  if (rows.dtype == dtype) return from;
  row_to_floats(from, rows.dtype, floats, size);
  if (dtype == kInt8) {
    *scale = quantize_row(floats, reinterpret_cast<int8_t*>(words), size);
  } else {
    row_from_floats(floats, dtype, words, size);
  }
  return words;
}

// Write tokens begin .. end of the batch, heads first_head .. last_head, to their slots.
inline void write(const Layer& layer, const Batch& batch, const Rows& key, const Rows& value, int64_t begin,
                  int64_t end, int32_t first_head, int32_t last_head) {
  constexpr int kMaxSize = 1024;
  float floats[kMaxSize];
  char words[kMaxSize * 4];
  uint16_t scale = 0;
  for (int32_t head = first_head; head < last_head; ++head) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = batch.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t at = slot % layer.panel_slots();
      char* panel = layer.panel(slot, head);
      const char* row = row_as(key, token, head, layer.dtype, layer.key_size, floats, words, &scale);
      if (layer.packed()) {
        place_key(layer.keys_of(panel), int(at), row, layer.dtype, layer.key_size);
      } else {
        std::memcpy(layer.keys_of(panel), row, layer.key_bytes());
      }
      if (layer.dtype == kInt8) std::memcpy(panel + at * 2, &scale, 2);
      row = row_as(value, token, head, layer.dtype, layer.value_size, floats, words, &scale);
      if (layer.packed()) {
        place_value(layer.values_of(panel), int(at), row, layer.dtype, layer.value_size);
      } else {
        std::memcpy(layer.values_of(panel), row, layer.value_bytes());
      }
      if (layer.dtype == kInt8) std::memcpy(panel + (layer.panel_slots() + at) * 2, &scale, 2);
    }
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
