// Weights in codes of four bits, chosen to lose as little as possible.
#pragma once

#include <cmath>
#include <vector>

#include "cpu_ops.h"
#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {

constexpr int kCodeVectors = kFineGroup / kLanes;
constexpr float kLargestCode = 15.0f;
constexpr float kLargestByte = 255.0f;
// Of the largest importance in a group, that each weight has at least.  With less, the one or two weights that count would
// leave the fit of two numbers to rounding, and the errors of the others without a limit.
constexpr float kLeastImportance = 1e-3f;
// Of its first product: below, the codes are too alike to fit two numbers.  Sums are off by a few 1e-7.
constexpr double kLeastDeterminant = 1e-5;

// A group of weights is about code * scale - minimum.
struct CodeRange {
  float scale;
  float minimum;
};

// Sums over a group, each element times its importance: of codes, their squares, and their products with the weights.
struct CodeSums {
  double codes, squares, products;
};

struct CodeGroup {
  Vec x[kCodeVectors];
  Vec importance[kCodeVectors];  // of a squared error
  CodeRange plain;               // codes 0 and 15 are the extremes; it reaches zero
  double total, sum, squares;    // of the importance; of the weights and their squares, each times its importance

  CodeGroup(const float* weights, const float* importances) {
    Vec low = load(weights), high = low, most = load(importances);
    for (int i = 0; i < kCodeVectors; ++i) {
      x[i] = load(weights + i * kLanes);
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
      most = maximum(most, load(importances + i * kLanes));
    }
    const float lowest = -reduce_max(-low), highest = reduce_max(high);
    plain.minimum = lowest < 0.0f ? -lowest : 0.0f;
    plain.scale = (highest + plain.minimum) / kLargestCode;
    const Vec least = splat(kLeastImportance * reduce_max(most));
    Vec totals = {}, sums = {}, of_squares = {};
    for (int i = 0; i < kCodeVectors; ++i) {
      importance[i] = maximum(load(importances + i * kLanes), least);
      totals += importance[i];
      sums += importance[i] * x[i];
      of_squares += importance[i] * x[i] * x[i];
    }
    total = reduce_add(totals), sum = reduce_add(sums), squares = reduce_add(of_squares);
  }

  // The code of each element, as a float; `inverse` of the scale.
  INFLIGHT_INLINE Vec code(int i, float inverse, float minimum) const {
    constexpr float kShifter = 12582912.0f;  // see split_integer
    const Vec scaled = (x[i] + minimum) * inverse;
    const Vec limited = scaled > kLargestCode ? splat(kLargestCode) : scaled > 0.0f ? scaled : Vec{};
    return (limited + kShifter) - kShifter;
  }

  INFLIGHT_INLINE CodeSums sums_of(float inverse, float minimum) const {
    Vec codes = {}, code_squares = {}, products = {};
    for (int i = 0; i < kCodeVectors; ++i) {
      const Vec found = code(i, inverse, minimum), weighted = found * importance[i];
      codes += weighted;
      code_squares += weighted * found;
      products += weighted * x[i];
    }
    return {reduce_add(codes), reduce_add(code_squares), reduce_add(products)};
  }

  // The range that fits best to codes with these sums, by least squares; its scale is 0 if there is none.  One that is
  // far from the plain range fits few weights and takes the precision of the feature's other groups.
  CodeRange fit(const CodeSums& of) const {
    const double determinant = total * of.squares - of.codes * of.codes;
    if (!(determinant > kLeastDeterminant * total * of.squares)) return {0.0f, 0.0f};
    double scale = (total * of.products - sum * of.codes) / determinant;
    double minimum = (of.codes * of.products - of.squares * sum) / determinant;
    if (minimum < 0.0) scale = of.products / of.squares, minimum = 0.0;
    const bool is_near = 2.0 * scale >= plain.scale && scale <= 2.0 * plain.scale;
    return is_near ? CodeRange{float(scale), float(minimum)} : CodeRange{0.0f, 0.0f};
  }

  // The sum of squared errors of codes with these sums.
  double error(const CodeSums& of, CodeRange range) const {
    const double scale = range.scale, minimum = range.minimum;
    return squares - 2.0 * (scale * of.products - minimum * sum) + scale * scale * of.squares +
           (minimum * total - 2.0 * scale * of.codes) * minimum;
  }
};

// The best of some ranges: each is the fit to codes which a slightly different scale gives.
inline CodeRange best_range(const CodeGroup& group) {
  CodeRange best = group.plain;
  if (!(best.scale > 1e-31f)) return best;
  double least = INFINITY;
  for (int step = -5; step <= 5; ++step) {
    const float inverse = (1.0f + 0.2f / kLargestCode * float(step)) / group.plain.scale;
    const CodeSums sums = group.sums_of(inverse, group.plain.minimum);
    const CodeRange found = group.fit(sums);
    const double error = group.error(sums, found);
    if (found.scale > 0.0f && error < least) {
      least = error;
      best = found;
    }
  }
  return best;
}

// A range in bytes, times the units of its feature.
struct ByteRange {
  float scale, minimum;

  static float nearest(float value, float unit) {
    return unit > 0.0f ? std::fmin(std::fmax(std::nearbyint(value / unit), 0.0f), kLargestByte) : 0.0f;
  }
  ByteRange(CodeRange range, CodeRange unit) : scale(nearest(range.scale, unit.scale)), minimum(nearest(range.minimum, unit.minimum)) {}
  CodeRange times(CodeRange unit) const { return {scale * unit.scale, minimum * unit.minimum}; }
};

// The nearest bytes to a range, and then those of the fits to the codes that they give, as long as the error falls.  A
// minimum is fitted to the scale as its byte says.
inline ByteRange best_bytes(const CodeGroup& group, CodeRange range, CodeRange unit) {
  constexpr int kTries = 3;
  ByteRange best(range, unit), at = best;
  double least = INFINITY;
  for (int tried = 0; tried < kTries && at.scale > 0.0f; ++tried) {
    const CodeRange numbers = at.times(unit);
    const CodeSums sums = group.sums_of(1.0f / numbers.scale, numbers.minimum);
    const double error = group.error(sums, numbers);
    if (!(error < least)) break;
    least = error;
    best = at;
    at.scale = ByteRange::nearest(group.fit(sums).scale, unit.scale);
    at.minimum = ByteRange::nearest(float((at.scale * unit.scale * sums.codes - group.sum) / group.total), unit.minimum);
  }
  return best;
}

// See OpsKernels.  A feature with a weight that is not finite gets the scale NaN.
inline void choose_codes(const float* x, const float* importance, int64_t size, const PlainCodes4& out, float* scale,
                         float* minimum) {
  const int64_t groups = size / kFineGroup;
  const auto take = [=](int64_t at) { return CodeGroup(x + at * kFineGroup, importance + at * kFineGroup); };
  thread_local std::vector<CodeRange> ranges;
  ranges.resize(groups);
  CodeRange unit = {0.0f, 0.0f};
  bool finite = true;
  for (int64_t at = 0; at < groups; ++at) {
    const CodeGroup group = take(at);
    finite = finite && std::isfinite(group.squares);
    ranges[at] = best_range(group);
    unit = {std::fmax(unit.scale, ranges[at].scale), std::fmax(unit.minimum, ranges[at].minimum)};
  }
  unit = finite ? CodeRange{unit.scale / kLargestByte, unit.minimum / kLargestByte} : CodeRange{0.0f, 0.0f};
  *scale = finite ? unit.scale : NAN;
  *minimum = unit.minimum;
  for (int64_t at = 0; at < groups; ++at) {
    const CodeGroup group = take(at);
    const ByteRange bytes = best_bytes(group, ranges[at], unit);
    out.scales[at] = uint8_t(bytes.scale);
    out.mins[at] = uint8_t(bytes.minimum);
    const CodeRange range = bytes.times(unit);
    const float inverse = range.scale > 0.0f ? 1.0f / range.scale : 0.0f;
    for (int i = 0; i < kCodeVectors; ++i) {
      const Vec code = group.code(i, inverse, range.minimum);
      for (int lane = 0; lane < kLanes; ++lane) out.codes[at * kFineGroup + i * kLanes + lane] = uint8_t(code[lane]);
    }
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
