// Choosing a token for each row of logits: the table of functions that cpu_sampler_kernels.cpp defines once per
// instruction set.
#pragma once

#include <cstdint>

namespace inflight {

// Rows of float32 logits, and how each is drawn: `SamplingMetadata.columns` (metadata.py), line by line.
struct Draws {
  const float* logits;
  int64_t stride;  // elements between rows
  int64_t size;    // of the vocabulary
  const int64_t* columns;
  int64_t line;           // elements between lines of columns
  const int32_t* hashes;  // [size], noise.token_hashes
  int64_t* out;           // a token for each row, or kNoToken
  const uint32_t* masks;  // [columns, mask_words], a bit for each token that is allowed; or null
  int64_t mask_words;
  int32_t marks;  // whether a row whose largest logit is not finite gets kNoToken; with masks: whether that is looked at
};

constexpr int64_t kNoToken = -1;

struct SamplerKernels {
  // Draw for columns first .. last.
  void (*draw)(const Draws& draws, int64_t first, int64_t last);
};

// The table of the instruction set in use.
const SamplerKernels& sampler_kernels();

}  // namespace inflight
