// Rows: conversion between dtypes, and placement in a packed group.
#pragma once

#include "cpu_int8.h"

namespace inflight {
namespace INFLIGHT_ISA {

inline void row_to_floats(const char* from, int32_t dtype, float* to, int64_t count) {
  const auto* words = reinterpret_cast<const uint16_t*>(from);
  switch (dtype) {
    case kBfloat16:
      for (int64_t i = 0; i < count; ++i) to[i] = bfloat_to_float(words[i]);
      break;
    case kFloat16:
      for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(words[i]);
      break;
    default: std::memcpy(to, from, count * 4);
  }
}

inline void row_from_floats(const float* from, int32_t dtype, char* to, int64_t count) {
  auto* words = reinterpret_cast<uint16_t*>(to);
  switch (dtype) {
    case kBfloat16:
      for (int64_t i = 0; i < count; ++i) words[i] = float_to_bfloat(from[i]);
      break;
    case kFloat16:
      for (int64_t i = 0; i < count; ++i) words[i] = float_to_half(from[i]);
      break;
    default: std::memcpy(to, from, count * 4);
  }
}

// Store a row of the pool's dtype as token `slot` (0..15) of a packed group of keys.
inline void place_key(char* group, int slot, const char* row, int32_t dtype, int size) {
  if (dtype == kInt8) {
    for (int i = 0; i < size; i += 4) {
      const char word[4] = {row[i], row[i + 2], row[i + 1], row[i + 3]};
      std::memcpy(group + (i / 4 * kGroup + slot) * 4, word, 4);
    }
    return;
  }
  if (dtype == kFloat16) {
    for (int i = 0; i < size; ++i) std::memcpy(group + (i * kGroup + slot) * 2, row + i * 2, 2);
    return;
  }
  const int words = dtype == kBfloat16 ? size / 2 : size;
  for (int i = 0; i < words; ++i) std::memcpy(group + (i * kGroup + slot) * 4, row + i * 4, 4);
}

// The same for values.
inline void place_value(char* group, int slot, const char* row, int32_t dtype, int size) {
  if (dtype == kInt8) {
    constexpr int kPlace[4] = {0, 2, 1, 3};
    char* to = group + slot / 4 * size * 4 + kPlace[slot % 4];
    for (int i = 0; i < size; ++i) to[i * 4] = row[i];
    return;
  }
  if (dtype != kBfloat16) {
    std::memcpy(group + slot * size * element_size(dtype), row, size * element_size(dtype));
    return;
  }
  auto* to = reinterpret_cast<uint16_t*>(group) + (slot / 2) * size * 2 + slot % 2;
  const auto* from = reinterpret_cast<const uint16_t*>(row);
  for (int i = 0; i < size; ++i) to[i * 2] = from[i];
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
