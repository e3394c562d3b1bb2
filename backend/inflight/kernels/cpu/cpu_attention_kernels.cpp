// Attention over one item.  Compiled once per instruction set, into a namespace named after it.  Do not use
// standard library templates here: the linker would share their instances between instruction sets.
#include <cmath>

#include "cpu_tiles.h"
#include "cpu_write.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr int kGroupVectors = kGroup / kLanes;

// Online softmax over some keys, for each row: base-2 maximum, sum of weights, weighted values.
struct State {
  float* values;  // [padded rows][padded value size]
  float* maximum;
  float* sum;

  State(float* memory, const Layer& layer, int64_t rows)
      : values(memory),
        maximum(memory + padded_rows(rows) * padded_value_size(layer)),
        sum(maximum + padded_rows(rows)) {}

  void clear(const Layer& layer, int64_t rows) {
    std::memset(values, 0, padded_rows(rows) * padded_value_size(layer) * 4);
    for (int64_t i = 0; i < padded_rows(rows); ++i) {
      maximum[i] = -INFINITY;
      sum[i] = 0.0f;
    }
  }
};

INFLIGHT_INLINE float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Addresses of the groups first .. last of a tile, in the panels of the item's first head.
struct Tile {
  const char* panels[kTileGroups];
  const char* keys[kTileGroups];
  const char* values[kTileGroups];
  int first, last;
};

template <class Op>
class ItemKernel {
  using Elem = typename Op::Elem;

 public:
  ItemKernel(const Call& call, const Item& item, char* scratch, const SharedQuery* shared)
      : call_(call),
        layer_(*call.layer),
        item_(item),
        shared_(shared),
        group_(layer_.group_size()),
        rows_(item.num_queries * group_) {
    const int32_t* query_start_loc = call.batch->query_start_loc + item.request;
    const int32_t query_len = query_start_loc[1] - query_start_loc[0];
    first_token_ = query_start_loc[0] + item.first_query;
    first_position_ = call.batch->seq_lens[item.request] - query_len + (shared == nullptr ? item.first_query : 0);
    end_position_ = layer_.both_ways ? call.batch->seq_lens[item.request] : 0;
    blocks_ = call.batch->block_table + item.request * call.batch->block_table_stride;
    scale_ = layer_.softcap > 0 ? kLog2e : layer_.scaling * kLog2e;
    state_floats_ = partial_floats(layer_, rows_);
    query_elems_ = padded(padded_rows(rows_) * layer_.key_size, 32);

    queries_ = take<Elem>(scratch, query_elems_ * item.num_heads);
    query_scales_ = take<float>(scratch, padded_rows(rows_) * item.num_heads);
    rescale_ = take<float>(scratch, padded_rows(rows_));
    weight_scales_ = take<float>(scratch, padded_rows(rows_));
    key_scales_ = take<float>(scratch, kTile);
    value_scales_ = take<float>(scratch, kTile);
    scores_ = take<float>(scratch, padded_rows(rows_) * kTile);
    weights_ = take<Elem>(scratch, padded_rows(rows_) * kTile);
    total_ = take<float>(scratch, state_floats_ * item.num_heads);
    part_ = take<float>(scratch, state_floats_ * item.num_heads);
    row_ = take<float>(scratch, padded(layer_.key_size, kGroup) + padded_value_size(layer_));
    packed_row_ = take<Elem>(scratch, padded(layer_.key_size, kGroup));
    packed_keys_ = take<char>(scratch, kTile * layer_.key_bytes());
    packed_values_ = take<char>(scratch, kTile * layer_.value_bytes() + 64);
    end_ = scratch;
  }

  const char* scratch_end() const { return end_; }

  void run(const Partials* partials) {
    const Span span = visible_keys(call_, item_.request, item_.first_query, item_.num_queries);
    for (int head = 0; head < item_.num_heads; ++head) pack_queries(head);
    for (int chunk = item_.first_chunk; chunk < item_.first_chunk + item_.num_chunks; ++chunk) {
      const int begin = chunk * kChunk > span.begin ? chunk * kChunk : span.begin;
      const int end = (chunk + 1) * kChunk < span.end ? (chunk + 1) * kChunk : span.end;
      if (partials != nullptr) {
        reduce(begin, end, slice(*partials, chunk) + (item_.first_head - partials->first_head) * state_floats_);
      } else if (chunk == item_.first_chunk) {
        reduce(begin, end, total_);
      } else {
        reduce(begin, end, part_);
        for (int head = 0; head < item_.num_heads; ++head) add(state(total_, head), state(part_, head));
      }
    }
    if (partials != nullptr) return;
    for (int head = 0; head < item_.num_heads; ++head) write_out(head, state(total_, head));
  }

  // Requests with the same first blocks: a pass over their keys for the queries of all, then to each its own rows.
  void run_shared() {
    for (int head = 0; head < item_.num_heads; ++head) pack_queries(head);
    for (int i = 0; i < item_.num_chunks; ++i) {
      const int chunk = item_.first_chunk + i;
      float* states = i == 0 ? total_ : part_;
      reduce(chunk * kChunk, (chunk + 1) * kChunk, states);
      if (item_.first_chunk > 0) {
        hand_out(states, chunk);
      } else if (i > 0) {
        for (int head = 0; head < item_.num_heads; ++head) add(state(total_, head), state(part_, head));
      }
    }
    if (item_.first_chunk == 0) hand_out(total_, item_.num_chunks - 1);
  }

  void merge(const Partials& partials) {
    for (int head = 0; head < item_.num_heads; ++head) {
      State total = state(partials.data, head);
      for (int i = 1; i < partials.count; ++i) add(total, state(partials.data + i * partials.floats, head));
      write_out(head, total);
    }
  }

 private:
  template <class T>
  static T* take(char*& scratch, int64_t count) {
    T* result = reinterpret_cast<T*>(scratch);
    scratch += padded(count * sizeof(T), 64);
    return result;
  }

  State state(float* memory, int head) const { return State(memory + head * state_floats_, layer_, rows_); }

  static float* slice(const Partials& partials, int chunk) {
    return partials.data + (chunk - partials.first_chunk) * partials.floats;
  }

  // Copy the queries' rows to the slices of `chunk` of their requests' partial results.
  void hand_out(float* states, int chunk) const {
    const int64_t size = padded_value_size(layer_);
    for (int query = 0; query < item_.num_queries; ++query) {
      const SharedQuery& own = shared_[query];
      const int64_t rows = int64_t(own.num_queries) * group_, floats = partial_floats(layer_, rows);
      for (int head = 0; head < item_.num_heads; ++head) {
        const State from = state(states, head);
        const int64_t at = item_.first_head + head - own.partials->first_head;
        const State to(slice(*own.partials, chunk) + at * floats, layer_, rows);
        const int64_t first = query * group_, target = own.query * group_;
        std::memcpy(to.values + target * size, from.values + first * size, group_ * size * sizeof(float));
        std::memcpy(to.maximum + target, from.maximum + first, group_ * sizeof(float));
        std::memcpy(to.sum + target, from.sum + first, group_ * sizeof(float));
      }
    }
  }

  int64_t token_of(int row) const {
    return shared_ == nullptr ? first_token_ + row / group_ : shared_[row / group_].token;
  }

  // Row r is token r / group of the item and head r % group of the KV head's group.
  int64_t query_head(int kv_head, int row) const { return (item_.first_head + kv_head) * group_ + row % group_; }

  void pack_queries(int kv_head) {
    const Rows& query = call_.query;
    Elem* to = queries_ + kv_head * query_elems_;
    for (int m = 0; m < rows_;) {
      const int block = next_row_block(rows_ - m);
      for (int i = 0; i < block; ++i) {
        if (m + i < rows_) {
          const int64_t token = token_of(m + i), head = query_head(kv_head, m + i);
          const char* from = query.data + (token * query.token_stride + head * query.head_stride) *
                                              element_size(query.dtype);
          query_scales_[kv_head * padded_rows(rows_) + m + i] = convert_query(from);
        } else {
          std::memset(packed_row_, 0, layer_.key_size * sizeof(Elem));
        }
        for (int d = 0; d < layer_.key_size; d += Op::kDepth) {
          std::memcpy(to + d * block + i * Op::kDepth, packed_row_ + d, Op::kDepth * sizeof(Elem));
        }
      }
      to += block * layer_.key_size;
      m += block;
    }
  }

  // Write a query's row to `packed_row_`; returns the factor for its products.
  float convert_query(const char* from) {
    const int32_t dtype = call_.query.dtype;
    if constexpr (Op::kQuantized) {
      row_to_floats(from, dtype, row_, layer_.key_size);
      return quantize_query(row_, packed_row_, layer_.key_size);
    } else if constexpr (sizeof(Elem) == 2) {
      std::memcpy(packed_row_, from, layer_.key_size * 2);
    } else {
      row_to_floats(from, dtype, packed_row_, layer_.key_size);
    }
    return 1.0f;
  }

  // The groups that contain keys begin .. end, which are in one tile.
  Tile locate(int begin, int end) const {
    const int start = begin / kTile * kTile;
    Tile tile;
    tile.first = (begin - start) / kGroup;
    tile.last = (end - start + kGroup - 1) / kGroup;
    for (int g = tile.first; g < tile.last; ++g) {
      if (layer_.packed()) {
        char* panel = panel_of(start + g * kGroup, 0);
        tile.panels[g] = panel;
        tile.keys[g] = layer_.keys_of(panel);
        tile.values[g] = layer_.values_of(panel);
      } else {
        tile.keys[g] = packed_keys_ + g * kGroup * layer_.key_bytes();
        tile.values[g] = packed_values_ + g * kGroup * layer_.value_bytes();
      }
    }
    return tile;
  }

  INFLIGHT_INLINE char* panel_of(int position, int head) const {
    const int64_t slot = blocks_[position / layer_.block_size] * layer_.block_size + position % layer_.block_size;
    return layer_.panel(slot, item_.first_head + head);
  }

  // Pack keys and values begin .. end of a head from a pool of plain rows.
  void pack(int head, int begin, int end) {
    for (int position = begin / kGroup * kGroup; position < end; ++position) {
      char* panel = panel_of(position, head);
      const int g = position % kTile / kGroup, at = position % kGroup;
      place_key(packed_keys_ + g * kGroup * layer_.key_bytes(), at, layer_.keys_of(panel), layer_.dtype,
                layer_.key_size);
      place_value(packed_values_ + g * kGroup * layer_.value_bytes(), at, layer_.values_of(panel), layer_.dtype,
                  layer_.value_size);
    }
  }

  // Load a head's scales of keys begin .. end, which are in one tile; value scales in the rest of their
  // groups are set to 0.
  void load_scales(const Tile& tile, int head, int begin, int end) {
    const int start = begin / kTile * kTile;
    if (layer_.packed()) {
      for (int g = tile.first; g < tile.last; ++g) {
        const auto* scales = reinterpret_cast<const uint16_t*>(tile.panels[g] + head * layer_.panel_bytes());
        for (int i = 0; i < kGroup; ++i) key_scales_[g * kGroup + i] = bfloat_to_float(scales[i]);
        for (int i = 0; i < kGroup; ++i) value_scales_[g * kGroup + i] = bfloat_to_float(scales[kGroup + i]);
      }
    } else {
      for (int position = begin; position < end; ++position) {
        const auto* scales = reinterpret_cast<const uint16_t*>(panel_of(position, head));
        key_scales_[position - start] = bfloat_to_float(scales[0]);
        value_scales_[position - start] = bfloat_to_float(scales[1]);
      }
    }
    for (int i = tile.first * kGroup; i < begin - start; ++i) value_scales_[i] = 0.0f;
    for (int i = end - start; i < tile.last * kGroup; ++i) value_scales_[i] = 0.0f;
  }

  // Attend to keys begin .. end, which are in one chunk; the result goes to `states`.
  void reduce(int begin, int end, float* states) {
    for (int head = 0; head < item_.num_heads; ++head) state(states, head).clear(layer_, rows_);
    for (int from = begin, stop; from < end; from = stop) {
      stop = from / kTile * kTile + kTile < end ? from / kTile * kTile + kTile : end;
      const Tile tile = locate(from, stop);
      for (int head = 0; head < item_.num_heads; ++head) {
        if (!layer_.packed()) pack(head, from, stop);
        if constexpr (Op::kScaled) load_scales(tile, head, from, stop);
        reduce_tile(tile, from / kTile * kTile, stop, head, state(states, head));
      }
    }
  }

  // Process the tile that starts at key `start`, up to key `stop`, for one head.
  void reduce_tile(const Tile& tile, int start, int stop, int head, State state) {
    const int64_t offset = layer_.packed() ? head * layer_.panel_bytes() : 0;
    const int vectors = (tile.last - tile.first) * kGroupVectors, first = tile.first * kGroup;
    const char* keys[kTileGroups * kGroupVectors];
    for (int i = 0; i < vectors; ++i) {
      keys[i] = tile.keys[tile.first + i / kGroupVectors] + (i % kGroupVectors) * kLanes * Op::kLaneBytes;
    }
    score_tile<Op>(queries_ + head * query_elems_, rows_, keys, offset, vectors, layer_.key_size / Op::kDepth,
                   scores_ + first);
    for (int row = 0; row < rows_; ++row) {
      if constexpr (Op::kScaled) {
        scale_scores(row, first, tile.last * kGroup, query_scales_[head * padded_rows(rows_) + row]);
      }
      softmax(row, start, first, tile.last * kGroup, tile.values, offset + kAhead, state);
    }
    const ValueTile values = {tile.values + tile.first, offset,
                              (Op::kScaled ? tile.last * kGroup : stop - start) - first,
                              int64_t(layer_.value_size) * Op::kLaneBytes};
    value_tile<Op>(weights_ + first, rows_, values, (layer_.value_size + kLanes - 1) / kLanes,
                   {rescale_, weight_scales_}, state.values, padded_value_size(layer_));
  }

  void scale_scores(int row, int begin, int end, float factor) {
    float* scores = scores_ + int64_t(row) * kTile;
    for (int i = begin; i < end; i += kLanes) store(scores + i, load(scores + i) * (load(key_scales_ + i) * factor));
  }

  // Turn columns begin .. end of a row's scores into weights; the tile starts at key `start`.  Prefetches
  // from ahead[group] + offset.
  void softmax(int row, int start, int begin, int end, const char* const* ahead, int64_t offset, State& state) {
    const int position = shared_ == nullptr ? first_position_ + row / group_ : first_position_;
    const int behind = (layer_.both_ways ? end_position_ : position + 1) - start;
    const int before = layer_.sliding_window > 0 ? behind - layer_.sliding_window : 0;
    const int first = before > begin ? before : begin, last = behind < end ? behind : end;
    float* scores = scores_ + int64_t(row) * kTile;
    Elem* weights = weights_ + int64_t(row) * kTile;
    if (first >= last) {
      rescale_[row] = 1.0f;
      weight_scales_[row] = 0.0f;
      std::memset(weights + begin, 0, (end - begin) * sizeof(Elem));
      return;
    }
    if (layer_.softcap > 0) cap(scores, begin, end);
    for (int i = begin; i < first; ++i) scores[i] = -INFINITY;
    for (int i = last; i < end; ++i) scores[i] = -INFINITY;

    Vec top = load(scores + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) top = maximum(top, load(scores + i));
    const float old = state.maximum[row], highest = reduce_max(top) * scale_;
    const float now = highest > old ? highest : old;
    const Vec scale = splat(scale_), shift = splat(finite(now));
    Vec sum = {};
    [[maybe_unused]] UintVec peak = {};
    for (int i = begin; i < end; i += kLanes) {
      if (rows_ <= kFewRows) {
        const char* lines = ahead[i / kGroup] + offset + row * kLinesPerRow * 64;
#pragma GCC unroll 8
        for (int line = 0; line < kLinesPerRow; ++line) prefetch(lines + line * 64);
      }
      Vec weight = exp2<sizeof(Elem) == 4>(load(scores + i) * scale - shift);
      sum += weight;
      if constexpr (Op::kScaled) weight *= load(value_scales_ + i);
      if constexpr (Op::kQuantized) {
        peak = maximum_bits(peak, weight);
        store(scores + i, weight);
      } else {
        store_weights(weights + i, weight);
      }
    }
    if constexpr (Op::kQuantized) {
      weight_scales_[row] =
          quantize_words(scores + begin, weights + begin, end - begin, reduce_max_bits(peak), kWordLevels);
    }
    rescale_[row] = now == old ? 1.0f : exp2f(old - finite(now));
    state.maximum[row] = now;
    state.sum[row] = state.sum[row] * rescale_[row] + reduce_add(sum);
  }

  // softcap * tanh(score * scaling / softcap)
  void cap(float* scores, int begin, int end) {
    const float inner = layer_.scaling / layer_.softcap;
    for (int i = begin; i < end; i += kLanes) store(scores + i, tanh(load(scores + i) * inner) * layer_.softcap);
  }

  void add(State total, const State& part) {
    const int64_t size = padded_value_size(layer_);
    for (int row = 0; row < rows_; ++row) {
      const float now = part.maximum[row] > total.maximum[row] ? part.maximum[row] : total.maximum[row];
      const float mine = exp2f(total.maximum[row] - finite(now)), theirs = exp2f(part.maximum[row] - finite(now));
      float* to = total.values + row * size;
      const float* from = part.values + row * size;
      for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(to + i) * mine + load(from + i) * theirs);
      total.maximum[row] = now;
      total.sum[row] = total.sum[row] * mine + part.sum[row] * theirs;
    }
  }

  void write_out(int kv_head, const State& state) {
    const int64_t size = padded_value_size(layer_), row_bytes = layer_.value_size * element_size(call_.query.dtype);
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = first_token_ + row / group_, head = query_head(kv_head, row);
      float factor = 1.0f, sum = state.sum[row];
      if (call_.sinks != nullptr) {
        const float sink = call_.sinks[head] * kLog2e;
        const float now = sink > state.maximum[row] ? sink : state.maximum[row];
        factor = exp2f(state.maximum[row] - now);
        sum = sum * factor + exp2f(sink - now);
      }
      factor /= sum;
      const float* from = state.values + row * size;
      for (int64_t i = 0; i < size; i += kLanes) store(row_ + i, load(from + i) * factor);
      row_from_floats(row_, call_.query.dtype, call_.out + (token * layer_.num_heads + head) * row_bytes,
                      layer_.value_size);
    }
  }

  const Call& call_;
  const Layer& layer_;
  const Item& item_;
  const SharedQuery* shared_;  // of an item with queries of several requests
  const int group_, rows_;
  int first_token_, first_position_, end_position_;
  const int32_t* blocks_;
  int64_t state_floats_, query_elems_;  // per head
  float scale_;  // converts a score to the base-2 logarithm of its weight
  Elem *queries_, *weights_, *packed_row_;
  float *query_scales_, *rescale_, *weight_scales_, *key_scales_, *value_scales_, *scores_, *total_, *part_, *row_;
  char *packed_keys_, *packed_values_;
  const char* end_;
};

// Call `function` with the item's kernel for the dtypes of pool and query.
template <class Function>
void with_kernel(const Call& call, const Item& item, char* scratch, const SharedQuery* shared, Function function) {
  switch (call.layer->dtype) {
    case kFloat32: function(ItemKernel<Float32>(call, item, scratch, shared)); return;
    case kFloat16: function(ItemKernel<Float16>(call, item, scratch, shared)); return;
    case kInt8:
#if defined(__AVX2__)
      // A float32 model computes in float32.
      if (call.query.dtype != kFloat32) {
        function(ItemKernel<Int8Dot>(call, item, scratch, shared));
        return;
      }
#endif
      function(ItemKernel<Int8>(call, item, scratch, shared));
      return;
  }
#if defined(__AVX512BF16__)
  if (call.query.dtype == kBfloat16) {
    function(ItemKernel<Bfloat16Dot>(call, item, scratch, shared));
    return;
  }
#endif
  function(ItemKernel<Bfloat16>(call, item, scratch, shared));
}

size_t scratch_bytes(const Call& call, int32_t num_queries, int32_t num_heads) {
  const Item item = {0, 0, num_heads, 0, num_queries, 0, 0, -1};
  size_t result = 0;
  with_kernel(call, item, nullptr, nullptr, [&](auto kernel) { result = reinterpret_cast<size_t>(kernel.scratch_end()); });
  return result;
}

void attend(const Call& call, const Item& item, char* scratch, const Partials* partials) {
  with_kernel(call, item, scratch, nullptr, [&](auto kernel) { kernel.run(partials); });
}

void attend_shared(const Call& call, const Item& item, char* scratch, const SharedQuery* queries) {
  with_kernel(call, item, scratch, queries, [&](auto kernel) { kernel.run_shared(); });
}

void merge(const Call& call, const Item& item, char* scratch, const Partials& partials) {
  with_kernel(call, item, scratch, nullptr, [&](auto kernel) { kernel.merge(partials); });
}

}  // namespace

#define INFLIGHT_STRING_(x) #x
#define INFLIGHT_STRING(x) INFLIGHT_STRING_(x)
extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {INFLIGHT_STRING(INFLIGHT_ISA), scratch_bytes, attend, attend_shared,
                                            merge, write};

}  // namespace INFLIGHT_ISA
}  // namespace inflight
