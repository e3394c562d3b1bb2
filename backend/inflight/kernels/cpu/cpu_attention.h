// What the parts of the CPU attention kernel share: the C ABI's structs and the table of functions
// that each instruction set's build of cpu_kernels.cpp fills in.
//
// Words: a *group* is 16 consecutive tokens of one sequence, the unit of the packed KV layout; a
// *tile* is kTile consecutive keys, scored at once; a *chunk* is kChunk consecutive keys, reduced to
// one partial result.  Tiles and chunks start at multiples of their size in the sequence, whatever
// the batch, the prefill chunking and the number of threads: so a token's result never depends on
// them, to the last bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inflight {

constexpr int kGroup = 16;
constexpr int kTile = 256;
constexpr int kChunk = 512;
constexpr int kRowsPerItem = 36;  // query rows (tokens times heads of a group) that share a pass over the keys
constexpr int kRowsOfHeads = 64;  // the same over all heads of an item that has more than one

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };  // kInt8: pools only

inline int64_t element_size(int32_t dtype) { return dtype == kFloat32 ? 4 : dtype == kInt8 ? 1 : 2; }

// One layer.  The pool is cut into *panels*: some consecutive slots' keys of one KV head, then their
// values; the panels of all heads for the same slots lie side by side.  With block_size a multiple of
// kGroup a panel holds a group, packed:
//   float32, float16   keys [key_size][16]         values [16][value_size]
//   bfloat16           keys [key_size / 2][16][2]  values [8][value_size][2]
//   int8               keys [key_size / 4][16][4]  values [4][value_size][4]
// that is, keys lie across the lanes of a vector for the scores, and elements that one instruction
// multiplies and adds lie side by side: of four bytes in the order 0, 2, 1, 3, because sign extension in
// place then gives the pairs (0, 1) and (2, 3).  In front of an int8 panel's keys are the slots' bfloat16
// scales, of all keys, then of all values.  With another block_size a panel holds one slot's rows, and
// groups are packed while they are read.  The pool is readable 64 bytes past its end.
struct Layer {
  char* pool;
  int64_t block_size;
  int32_t dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t key_size;
  int32_t value_size;
  int32_t window;  // tokens that a token sees, itself included; 0: all
  float scaling;   // greater than 0
  float softcap;   // 0: none

  int group_size() const { return num_heads / num_kv_heads; }
  bool packed() const { return block_size % kGroup == 0; }
  int64_t panel_slots() const { return packed() ? kGroup : 1; }
  int64_t key_bytes() const { return key_size * element_size(dtype); }
  int64_t value_bytes() const { return value_size * element_size(dtype); }
  int64_t scale_bytes() const { return dtype == kInt8 ? 4 : 0; }  // of a slot
  int64_t panel_bytes() const { return panel_slots() * (scale_bytes() + key_bytes() + value_bytes()); }
  char* panel(int64_t slot, int64_t head) const {
    return pool + (slot / panel_slots() * num_kv_heads + head) * panel_bytes();
  }
  char* keys_of(char* panel) const { return panel + panel_slots() * scale_bytes(); }
  char* values_of(char* panel) const { return keys_of(panel) + panel_slots() * key_bytes(); }
};

// One step's ragged batch; see AttentionMetadata.
struct Batch {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const int64_t* slot_mapping;
  int64_t block_table_stride;
  int64_t num_requests;
  int64_t num_tokens;
};

// Rows of a tensor [tokens, heads, size]; strides in elements, the last dimension is contiguous.
struct Rows {
  const char* data;
  int64_t token_stride;
  int64_t head_stride;
  int32_t dtype;
};

struct Call {
  const Layer* layer;
  const Batch* batch;
  Rows query;
  char* out;           // [tokens, num_heads, value_size], contiguous, of the query's dtype
  const float* sinks;  // [num_heads] or null
};

// Queries first_query .. + num_queries of a request, for some KV heads, over a run of chunks.  Where
// few queries share the keys, reading is what takes time: an item then has many heads, because a
// block's panels lie side by side and memory is read fastest in long stretches.
struct Item {
  int32_t request;
  int32_t first_head;
  int32_t num_heads;
  int32_t first_query;
  int32_t num_queries;
  int32_t first_chunk;
  int32_t num_chunks;
  int32_t split;  // index of the group of items that share these queries; -1: the item stands alone
};

// Keys that any of the queries sees: [begin, end).
struct Span {
  int32_t begin;
  int32_t end;
};

inline Span visible_keys(const Call& call, int32_t request, int32_t first_query, int32_t num_queries) {
  const int32_t* starts = call.batch->query_start_loc + request;
  const int32_t first = call.batch->seq_lens[request] - (starts[1] - starts[0]) + first_query;
  const int32_t window = call.layer->window;
  return {window > 0 && first >= window ? first - window + 1 : 0, first + num_queries};
}

// The chunks' partial results of a split: `count` slices of `floats` each, head after head, for
// chunks first_chunk .. first_chunk + count.
struct Partials {
  float* data;
  int64_t floats;
  int32_t first_chunk;
  int32_t count;
};

inline int64_t padded(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
// Rows are computed in blocks of 6, 4, 2 or 1, the last of which may reach past the end.
inline int64_t padded_rows(int64_t rows) { return rows + 1; }
inline int64_t padded_value_size(const Layer& layer) { return padded(layer.value_size, kGroup); }
// A partial result: per row a running maximum, a sum, and the weighted values.
inline int64_t partial_floats(const Layer& layer, int64_t rows) {
  return padded(padded_rows(rows) * (padded_value_size(layer) + 2), kGroup);
}

struct Kernels {
  const char* name;
  size_t (*scratch_bytes)(const Call& call, int32_t num_queries, int32_t num_heads);
  void (*attend)(const Call& call, const Item& item, char* scratch, const Partials* partials);
  void (*merge)(const Call& call, const Item& item, char* scratch, const Partials& partials);
  // Tokens begin .. end of the batch, heads first_head .. last_head.
  void (*write)(const Layer& layer, const Batch& batch, const Rows& key, const Rows& value, int64_t begin, int64_t end,
                int32_t first_head, int32_t last_head);
};

}  // namespace inflight
