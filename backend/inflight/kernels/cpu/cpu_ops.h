// What the parts of the CPU decoder share: the C ABI's structs and the table of functions that each
// instruction set's build of cpu_ops_kernels.cpp fills in.
//
// Words: a *panel* is kPanel output features of a linear layer, packed so that one step of the summed
// dimension lies in consecutive bytes; *activations* are rows of bfloat16 where the weights are and one
// instruction multiplies pairs of them, else of float32; the *residual* stream is always float32.
//
// Every element of a product is summed over the input features in order, by one accumulator, whatever
// the number of rows: a token's result never depends on the batch that it is in, to the last bit.
//
// Weights may be int8, symmetric, with a scale for every output feature.  Their operand is quantized while it
// is used, with a scale for every row, to bytes that are 128 more than the number: so one instruction
// multiplies and adds unsigned by signed bytes, and what the 128 add is known before.
#pragma once

#include "cpu_attention.h"

namespace inflight {

constexpr int kPanel = 32;

// weight [out_features, in_features], packed as panels [in_features / depth][kPanel][depth] with depth 4 for
// int8, 2 for bfloat16 and 1 otherwise, of which in_features is a multiple; the last panel is padded with zeros.
//
// A gated layer is two of half the size: a panel has kPanel / 2 features of the gate, then the same ones of
// the other operand, and the result is silu(gate) * other, [out_features / 2].
struct Linear {
  const char* panels;
  const float* bias;       // [out_features], or null
  const float* scales;     // int8: [out_features]
  const int32_t* offsets;  // int8: [out_features], 128 times the sum of a feature's weights
  int64_t in_features;
  int64_t out_features;
  int32_t dtype;
  int32_t gated;

  int64_t depth() const { return dtype == kInt8 ? 4 : dtype == kBfloat16 ? 2 : 1; }
  int64_t num_results() const { return gated ? out_features / 2 : out_features; }
  int64_t panel_results() const { return gated ? kPanel / 2 : kPanel; }
  int64_t num_panels() const { return (num_results() + panel_results() - 1) / panel_results(); }
  int64_t panel_bytes() const { return in_features * kPanel * element_size(dtype); }
};

// Where a product goes: rows of activations, rows of float32, or added to rows of float32.
enum class Into : int32_t { kActivations, kFloats, kResidual };

struct Result {
  Into into;
  char* data;
  int64_t stride;  // elements from a row to the next
  float factor;    // on what is added to the residual, and on floats
  int32_t dtype;   // of activations
};

struct Matrix {
  const char* data;     // activations, or bytes
  int64_t stride;       // elements from a row to the next
  int64_t rows;
  const float* scales;  // bytes: of the rows
};

// One layer of the decoder: pre-norm, attention with merged projections, gated MLP.
struct DecoderLayer {
  Linear qkv, output, gate_up, down;
  const float* input_norm;
  const float* post_norm;
  const float* query_norm;  // [key_size], of each head, or null
  const float* key_norm;
  const Layer* attention;
  int32_t rotary;  // whether positions are applied
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers;
  int64_t hidden_size;
  const char* embedding;  // [vocabulary, hidden_size]
  int32_t dtype;          // of the embedding, and of all weights that are not int8
  int32_t rotary_size;    // elements of a head that are rotated
  const float* inverse_frequencies;  // [rotary_size / 2]
  const float* final_norm;
  Linear head;
  float rotary_scaling;
  float eps;
  float embedding_factor;
  float residual_factor;
  float logits_factor;
};

// cos and sin [rotary_size / 2] of one token.
struct Angles {
  const float* cos;
  const float* sin;
};

struct OpsKernels {
  const char* name;
  int32_t (*activation_dtype)(int32_t weight_dtype);
  // Panels first .. last of the product of all rows.
  void (*multiply)(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result);
  // Rows of activations, both contiguous, as bytes.
  void (*quantize)(const char* x, int32_t dtype, int64_t rows, int64_t size, uint8_t* out, float* scales);
  // Root mean square norm of rows of float32 into rows of activations, both contiguous.
  void (*norm)(const float* x, int64_t rows, int64_t size, const float* weight, float eps, char* out, int32_t dtype);
  // Norm and rotation of one token's query and key heads in a row of the merged projection.
  void (*place)(const Decoder& decoder, const DecoderLayer& layer, Angles angles, char* row, int32_t dtype);
  void (*to_floats)(const char* from, int32_t dtype, float factor, float* to, int64_t count);
  void (*from_floats)(const float* from, int32_t dtype, char* to, int64_t count);
};

}  // namespace inflight
