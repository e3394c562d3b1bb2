// Attention of one layer: splits a step into items, runs them on torch's OpenMP threads; and its C ABI.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu_team.h"

namespace inflight {
namespace {

// Each thread gets at least about this many items, so that none is idle for long at the end.
constexpr int kItemsPerThread = 4;
// Work, in approximate nanoseconds, below which waking other threads does not pay off.
constexpr double kSerialCost = 8000;

// Items that share their queries and cover consecutive runs of chunks.
struct Split {
  Item whole;
  int64_t offset;  // of the partial results, in floats
  int64_t floats;  // per partial result
  int32_t left;    // unfinished items
};

struct Plan {
  std::vector<Item> items;
  std::vector<Split> splits;
  std::vector<int32_t> order;
  std::vector<double> costs;
  int64_t partial_floats;
  size_t scratch_bytes;
  double cost;
};

class Planner {
 public:
  Planner(const Call& call, int threads, Plan& plan)
      : call_(call), layer_(*call.layer), threads_(threads), group_(layer_.group_size()), plan_(plan) {
    per_item_ = std::max(1, kRowsPerItem / group_);
    elements_ = layer_.key_size + layer_.value_size;
  }

  void make() {
    plan_.items.clear();
    plan_.splits.clear();
    plan_.partial_floats = 0;
    plan_.scratch_bytes = 0;
    order_requests();
    // Expensive items first, so that only small ones remain at the end.
    for (const int32_t request : plan_.order) {
      const int32_t queries = num_queries(request);
      // If many queries share the keys, each KV head is a separate item.
      const int32_t heads = std::max(1, kRowsOfHeads / (std::min(queries, per_item_) * group_));
      for (int32_t head = 0; head < layer_.num_kv_heads; head += heads) {
        for (int32_t first = (queries - 1) / per_item_ * per_item_; first >= 0; first -= per_item_) {
          add(request, head, std::min(heads, layer_.num_kv_heads - head), first, std::min(per_item_, queries - first));
        }
      }
    }
  }

 private:
  int32_t num_queries(int32_t request) const {
    return call_.batch->query_start_loc[request + 1] - call_.batch->query_start_loc[request];
  }

  // Approximate nanoseconds of an item: reading keys and values, and multiplying.
  double cost(int32_t request, int32_t first, int32_t count) const {
    const Span span = visible_keys(call_, request, first, count);
    const double per_key = elements_ * (element_size(layer_.dtype) / 25.0 + count * group_ / 64.0);
    return 300.0 + (span.end - span.begin) * per_key;
  }

  void order_requests() {
    const int64_t count = call_.batch->num_requests;
    plan_.order.clear();
    plan_.costs.resize(count);
    plan_.cost = 0;
    for (int32_t request = 0; request < count; ++request) {
      const int32_t queries = num_queries(request);
      if (queries == 0) continue;
      for (int32_t first = 0; first < queries; first += per_item_) {
        plan_.costs[request] = cost(request, first, std::min(per_item_, queries - first));
        plan_.cost += plan_.costs[request] * layer_.num_kv_heads;
      }
      plan_.order.push_back(request);
    }
    std::sort(plan_.order.begin(), plan_.order.end(), [&](int32_t a, int32_t b) {
      return plan_.costs[a] != plan_.costs[b] ? plan_.costs[a] > plan_.costs[b] : a < b;
    });
  }

  // Add items for these queries: a single one if it is small enough, else one per few heads, else per few chunks.
  void add(int32_t request, int32_t first_head, int32_t heads, int32_t first, int32_t count) {
    const Span span = visible_keys(call_, request, first, count);
    Item item = {request, first_head, heads, first, count, span.begin / kChunk, 0, -1};
    item.num_chunks = (span.end + kChunk - 1) / kChunk - item.first_chunk;
    const double target = std::max(plan_.cost / (threads_ * kItemsPerThread), kSerialCost);
    const double parts = threads_ == 1 ? 0 : cost(request, first, count) / target;  // per head
    item.num_heads = parts * heads > 1 ? std::max(1, int32_t(1 / parts)) : heads;
    plan_.scratch_bytes =
        std::max(plan_.scratch_bytes, attention_kernels().scratch_bytes(call_, count, item.num_heads));
    for (; item.first_head < first_head + heads; item.first_head += item.num_heads) {
      item.num_heads = std::min(item.num_heads, first_head + heads - item.first_head);
      if (parts < 1.5 || item.num_chunks == 1) {
        plan_.items.push_back(item);
      } else {
        split(item, std::max(1, int32_t(item.num_chunks / parts)));
      }
    }
  }

  void split(Item whole, int32_t chunks_per_item) {
    const int64_t floats = partial_floats(layer_, int64_t(whole.num_queries) * group_) * whole.num_heads;
    Split split = {whole, plan_.partial_floats, floats, 0};
    plan_.partial_floats += floats * whole.num_chunks;
    Item item = whole;
    item.split = int32_t(plan_.splits.size());
    const int32_t end = whole.first_chunk + whole.num_chunks;
    for (; item.first_chunk < end; item.first_chunk += chunks_per_item) {
      item.num_chunks = std::min(chunks_per_item, end - item.first_chunk);
      plan_.items.push_back(item);
      ++split.left;
    }
    plan_.splits.push_back(split);
  }

  const Call& call_;
  const Layer& layer_;
  const int32_t threads_, group_;
  int32_t per_item_;
  double elements_;
  Plan& plan_;
};

void run_item(const Call& call, Plan& plan, const Item& item, char* scratch, float* memory) {
  if (item.split < 0) {
    attention_kernels().attend(call, item, scratch, nullptr);
    return;
  }
  Split& split = plan.splits[item.split];
  const Partials partials = {memory + split.offset, split.floats, split.whole.first_chunk, split.whole.num_chunks};
  attention_kernels().attend(call, item, scratch, &partials);
  // The thread that finishes last adds up the partial results, in the order of the keys.
  if (__atomic_sub_fetch(&split.left, 1, __ATOMIC_ACQ_REL) == 0) {
    attention_kernels().merge(call, split.whole, scratch, partials);
  }
}

}  // namespace

struct TeamAttention::State {
  Call call;
  Plan plan;
  Buffer partials;
  float* memory;
  std::atomic<size_t> next;
};

TeamAttention::TeamAttention() : state_(new State) {}
TeamAttention::~TeamAttention() { delete state_; }

bool TeamAttention::plan(const Call& call, int threads) {
  state_->call = call;
  Planner(call, threads, state_->plan).make();
  state_->memory = reinterpret_cast<float*>(state_->partials.get(state_->plan.partial_floats * sizeof(float)));
  state_->next.store(0, std::memory_order_relaxed);
  return state_->plan.cost >= kSerialCost;
}

void TeamAttention::work() {
  thread_local Buffer buffer;
  Plan& plan = state_->plan;
  char* scratch = buffer.get(plan.scratch_bytes);
  for (size_t i; (i = state_->next.fetch_add(1, std::memory_order_relaxed)) < plan.items.size();) {
    run_item(state_->call, plan, plan.items[i], scratch, state_->memory);
  }
}

}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

void inflight_attention_write(const Layer* layer, const Batch* batch, const char* key, int64_t key_token_stride,
                              int64_t key_head_stride, const char* value, int64_t value_token_stride,
                              int64_t value_head_stride, int32_t dtype, int32_t threads) {
  constexpr int64_t kTokens = 64;
  const Rows keys = {key, key_token_stride, key_head_stride, dtype};
  const Rows values = {value, value_token_stride, value_head_stride, dtype};
  const int64_t runs = (batch->num_tokens + kTokens - 1) / kTokens, pieces = runs * layer->num_kv_heads;
  const double elements = double(batch->num_tokens) * layer->num_kv_heads * (layer->key_size + layer->value_size);
  std::atomic<int64_t> next{0};
  run_team(elements / 2 < kSerialCost ? 1 : threads, [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      const int64_t begin = i % runs * kTokens, end = std::min(begin + kTokens, batch->num_tokens);
      const int32_t head = int32_t(i / runs);
      attention_kernels().write(*layer, *batch, keys, values, begin, end, head, head + 1);
    }
  });
}

void inflight_attention_attend(const Layer* layer, const Batch* batch, const char* query, int64_t query_token_stride,
                               int64_t query_head_stride, int32_t dtype, char* out, const float* sinks,
                               int32_t threads) {
  thread_local TeamAttention attention;
  TeamAttention& shared = attention;  // the calling thread's, used by the whole team
  const Rows rows = {query, query_token_stride, query_head_stride, dtype};
  const bool pays_off = shared.plan({layer, batch, rows, out, sinks}, threads);
  run_team(pays_off ? threads : 1, [&] { shared.work(); });
}

}  // extern "C"
#pragma GCC visibility pop
