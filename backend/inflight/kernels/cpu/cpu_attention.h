// Shared by all parts of the CPU attention kernel: the C ABI's structs and the table of functions
// that cpu_attention_kernels.cpp defines once per instruction set.
//
// Terms: a *group* is 16 consecutive tokens of one sequence, the unit of the packed KV layout; a
// *tile* is kTile consecutive keys, scored together; a *chunk* is kChunk consecutive keys, reduced to
// one partial result.  Tiles and chunks start at multiples of their size in the sequence, regardless
// of the batch, the prefill chunking and the number of threads: a token's result is therefore bitwise
// independent of all three.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inflight {

constexpr int kGroup = 16;
constexpr int kTile = 256;
constexpr int kChunk = 512;
constexpr int kRowsPerItem = 36;  // query rows (tokens x query heads per KV head) that share a pass over the keys
constexpr int kRowsOfHeads = 64;  // the same, over all heads of an item with more than one

// kInt8: KV pools only; those after it: weights only.
enum Dtype : int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kCodes8 = 4,
  kCodes4 = 5,
  kStoredCodes = 6,
};

inline int64_t element_size(int32_t dtype) { return dtype == kFloat32 ? 4 : dtype == kInt8 || dtype == kCodes8 ? 1 : 2; }

// One layer.  The pool is divided into *panels*: the keys of a few consecutive slots of one KV head,
// followed by their values; the panels of all heads for the same slots are adjacent.  If block_size is
// a multiple of kGroup, a panel holds one group, packed:
//   float32, float16   keys [key_size][16]         values [16][value_size]
//   bfloat16           keys [key_size / 2][16][2]  values [8][value_size][2]
//   int8               keys [key_size / 4][16][4]  values [4][value_size][4]
// Keys are laid out across the lanes of a vector, and elements that one instruction multiplies and adds
// are adjacent.  Four bytes are stored in the order 0, 2, 1, 3, so that sign extension in place yields the
// pairs (0, 1) and (2, 3).  The keys of an int8 panel are preceded by the slots' bfloat16 scales: all key
// scales, then all value scales.  With any other block_size a panel holds the rows of one slot, and groups
// are packed as they are read.  The pool is readable up to 64 bytes past its end.
struct Layer {
  char* pool;
  int64_t block_size;
  int32_t dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t key_size;
  int32_t value_size;
  int32_t sliding_window;  // number of tokens a token attends to, including itself; 0: no limit
  float scaling;           // > 0
  float softcap;           // 0: none
  int32_t both_ways;       // whether a token attends to those behind it, too: to its whole request, without a window

  int group_size() const { return num_heads / num_kv_heads; }
  bool packed() const { return block_size % kGroup == 0; }
  int64_t panel_slots() const { return packed() ? kGroup : 1; }
  int64_t key_bytes() const { return key_size * element_size(dtype); }
  int64_t value_bytes() const { return value_size * element_size(dtype); }
  int64_t scale_bytes() const { return dtype == kInt8 ? 4 : 0; }  // per slot
  int64_t panel_bytes() const { return panel_slots() * (scale_bytes() + key_bytes() + value_bytes()); }
  char* panel(int64_t slot, int64_t head) const {
    return pool + (slot / panel_slots() * num_kv_heads + head) * panel_bytes();
  }
  char* keys_of(char* panel) const { return panel + panel_slots() * scale_bytes(); }
  char* values_of(char* panel) const { return keys_of(panel) + panel_slots() * key_bytes(); }
};

// The ragged batch of one step; see AttentionMetadata.
struct Batch {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const int64_t* slot_mapping;
  int64_t block_table_stride;
  int64_t num_requests;
  int64_t num_tokens;
};

// Rows of a tensor [tokens, heads, size].  Strides are in elements; the last dimension is contiguous.
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
  char* out;           // [tokens, num_heads, value_size], contiguous, in the query's dtype
  const float* sinks;  // [num_heads] or null
};

// A unit of work: num_queries queries of a request from first_query on, for some KV heads, over a run of
// chunks.  With few queries per key, reading memory dominates; such an item covers many heads, because
// the panels of a block are adjacent and long sequential reads are fastest.
struct Item {
  int32_t request;
  int32_t first_head;
  int32_t num_heads;
  int32_t first_query;
  int32_t num_queries;
  int32_t first_chunk;
  int32_t num_chunks;
  int32_t split;  // index of the Split that this item belongs to; -1: none; kShared: those of several requests
};
constexpr int32_t kShared = -2;

// Keys that at least one of the queries attends to: [begin, end).
struct Span {
  int32_t begin;
  int32_t end;
};

inline Span visible_keys(const Call& call, int32_t request, int32_t first_query, int32_t num_queries) {
  const int32_t* query_start_loc = call.batch->query_start_loc + request;
  const int32_t first = call.batch->seq_lens[request] - (query_start_loc[1] - query_start_loc[0]) + first_query;
  if (call.layer->both_ways) return {0, call.batch->seq_lens[request]};
  const int32_t window = call.layer->sliding_window;
  return {window > 0 && first >= window ? first - window + 1 : 0, first + num_queries};
}

// Partial results of a split's chunks: `count` slices of `floats` floats, each head by head from first_head on, for
// chunks first_chunk .. first_chunk + count.  The first slice may include all chunks before its own.
struct Partials {
  float* data;
  int64_t floats;
  int32_t first_chunk;
  int32_t count;
  int32_t first_head;
};

// A query of an item whose keys several requests have in common (Item::first_query counts these, and its chunks lie
// before the first new token of each): the token in the batch; its number among the queries of its request, which
// are `num_queries`, with the split that collects their results.
struct SharedQuery {
  int32_t token;
  int32_t query;
  int32_t num_queries;
  int32_t split;
  const Partials* partials;
};

inline int64_t padded(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
// Rows are computed in blocks of 6, 4, 2 or 1; the last block may extend past the end.
inline int64_t padded_rows(int64_t rows) { return rows + 1; }
inline int64_t padded_value_size(const Layer& layer) { return padded(layer.value_size, kGroup); }
// A partial result: for each row a running maximum, a sum, and the weighted values.
inline int64_t partial_floats(const Layer& layer, int64_t rows) {
  return padded(padded_rows(rows) * (padded_value_size(layer) + 2), kGroup);
}

// The functions of one instruction set.
struct AttentionKernels {
  const char* name;
  size_t (*scratch_bytes)(const Call& call, int32_t num_queries, int32_t num_heads);
  void (*attend)(const Call& call, const Item& item, char* scratch, const Partials* partials);
  void (*attend_shared)(const Call& call, const Item& item, char* scratch, const SharedQuery* queries);
  void (*merge)(const Call& call, const Item& item, char* scratch, const Partials& partials);
  // Tokens begin .. end of the batch, heads first_head .. last_head.
  void (*write)(const Layer& layer, const Batch& batch, const Rows& key, const Rows& value, int64_t begin, int64_t end,
                int32_t first_head, int32_t last_head);
};

// The table of the instruction set in use.
const AttentionKernels& attention_kernels();

}  // namespace inflight
