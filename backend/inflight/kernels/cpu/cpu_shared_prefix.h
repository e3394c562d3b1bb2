// Requests of a batch that begin with the same blocks: a system prompt, a document, the samples of one prompt.
// Their keys and values need to be read once, not once for each.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_attention.h"

namespace inflight {

// Chunks first_chunk .. first_chunk + num_chunks are the same in `count` consecutive requests of the sorted list.
struct SharedRun {
  int32_t first, count;
  int32_t first_chunk, num_chunks;
};

class SharedPrefixes {
 public:
  // Look at requests with one query to max_queries.  Only chunks in front of a request's queries count: they are in
  // full blocks, and all of its queries attend to all of their keys.
  void find(const Batch& batch, int64_t block_size, int32_t max_queries) {
    batch_ = &batch;
    block_size_ = block_size;
    requests_.clear();
    runs_.clear();
    chunks_.assign(batch.num_requests, 0);
    for (int32_t request = 0; request < batch.num_requests; ++request) {
      const int32_t queries = batch.query_start_loc[request + 1] - batch.query_start_loc[request];
      chunks_[request] = (batch.seq_lens[request] - queries) / kChunk;
      if (queries > 0 && queries <= max_queries && chunks_[request] > 0) requests_.push_back(request);
    }
    std::sort(requests_.begin(), requests_.end(), [&](int32_t a, int32_t b) {
      const int64_t count = num_blocks(std::min(chunks_[a], chunks_[b]));
      const int order = std::memcmp(blocks(a), blocks(b), count * sizeof(int32_t));
      return order != 0 ? order < 0 : chunks_[a] != chunks_[b] ? chunks_[a] < chunks_[b] : a < b;
    });
    in_common_.assign(requests_.size(), 0);
    for (size_t i = 1; i < requests_.size(); ++i) in_common_[i] = in_common(requests_[i - 1], requests_[i]);
    if (!requests_.empty()) add_runs(0, int32_t(requests_.size()), 0);
  }

  // Sorted by their blocks: those with a common beginning are adjacent.
  const std::vector<int32_t>& requests() const { return requests_; }
  // A run precedes the runs behind it of the same requests; a request's first one starts at chunk 0.
  const std::vector<SharedRun>& runs() const { return runs_; }

 private:
  const int32_t* blocks(int32_t request) const {
    return batch_->block_table + request * batch_->block_table_stride;
  }
  int64_t num_blocks(int32_t chunks) const { return (int64_t(chunks) * kChunk + block_size_ - 1) / block_size_; }

  // Number of chunks at the beginning of both.
  int32_t in_common(int32_t a, int32_t b) const {
    const int64_t most = num_blocks(std::min(chunks_[a], chunks_[b]));
    const int64_t same = std::mismatch(blocks(a), blocks(a) + most, blocks(b)).first - blocks(a);
    return std::min({int32_t(same * block_size_ / kChunk), chunks_[a], chunks_[b]});
  }

  // Requests first .. last have `chunks` chunks in common.
  void add_runs(int32_t first, int32_t last, int32_t chunks) {
    if (last - first < 2) return;
    const int32_t all = *std::min_element(in_common_.begin() + first + 1, in_common_.begin() + last);
    if (all > chunks) runs_.push_back({first, last - first, chunks, all - chunks});
    for (int32_t from = first, to; from < last; from = to) {
      for (to = from + 1; to < last && in_common_[to] > all;) ++to;
      add_runs(from, to, all);
    }
  }

  const Batch* batch_;
  int64_t block_size_;
  std::vector<int32_t> requests_, chunks_, in_common_;  // the last: chunks in common with the one before in the list
  std::vector<SharedRun> runs_;
};

}  // namespace inflight
