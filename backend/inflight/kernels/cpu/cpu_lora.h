// Adapters (LoRA, arXiv:2106.09685) in a forward pass: rows of any adapters, and rows without one, in one batch.
//
//   inner = A x      rows of one adapter at a time, as an ordinary product
//   y = W x + B inner      the product of all rows; each row's own B is added in its tile (cpu_expand.h)
//
// Rows of one adapter that are equally far apart are one product: those of a prompt, or every eighth row of a batch.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu_ops.h"

namespace inflight {

enum Projection : int64_t { kQkv, kOutput, kGateUp, kDown, kProjections };

// An adapter's share of a projection.
struct LowRank {
  Linear shrink;        // A of the merged layers, stacked: [inner, in_features]; none if out_features is 0
  const Expand* parts;  // B: of the projection's Linear and those behind it
};

struct Adapter {
  const LowRank* projections;  // [layers][kProjections]

  const LowRank& of(int64_t layer, Projection projection) const {
    return projections[layer * kProjections + projection];
  }
};

// The adapters of a product's rows.
class AdapterRows {
 public:
  // adapters: of each row, or null.  inner: [rows][width], owned by the team, or by this thread if it works alone.
  AdapterRows(const Adapter* const* adapters, int64_t rows, float* inner, int64_t width) : inner_(inner), width_(width) {
    std::vector<bool> taken(rows, false);
    for (int64_t row = 0; row < rows; ++row) {
      if (adapters[row] == nullptr || taken[row]) continue;
      Run run = {adapters[row], row, 1, 1};
      for (int64_t next = row + 1; next < rows; next += run.step) {
        if (adapters[next] == run.adapter && !taken[next]) {
          if (run.count == 1) run.step = next - row;
          ++run.count;
          taken[next] = true;
        } else if (run.count > 1) {
          break;
        }
      }
      runs_.push_back(run);
    }
    deltas_.resize(rows);
  }

  bool empty() const { return runs_.empty(); }

  // Compute A x of all rows that have one; call it with the whole team, or with each of `team` null.
  template <class Each>
  void shrink(int64_t layer, Projection projection, const Matrix& x, int64_t element, Each each) const {
    int64_t panels = 0;
    for (const Run& run : runs_) panels += panels_of(run, layer, projection);
    if (panels == 0) return;
    each(panels, [&](int64_t first, int64_t last) {
      int64_t begin = 0;  // of the run's panels
      for (const Run& run : runs_) {
        const int64_t end = begin + panels_of(run, layer, projection);
        const int64_t from = std::max(first, begin), to = std::min(last, end);
        if (from < to) {
          const Matrix rows = {x.data + run.first * x.stride * element, x.stride * run.step, run.count};
          const Result result = {Into::kFloats, reinterpret_cast<char*>(inner_ + run.first * width_), width_ * run.step,
                                 1.0f, kFloat32};
          ops_kernels().multiply(run.adapter->of(layer, projection).shrink, rows, from - begin, to - begin, result);
        }
        begin = end;
      }
    });
  }

  // The growth of each row, valid until the next call.
  const Delta* deltas(int64_t layer, Projection projection) {
    bool any = false;
    std::fill(deltas_.begin(), deltas_.end(), Delta{nullptr, nullptr});
    for (const Run& run : runs_) {
      const LowRank& pair = run.adapter->of(layer, projection);
      if (pair.shrink.out_features == 0) continue;
      any = true;
      for (int64_t i = 0; i < run.count; ++i) {
        const int64_t row = run.first + i * run.step;
        deltas_[row] = {pair.parts, inner_ + row * width_};
      }
    }
    return any ? deltas_.data() : nullptr;
  }

 private:
  // Rows first, first + step, ... of one adapter.
  struct Run {
    const Adapter* adapter;
    int64_t first, step, count;
  };

  static int64_t panels_of(const Run& run, int64_t layer, Projection projection) {
    const Linear& shrink = run.adapter->of(layer, projection).shrink;
    return shrink.out_features == 0 ? 0 : shrink.num_panels();
  }

  float* inner_;
  int64_t width_;
  std::vector<Run> runs_;
  std::vector<Delta> deltas_;  // by row
};

}  // namespace inflight
