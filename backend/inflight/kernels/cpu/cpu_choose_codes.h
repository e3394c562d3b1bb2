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

// A group of weights is about code * scale - minimum.
struct CodeRange {
  float scale;
  float minimum;
};

struct CodeGroup {
  Vec x[kCodeVectors];
  Vec weight[kCodeVectors];  // of a squared error

  // The code of each element, as a float; `inverse` of the scale.
  INFLIGHT_INLINE Vec code(int i, float inverse, float minimum) const {
    constexpr float kShifter = 12582912.0f;  // see split_integer
    const Vec scaled = (x[i] + minimum) * inverse;
    const Vec limited = scaled > kLargestCode ? splat(kLargestCode) : scaled > 0.0f ? scaled : Vec{};
    return (limited + kShifter) - kShifter;
  }
};

// The best of some ranges: each is the least squares fit to codes which a slightly different scale gives.
inline CodeRange best_range(const CodeGroup& group) {
  Vec weights = {}, sums = {}, squares = {};
  float lowest = group.x[0][0], highest = lowest;
  for (int i = 0; i < kCodeVectors; ++i) {
    weights += group.weight[i];
    sums += group.weight[i] * group.x[i];
    squares += group.weight[i] * group.x[i] * group.x[i];
    for (int lane = 0; lane < kLanes; ++lane) {
      lowest = std::fmin(lowest, group.x[i][lane]);
      highest = std::fmax(highest, group.x[i][lane]);
    }
  }
  const double w = reduce_add(weights), x = reduce_add(sums), xx = reduce_add(squares);
  const float minimum = lowest < 0.0f ? -lowest : 0.0f, range = highest + minimum;
  CodeRange best = {range / kLargestCode, minimum};
  if (!(range > 1e-30f)) return best;
  double least = INFINITY;
  for (int step = -10; step <= 10; ++step) {
    const float inverse = (kLargestCode + 0.1f * float(step)) / range;
    Vec codes = {}, code_squares = {}, products = {};
    for (int i = 0; i < kCodeVectors; ++i) {
      const Vec code = group.code(i, inverse, minimum), weighted = code * group.weight[i];
      codes += weighted;
      code_squares += weighted * code;
      products += weighted * group.x[i];
    }
    const double c = reduce_add(codes), cc = reduce_add(code_squares), cx = reduce_add(products);
    const double determinant = w * cc - c * c;
    if (!(determinant > 0.0)) continue;
    double scale = (w * cx - x * c) / determinant, offset = (cc * x - c * cx) / determinant;
    if (offset > 0.0) scale = cx / cc, offset = 0.0;
    const double error = xx - 2.0 * (scale * cx + offset * x) + scale * scale * cc + (2.0 * scale * c + offset * w) * offset;
    if (scale > 0.0 && error < least) {
      least = error;
      best = {float(scale), float(-offset)};
    }
  }
  return best;
}

// See OpsKernels.  A feature with a weight that is not finite gets the scale NaN.
inline void choose_codes(const float* x, int64_t size, const PlainCodes4& out, float* scale, float* minimum) {
  const int64_t groups = size / kFineGroup;
  const auto take = [x](int64_t at) {
    CodeGroup group;
    Vec squares = {};
    for (int i = 0; i < kCodeVectors; ++i) {
      group.x[i] = load(x + at * kFineGroup + i * kLanes);
      squares += group.x[i] * group.x[i];
    }
    const Vec mean = splat(std::sqrt(reduce_add(squares) / kFineGroup));
    for (int i = 0; i < kCodeVectors; ++i) group.weight[i] = mean + (group.x[i] < 0.0f ? -group.x[i] : group.x[i]);
    return group;
  };
  thread_local std::vector<CodeRange> ranges;
  ranges.resize(groups);
  CodeRange unit = {0.0f, 0.0f};
  bool finite = true;
  for (int64_t at = 0; at < groups; ++at) {
    const CodeGroup group = take(at);
    finite = finite && reduce_add(group.weight[0]) < INFINITY;
    ranges[at] = best_range(group);
    unit = {std::fmax(unit.scale, ranges[at].scale), std::fmax(unit.minimum, ranges[at].minimum)};
  }
  unit = finite ? CodeRange{unit.scale / 255.0f, unit.minimum / 255.0f} : CodeRange{0.0f, 0.0f};
  *scale = finite ? unit.scale : NAN;
  *minimum = unit.minimum;
  for (int64_t at = 0; at < groups; ++at) {
    const auto byte = [](float value, float of) { return of > 0.0f ? std::nearbyint(value / of) : 0.0f; };
    const float scale_byte = byte(ranges[at].scale, unit.scale), min_byte = byte(ranges[at].minimum, unit.minimum);
    out.scales[at] = uint8_t(scale_byte);
    out.mins[at] = uint8_t(min_byte);
    const float size_of_step = scale_byte * unit.scale;
    const float inverse = size_of_step > 0.0f ? 1.0f / size_of_step : 0.0f;
    const CodeGroup group = take(at);
    for (int i = 0; i < kCodeVectors; ++i) {
      const Vec code = group.code(i, inverse, min_byte * unit.minimum);
      for (int lane = 0; lane < kLanes; ++lane) out.codes[at * kFineGroup + i * kLanes + lane] = uint8_t(code[lane]);
    }
  }
}

}  // namespace INFLIGHT_ISA
}  // namespace inflight
