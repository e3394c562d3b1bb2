// A forward pass on a team of threads.
#pragma once

#include "cpu_ops.h"
#include "cpu_work.h"

namespace inflight {

// The kernels of the instruction set that runs.
const OpsKernels& ops_kernels();

// A step's tokens; see AttentionMetadata for the batch.
struct Tokens {
  const Batch* batch;
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* kept;  // whose logits are wanted, in the order of the result
  int64_t num_kept;
  float* logits;
};

void run_linear(const Linear& linear, const char* x, int64_t rows, int32_t dtype, char* out, int threads);

void run_decoder(const Decoder& decoder, const Tokens& tokens, int threads);

}  // namespace inflight
