// Attention over one item and writing to the pool.  Compiled once per instruction set, into a
// namespace of that name; nothing here may come from a template of the standard library, whose
// instances the linker would share between the sets.
#include <cmath>

#include "cpu_layout.h"
#include "cpu_tiles.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr int kTileGroups = kTile / kGroup;
constexpr int kGroupVectors = kGroup / kLanes;

// Online softmax over some keys, per row: base-2 maximum, sum of weights, weighted values.
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

// Where a tile's groups lie, and their lane vectors one by one.
struct Tile {
  const char* keys[kTileGroups];
  const char* values[kTileGroups];

  void vectors_of(const char* const (&groups)[kTileGroups], int lane_bytes, const char** to) const {
    for (int i = 0; i < kTileGroups * kGroupVectors; ++i) {
      to[i] = groups[i / kGroupVectors] + (i % kGroupVectors) * kLanes * lane_bytes;
    }
  }
};

template <class Op>
class ItemKernel {
  using Elem = typename Op::Elem;

 public:
  ItemKernel(const Call& call, const Item& item, char* scratch)
      : call_(call), layer_(*call.layer), item_(item), group_(layer_.group_size()), rows_(item.num_queries * group_) {
    const int32_t* starts = call.batch->query_start_loc + item.request;
    first_token_ = starts[0] + item.first_query;
    first_position_ = call.batch->seq_lens[item.request] - (starts[1] - starts[0]) + item.first_query;
    blocks_ = call.batch->block_table + item.request * call.batch->block_table_stride;
    key_bytes_ = layer_.key_size * element_size(layer_.dtype);
    value_bytes_ = layer_.value_size * element_size(layer_.dtype);
    scale_ = layer_.softcap > 0 ? kLog2e : layer_.scaling * kLog2e;

    const int64_t rows = padded_rows(rows_), state = partial_floats(layer_, rows_);
    queries_ = take<Elem>(scratch, rows * layer_.key_size);
    rescale_ = take<float>(scratch, rows);
    scores_ = take<float>(scratch, rows * kTile);
    weights_ = take<Elem>(scratch, rows * kTile);
    total_ = take<float>(scratch, state);
    part_ = take<float>(scratch, state);
    row_ = take<float>(scratch, layer_.key_size + padded_value_size(layer_));
    packed_keys_ = take<char>(scratch, kTile * key_bytes_);
    packed_values_ = take<char>(scratch, kTile * value_bytes_ + 64);
    end_ = scratch;
  }

  const char* scratch_end() const { return end_; }

  void run(const Partials* partials) {
    const Span span = visible_keys(call_, item_.request, item_.first_query, item_.num_queries);
    pack_queries();
    State total(total_, layer_, rows_);
    for (int chunk = item_.first_chunk; chunk < item_.first_chunk + item_.num_chunks; ++chunk) {
      const int begin = chunk * kChunk > span.begin ? chunk * kChunk : span.begin;
      const int end = (chunk + 1) * kChunk < span.end ? (chunk + 1) * kChunk : span.end;
      if (partials != nullptr) {
        reduce(begin, end, span.end, State(slice(*partials, chunk), layer_, rows_));
      } else if (chunk == item_.first_chunk) {
        reduce(begin, end, span.end, total);
      } else {
        const State part(part_, layer_, rows_);
        reduce(begin, end, span.end, part);
        add(total, part);
      }
    }
    if (partials == nullptr) write_out(total);
  }

  void merge(const Partials& partials) {
    State total(partials.data, layer_, rows_);
    for (int i = 1; i < partials.count; ++i) add(total, State(partials.data + i * partials.floats, layer_, rows_));
    write_out(total);
  }

 private:
  template <class T>
  static T* take(char*& scratch, int64_t count) {
    T* result = reinterpret_cast<T*>(scratch);
    scratch += padded(count * sizeof(T), 64);
    return result;
  }

  static float* slice(const Partials& partials, int chunk) {
    return partials.data + (chunk - partials.first_chunk) * partials.floats;
  }

  // Row r is token r / group of the item, head r % group of the KV head's group.
  void pack_queries() {
    const Rows& query = call_.query;
    Elem* panel = queries_;
    for (int m = 0; m < rows_;) {
      const int block = next_row_block(rows_ - m);
      for (int i = 0; i < block; ++i) {
        auto* row = reinterpret_cast<Elem*>(row_);
        if (m + i < rows_) {
          const int64_t token = first_token_ + (m + i) / group_, head = item_.kv_head * group_ + (m + i) % group_;
          const char* from = query.data + (token * query.token_stride + head * query.head_stride) *
                                              element_size(query.dtype);
          if (sizeof(Elem) == 2) {
            std::memcpy(row, from, layer_.key_size * 2);
          } else {
            row_to_floats(from, query.dtype, row_, layer_.key_size);
          }
        } else {
          std::memset(row, 0, layer_.key_size * sizeof(Elem));
        }
        for (int d = 0; d < layer_.key_size; d += Op::kDepth) {
          std::memcpy(panel + d * block + i * Op::kDepth, row + d, Op::kDepth * sizeof(Elem));
        }
      }
      panel += block * layer_.key_size;
      m += block;
    }
  }

  // Groups first .. last of the tile that starts at key `start`; keys from `end` on do not exist.
  void locate(int start, int first, int last, int end, Tile& tile) {
    for (int g = first; g < last; ++g) {
      const int position = start + g * kGroup;
      if (layer_.packed()) {
        const int64_t block = blocks_[position / layer_.block_size], offset = position % layer_.block_size;
        tile.keys[g] = block_rows(layer_.key, layer_, block, item_.kv_head, key_bytes_) + offset * key_bytes_;
        tile.values[g] = block_rows(layer_.value, layer_, block, item_.kv_head, value_bytes_) + offset * value_bytes_;
      } else {
        tile.keys[g] = packed_keys_ + g * kGroup * key_bytes_;
        tile.values[g] = packed_values_ + g * kGroup * value_bytes_;
        pack_group(position, position + kGroup < end ? position + kGroup : end, g);
      }
    }
  }

  void pack_group(int begin, int end, int g) {
    for (int position = begin; position < end; ++position) {
      const int64_t block = blocks_[position / layer_.block_size], offset = position % layer_.block_size;
      const char* key = block_rows(layer_.key, layer_, block, item_.kv_head, key_bytes_) + offset * key_bytes_;
      const char* value = block_rows(layer_.value, layer_, block, item_.kv_head, value_bytes_) + offset * value_bytes_;
      place_key(packed_keys_ + g * kGroup * key_bytes_, position - begin, key, layer_.dtype, layer_.key_size);
      place_value(packed_values_ + g * kGroup * value_bytes_, position - begin, value, layer_.dtype,
                  layer_.value_size);
    }
  }

  // Attention to keys begin .. end, all in one chunk, into `state`; the sequence goes on until `last`.
  void reduce(int begin, int end, int last, State state) {
    state.clear(layer_, rows_);
    Tile tile = {}, next = {};
    const char *keys[kTileGroups * kGroupVectors], *ahead[kTileGroups * kGroupVectors];
    const int value_vectors = int((layer_.value_size + kLanes - 1) / kLanes);
    bool located = false;
    for (int start = begin / kTile * kTile; start < end; start += kTile) {
      const int from = begin > start ? (begin - start) / kGroup : 0;
      const int stop = end - start < kTile ? end - start : kTile, to = (stop + kGroup - 1) / kGroup;
      if (located) {
        tile = next;
      } else {
        locate(start, from, to, end, tile);
      }
      // While the scores are computed the values come, and meanwhile the next tile's keys.
      tile.vectors_of(tile.keys, Op::kLaneBytes, keys);
      tile.vectors_of(tile.values, Op::kLaneBytes, ahead);
      const int first = from * kGroupVectors, count = (to - from) * kGroupVectors;
      score_tile<Op>(queries_, rows_, keys + first, ahead + first, count, layer_.key_size / Op::kDepth,
                     scores_ + from * kGroup);
      for (int row = 0; row < rows_; ++row) softmax(row, start, from * kGroup, to * kGroup, state);

      located = layer_.packed() && start + kTile < last;
      next = tile;
      if (located) {
        const int left = last - start - kTile;
        locate(start + kTile, 0, left < kTile ? (left + kGroup - 1) / kGroup : kTileGroups, last, next);
      }
      const ValueTile values = {tile.values + from, located ? next.keys + from : tile.values + from,
                                stop - from * kGroup, int64_t(layer_.value_size) * Op::kLaneBytes};
      value_tile<Op>(weights_ + from * kGroup, rows_, values, value_vectors, rescale_, state.values,
                     padded_value_size(layer_));
    }
  }

  // Turn columns begin .. end of a row's scores into weights; the tile starts at key `start`.
  void softmax(int row, int start, int begin, int end, State& state) {
    const int position = first_position_ + row / group_;
    const int behind = position + 1 - start, before = layer_.window > 0 ? behind - layer_.window : 0;
    const int first = before > begin ? before : begin, last = behind < end ? behind : end;
    float* scores = scores_ + int64_t(row) * kTile;
    Elem* weights = weights_ + int64_t(row) * kTile;
    if (first >= last) {
      rescale_[row] = 1.0f;
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
    for (int i = begin; i < end; i += kLanes) {
      const Vec weight = exp2<sizeof(Elem) == 4>(load(scores + i) * scale - shift);
      sum += weight;
      store_weights(weights + i, weight);
    }
    rescale_[row] = now == old ? 1.0f : exp2f(old - finite(now));
    state.maximum[row] = now;
    state.sum[row] = state.sum[row] * rescale_[row] + reduce_add(sum);
  }

  // softcap * tanh(score * scaling / softcap)
  void cap(float* scores, int begin, int end) {
    const float inner = 2.0f * kLog2e * layer_.scaling / layer_.softcap;
    for (int i = begin; i < end; i += kLanes) {
      Vec x = load(scores + i) * inner;
      x = x > 60.0f ? splat(60.0f) : x;
      x = x < -60.0f ? splat(-60.0f) : x;
      store(scores + i, layer_.softcap - (2.0f * layer_.softcap) / (exp2<true>(x) + 1.0f));
    }
  }

  void add(State& total, const State& part) {
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

  void write_out(const State& state) {
    const int64_t size = padded_value_size(layer_), row_bytes = layer_.value_size * element_size(call_.query.dtype);
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = first_token_ + row / group_, head = item_.kv_head * group_ + row % group_;
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
  const int group_, rows_;
  int first_token_, first_position_;
  const int32_t* blocks_;
  int64_t key_bytes_, value_bytes_;
  float scale_;  // from a score to the logarithm, base 2, of its weight
  Elem *queries_, *weights_;
  float *rescale_, *scores_, *total_, *part_, *row_;
  char *packed_keys_, *packed_values_;
  const char* end_;
};

// Call `function` with the item's kernel, by the dtypes of pool and query.
template <class Function>
void with_kernel(const Call& call, const Item& item, char* scratch, Function function) {
  switch (call.layer->dtype) {
    case kFloat32: function(ItemKernel<Float32>(call, item, scratch)); return;
    case kFloat16: function(ItemKernel<Float16>(call, item, scratch)); return;
  }
#if defined(__AVX512BF16__)
  if (call.query.dtype == kBfloat16) {
    function(ItemKernel<Bfloat16Dot>(call, item, scratch));
    return;
  }
#endif
  function(ItemKernel<Bfloat16>(call, item, scratch));
}

size_t scratch_bytes(const Call& call, int64_t rows) {
  const Layer& layer = *call.layer;
  const int64_t queries = rows / layer.group_size();
  const Item item = {0, 0, 0, int32_t(queries), 0, 0, -1};
  size_t result = 0;
  with_kernel(call, item, nullptr,
              [&](auto kernel) { result = reinterpret_cast<size_t>(kernel.scratch_end()); });
  return result;
}

void attend(const Call& call, const Item& item, char* scratch, const Partials* partials) {
  with_kernel(call, item, scratch, [&](auto kernel) { kernel.run(partials); });
}

void merge(const Call& call, const Item& item, char* scratch, const Partials& partials) {
  with_kernel(call, item, scratch, [&](auto kernel) { kernel.merge(partials); });
}

// One row of `rows`, in the pool's dtype; `floats` and `words` hold `size` elements each.
const char* row_as(const Rows& rows, int64_t token, int32_t head, int32_t dtype, int64_t size, float* floats,
                   char* words) {
  const char* from = rows.data + (token * rows.token_stride + head * rows.head_stride) * element_size(rows.dtype);
  if (rows.dtype == dtype) return from;
  row_to_floats(from, rows.dtype, floats, size);
  row_from_floats(floats, dtype, words, size);
  return words;
}

void write(const Layer& layer, const Batch& batch, const Rows& key, const Rows& value, int64_t begin, int64_t end,
           int32_t first_head, int32_t last_head) {
  constexpr int kMaxSize = 1024;
  float floats[kMaxSize];
  char words[kMaxSize * 4];
  const int64_t key_bytes = layer.key_size * element_size(layer.dtype);
  const int64_t value_bytes = layer.value_size * element_size(layer.dtype);
  for (int32_t head = first_head; head < last_head; ++head) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = batch.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / layer.block_size, offset = slot % layer.block_size;
      const int64_t unit = layer.packed() ? kGroup : 1, first = offset / unit * unit;
      char* key_to = block_rows(layer.key, layer, block, head, key_bytes) + first * key_bytes;
      char* value_to = block_rows(layer.value, layer, block, head, value_bytes) + first * value_bytes;
      const char* row = row_as(key, token, head, layer.dtype, layer.key_size, floats, words);
      if (layer.packed()) {
        place_key(key_to, int(offset - first), row, layer.dtype, layer.key_size);
      } else {
        std::memcpy(key_to, row, key_bytes);
      }
      row = row_as(value, token, head, layer.dtype, layer.value_size, floats, words);
      if (layer.packed()) {
        place_value(value_to, int(offset - first), row, layer.dtype, layer.value_size);
      } else {
        std::memcpy(value_to, row, value_bytes);
      }
    }
  }
}

}  // namespace

#define INFLIGHT_STRING_(x) #x
#define INFLIGHT_STRING(x) INFLIGHT_STRING_(x)
extern const Kernels kernels;
const Kernels kernels = {INFLIGHT_STRING(INFLIGHT_ISA), scratch_bytes, attend, merge, write};

}  // namespace INFLIGHT_ISA
}  // namespace inflight
