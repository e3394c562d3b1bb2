// Shared by all parts of the CPU decoder: the C ABI's structs and the table of functions that
// cpu_ops_kernels.cpp defines once per instruction set.
//
// Terms: a *panel* is kPanel output features of a linear layer, packed so that one step of the summed
// dimension is contiguous; *activations* are rows of bfloat16 if the weights are bfloat16 and the CPU has
// an instruction that multiplies pairs of them, else of float32; the *residual* stream is always float32.
//
// Each element of a product is summed over the input features in order, in a single accumulator,
// regardless of the number of rows: a token's result is bitwise independent of its batch.
//
// Weights can be codes: unsigned integers, with scales.  Inputs are then quantized on the fly to signed bytes, with one
// scale per row and group of inputs: a single outlier, which the inputs of trained models have, costs the precision
// of its group only.  One instruction multiplies and adds signed by unsigned bytes.
#pragma once

#include "cpu_attention.h"

namespace inflight {

constexpr int kPanel = 32;
// Inputs of a row that share a scale.  The fine group costs a tenth of a product, and halves what inputs lose.
constexpr int kInputGroup = 64;
constexpr int kFineGroup = 32;
constexpr int kFinestGroup = 16;  // of weights whose own groups are as small

// How the codes of a checkpoint are stored, and in panels: weight = (code - zero) * scale - minimum.  A scale has `group`
// inputs.  It is a number, or an integer of a byte times the unit of its span, a number in float16.
//
// A panel is a sequence of spans: the units of its features' scales, then of their minimums, if they have units; and
// groups.  A group: scales of the features; their minimums; then blocks of kBlockInputs inputs (cpu_stored_codes.h).
struct StoredCodes {
  enum Scale : int32_t { kHalf, kBfloat, kFloat, kUnsignedByte, kSignedByte };
  enum Minimum : int32_t {
    kNone,
    kZero,           // a signed byte, times the scale
    kHalfMinimum,    // float16
    kByteOfMinimum,  // an unsigned byte, times a unit
  };
  static constexpr int kBlockInputs = 16;

  int32_t bits;  // 4, 6 or 8
  int32_t group;  // a multiple of the input group
  int32_t span;  // a multiple of the group; divides in_features
  int32_t zero;  // of all codes
  int32_t scale;  // Scale
  int32_t minimum;  // Minimum

  bool has_units() const { return scale == kUnsignedByte || scale == kSignedByte; }
  int64_t scale_size() const { return has_units() ? 1 : scale == kFloat ? 4 : 2; }
  int64_t minimum_size() const { return minimum == kNone ? 0 : minimum == kHalfMinimum ? 2 : 1; }
  int64_t span_bytes() const { return kPanel * (2 * has_units() + 2 * (minimum == kByteOfMinimum)); }
  int64_t header_bytes() const { return kPanel * (scale_size() + minimum_size()); }
  int64_t block_bytes() const { return kBlockInputs * kPanel * bits / 8; }
  int64_t group_bytes() const { return header_bytes() + group / kBlockInputs * block_bytes(); }
  int64_t panel_bytes(int64_t in_features) const {
    return in_features / span * span_bytes() + in_features / group * group_bytes();
  }
};

// A weight [out_features, in_features], packed as panels [in_features / depth][kPanel][depth].  The depth is 4
// for codes, 2 for bfloat16 and 1 otherwise, and divides in_features; the last panel is padded with zeros.
//
// Codes of eight bits (dtype kCodes8) are the integers of a symmetric quantization plus 128, with a scale per feature.
// Their inputs have groups of either size; the last one can be shorter.
// Codes of four bits (kCodes4) have a scale and a minimum per feature and group of kFineGroup inputs, which divides
// in_features: code * scale - minimum, each a byte times a number of the feature.  A panel has the bytes of each group in
// front of its codes (cpu_codes.h).
// Codes of a checkpoint (kStoredCodes) are kept as they are: see StoredCodes.
//
// A gated layer consists of two of half the size: a panel has kPanel / 2 features of the gate, then the same
// features of the other operand, and the result is silu(gate) * other, [out_features / 2].
// Features of the same inputs in another format follow in `next`: their results come behind those of this part.
struct Linear {
  const char* panels;
  const float* bias;    // [out_features], or null
  const float* scales;  // codes: [out_features]
  const float* mins;    // codes of four bits: [out_features]
  const Linear* next;   // or null
  const int32_t* order;  // stored codes: the weight's input k is input order[k] of the product; null: they are the same
  int64_t in_features;
  int64_t out_features;
  int32_t dtype;
  int32_t gated;
  int32_t input_group;  // codes: kInputGroup, kFineGroup or kFinestGroup
  StoredCodes stored;

  bool has_codes() const { return dtype == kCodes8 || dtype == kCodes4 || dtype == kStoredCodes; }
  int64_t depth() const { return has_codes() ? 4 : dtype == kBfloat16 ? 2 : 1; }
  int64_t steps() const { return in_features / depth(); }
  int64_t num_results() const { return gated ? out_features / 2 : out_features; }
  int64_t panel_results() const { return gated ? kPanel / 2 : kPanel; }
  int64_t num_panels() const { return (num_results() + panel_results() - 1) / panel_results(); }
  // Results of this part and of the parts behind it.
  int64_t all_results() const { return num_results() + (next == nullptr ? 0 : next->all_results()); }
  // Row of the weight for a panel's column; out_features or more in the panel's padding.
  int64_t feature_of(int64_t panel, int64_t column) const {
    const int64_t width = panel_results(), result = panel * width + column % width;
    return result < num_results() ? column / width * num_results() + result : out_features;
  }
  int64_t num_groups() const { return (in_features + input_group - 1) / input_group; }
  int64_t panel_bytes() const {
    if (dtype == kStoredCodes) return stored.panel_bytes(in_features);
    if (dtype == kCodes4) return num_groups() * kPanel * (2 + kFineGroup / 2);
    return in_features * kPanel * element_size(dtype);
  }
};

// Half a panel of B, kPanel / 2 features, for some of the inputs; the others have no part in them.
struct HalfPanel {
  int64_t offset;  // of its numbers, [depth][kPanel / 2], in Expand::values
  int32_t first;   // input
  int32_t depth;   // inputs; 0: these features have no adapter
};

// B of an adapter (LoRA, arXiv:2106.09685), in the panels of the Linear whose outputs grow by it.  The scale is part of B.
struct Expand {
  const char* values;
  const HalfPanel* halves;  // [panels of the Linear][2]
  int32_t dtype;            // a float type
};

// The addition of an adapter to a row of a product, before bias and gate: B of its `inner`, which is A x.
struct Delta {
  const Expand* parts;  // of the Linear and those behind it; null: nothing
  const float* inner;
};

// Destination of a product: rows of activations, rows of float32, added to rows of float32, or their GELU as activations.
enum class Into : int32_t { kActivations, kFloats, kResidual, kGelu };

struct Result {
  Into into;
  char* data;
  int64_t stride;  // elements between rows
  float factor;    // applied to kFloats and kResidual
  int32_t dtype;   // of activations
  const Delta* deltas = nullptr;  // [rows], or null
  int64_t part = 0;               // of Delta::parts
};

// A group of a row's inputs, quantized to bytes: each is a byte times `scale`.
struct GroupSums {
  float scale;
  float shift;    // sum of the inputs, as quantized
  int32_t start;  // -128 times the sum of the bytes
};

// Rows of activations, or of bytes.
struct Matrix {
  const char* data;
  int64_t stride;  // elements between rows
  int64_t rows;
  const GroupSums* groups = nullptr;  // bytes: [groups][rows]
};

// Where rows of quantized inputs go.
struct Quantized {
  int8_t* bytes;      // contiguous rows
  GroupSums* groups;  // of the first row; its next group is `pitch` elements away
  int64_t pitch;
  int64_t group;      // inputs
  const int32_t* order;  // see Linear
};

// One layer of the decoder: norm, attention with merged projections, norm, gated MLP.
struct DecoderLayer {
  Linear qkv, output, gate_up, down;
  const float* input_norm;
  const float* post_norm;
  const float* query_norm;  // [key_size], applied to each head, or null
  const float* key_norm;
  const Layer* attention;
  int32_t rotary;  // whether query and key are rotated
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers;
  int64_t hidden_size;
  const char* embedding;  // [vocabulary, hidden_size]
  int32_t dtype;          // of the embedding and of all weights that are not codes
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

// cos and sin of one token, [rotary_size / 2] each.
struct Angles {
  const float* cos;
  const float* sin;
};

// A weight in codes of four bits: codes [out_features, in_features], scales and mins [out_features, groups].
struct PlainCodes4 {
  uint8_t* codes;
  uint8_t* scales;
  uint8_t* mins;
};

// Stored codes [out_features, in_features]; scales and minimums [out_features, groups] and their units
// [out_features, spans], of the sizes that StoredCodes says, or null.
struct PlainStored {
  uint8_t* codes;
  char* scales;
  char* minimums;
  char* units;
  char* minimum_units;
};

// The functions of one instruction set.
struct OpsKernels {
  const char* name;
  int32_t (*activation_dtype)(int32_t weight_dtype);
  // Compute panels first .. last of the product, for all rows.
  void (*multiply)(const Linear& linear, const Matrix& x, int64_t first, int64_t last, const Result& result);
  // Quantize contiguous rows of activations.
  void (*quantize)(const char* x, int32_t dtype, int64_t rows, int64_t size, const Quantized& out);
  // Choose the codes of one feature's weights [size], a multiple of the group, and the units of its scales and mins.
  // importance [size]: of the squared error of each weight; positive.
  void (*choose_codes)(const float* weights, const float* importance, int64_t size, const PlainCodes4& out, float* scale,
                       float* minimum);
  // RMS norm from rows of float32 to rows of activations; both are contiguous.
  void (*norm)(const float* x, int64_t rows, int64_t size, const float* weight, float eps, char* out, int32_t dtype);
  // Layer norm of contiguous rows, in place.
  void (*layer_norm)(float* x, int64_t rows, int64_t size, const float* weight, const float* shift, float eps);
  // Norm and rotation of one token's query and key heads, in place in its row of the merged projection.
  void (*place)(const Decoder& decoder, const DecoderLayer& layer, Angles angles, char* row, int32_t dtype);
  void (*to_floats)(const char* from, int32_t dtype, float factor, float* to, int64_t count);
  void (*from_floats)(const float* from, int32_t dtype, char* to, int64_t count);
};

// The table of the instruction set in use.
const OpsKernels& ops_kernels();

// How many bytes ahead a product of few rows prefetches; the best number depends on the processor.
int64_t prefetch_distance();

}  // namespace inflight
