// Forward pass on a team of threads.
#pragma once

#include "cpu_lora.h"
#include "cpu_ops.h"
#include "cpu_work.h"

namespace inflight {

// The tokens of a step; see AttentionMetadata for the batch.
struct Tokens {
  const Batch* batch;
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* logits_indices;  // tokens whose logits are computed, in the order of the result
  int64_t num_logits;
  float* logits;
  const int64_t* hidden_indices;  // tokens whose hidden states after the final norm are wanted, likewise
  int64_t num_hidden;
  float* hidden;
  const Adapter* const* adapters;  // of each token, or null where it has none; null: no token has one
  int64_t inner;                   // largest `inner` of a projection of these adapters
};

void run_linear(const Linear& linear, const char* x, int64_t rows, int32_t dtype, char* out, int threads);

void run_decoder(const Decoder& decoder, const Tokens& tokens, int threads);

}  // namespace inflight
