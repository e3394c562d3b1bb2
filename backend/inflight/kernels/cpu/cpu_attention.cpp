// Attention of one layer: splits a step into items, runs them on torch's OpenMP threads; and its C ABI.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu_shared_prefix.h"
#include "cpu_team.h"

namespace inflight {
namespace {

// Each thread gets at least about this many items, so that none is idle for long at the end.
constexpr int kItemsPerThread = 4;
// The most floats of partial results (64 MB); if they would need more, each request reads all of its keys.
constexpr int64_t kMostPartialFloats = 16 << 20;
// Work, in approximate nanoseconds, below which waking other threads does not pay off.
constexpr double kSerialCost = 8000;

// Results that several items compute for the same queries, each for other chunks.
struct Split {
  Item whole;
  int64_t offset;  // of the partial results, in floats
  Partials partials;
  int32_t left;  // what is unfinished: items, or queries of items for several requests
};

struct Plan {
  SharedPrefixes prefixes;
  std::vector<SharedQuery> queries;
  std::vector<Item> items;
  std::vector<Split> splits;
  std::vector<int32_t> order;
  std::vector<int32_t> own;  // of each request: the first chunk that it does not share, and its split if it shares some
  std::vector<int32_t> split_of;
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
    make(true);
    if (plan_.partial_floats > kMostPartialFloats && !plan_.prefixes.runs().empty()) make(false);
  }

 private:
  void make(bool share) {
    plan_.items.clear();
    plan_.splits.clear();
    plan_.queries.clear();
    plan_.partial_floats = 0;
    plan_.scratch_bytes = 0;
    plan_.cost = 0;
    find_shared(share);
    order_requests();
    for (const SharedRun& run : plan_.prefixes.runs()) add_shared(run);
    // Expensive items first, so that only small ones remain at the end.
    for (const int32_t request : plan_.order) {
      const int32_t queries = num_queries(request);
      const int32_t heads = heads_for(std::min(queries, per_item_));
      for (int32_t head = 0; head < layer_.num_kv_heads; head += heads) {
        for (int32_t first = (queries - 1) / per_item_ * per_item_; first >= 0; first -= per_item_) {
          add(request, head, std::min(heads, layer_.num_kv_heads - head), first, std::min(per_item_, queries - first));
        }
      }
    }
  }

  int32_t num_queries(int32_t request) const {
    return call_.batch->query_start_loc[request + 1] - call_.batch->query_start_loc[request];
  }

  // If many queries share the keys, each KV head is a separate item.
  int32_t heads_for(int32_t queries) const { return std::max(1, kRowsOfHeads / (queries * group_)); }

  // Approximate nanoseconds of an item: reading keys and values, and multiplying.
  double cost(int64_t keys, int32_t count) const {
    return 300.0 + keys * elements_ * (element_size(layer_.dtype) / 25.0 + count * group_ / 64.0);
  }

  // Keys that these queries attend to, and share with no other request.
  Span own_keys(int32_t request, int32_t first, int32_t count) const {
    const Span span = visible_keys(call_, request, first, count);
    return {std::max(span.begin, plan_.own[request] * kChunk), span.end};
  }

  // The parts into which items of this cost are divided, so that all threads have work until the end.
  double parts(double cost) const {
    return threads_ == 1 ? 0 : cost / std::max(plan_.cost / (threads_ * kItemsPerThread), kSerialCost);
  }

  void find_shared(bool share) {
    plan_.own.assign(call_.batch->num_requests, 0);
    plan_.split_of.assign(call_.batch->num_requests, -1);
    // A request with more queries than half an item's reads its keys once for many rows already.
    const bool possible = share && !layer_.both_ways && layer_.sliding_window == 0;
    plan_.prefixes.find(*call_.batch, layer_.block_size, possible ? per_item_ / 2 : 0);
    for (const SharedRun& run : plan_.prefixes.runs()) {
      const int32_t queries = queries_of(run), items = (queries + per_item_ - 1) / per_item_;
      plan_.cost += cost(int64_t(run.num_chunks) * kChunk, queries / items) * items * layer_.num_kv_heads;
      for (int32_t i = 0; i < run.count; ++i) plan_.own[member(run, i)] = run.first_chunk + run.num_chunks;
    }
  }

  int32_t member(const SharedRun& run, int32_t i) const { return plan_.prefixes.requests()[run.first + i]; }

  int32_t queries_of(const SharedRun& run) const {
    int32_t count = 0;
    for (int32_t i = 0; i < run.count; ++i) count += num_queries(member(run, i));
    return count;
  }

  void order_requests() {
    const int64_t count = call_.batch->num_requests;
    plan_.order.clear();
    plan_.costs.assign(count, 0);
    for (int32_t request = 0; request < count; ++request) {
      const int32_t queries = num_queries(request);
      if (queries == 0) continue;
      for (int32_t first = 0; first < queries; first += per_item_) {
        const int32_t here = std::min(per_item_, queries - first);
        const Span span = own_keys(request, first, here);
        plan_.costs[request] = cost(span.end - span.begin, here);
        plan_.cost += plan_.costs[request] * layer_.num_kv_heads;
      }
      plan_.order.push_back(request);
    }
    std::sort(plan_.order.begin(), plan_.order.end(), [&](int32_t a, int32_t b) {
      return plan_.costs[a] != plan_.costs[b] ? plan_.costs[a] > plan_.costs[b] : a < b;
    });
  }

  // Add items for the queries of all requests of a run: as many queries in each as share a pass over the keys.
  void add_shared(const SharedRun& run) {
    const int32_t queries = queries_of(run), pieces = (queries + per_item_ - 1) / per_item_;
    const int32_t per_piece = (queries + pieces - 1) / pieces;
    const int32_t heads = std::min(heads_for(per_piece), layer_.num_kv_heads);
    const double share = parts(cost(int64_t(run.num_chunks) * kChunk, per_piece) * heads);
    const int32_t chunks = share < 1.5 ? run.num_chunks : std::max(1, int32_t(run.num_chunks / share));
    // Results of the first chunks are added up as they are computed: in the order of the keys, as everywhere.
    if (run.first_chunk == 0) split_requests(run, std::min(chunks, run.num_chunks));
    const auto begin = int32_t(plan_.queries.size());
    for (int32_t i = 0; i < run.count; ++i) {
      const int32_t request = member(run, i), count = num_queries(request);
      for (int32_t query = 0; query < count; ++query) {
        const int32_t token = call_.batch->query_start_loc[request] + query;
        plan_.queries.push_back({token, query, count, plan_.split_of[request], nullptr});
      }
    }
    Item item = {member(run, 0), 0, heads, begin, per_piece, run.first_chunk, 0, kShared};
    need_scratch(per_piece, heads);
    for (; item.first_chunk < run.first_chunk + run.num_chunks; item.first_chunk += chunks) {
      item.num_chunks = std::min(chunks, run.first_chunk + run.num_chunks - item.first_chunk);
      for (item.first_head = 0; item.first_head < layer_.num_kv_heads; item.first_head += heads) {
        item.num_heads = std::min(heads, layer_.num_kv_heads - item.first_head);
        for (int32_t first = 0; first < queries; first += per_piece) {
          item.first_query = begin + first;
          item.num_queries = std::min(per_piece, queries - first);
          plan_.items.push_back(item);
          for (int32_t i = 0; i < item.num_queries; ++i) ++plan_.splits[plan_.queries[item.first_query + i].split].left;
        }
      }
    }
  }

  // The results of each request of a run are collected; the first partial result is that of `folded` chunks.
  void split_requests(const SharedRun& run, int32_t folded) {
    for (int32_t i = 0; i < run.count; ++i) {
      const int32_t request = member(run, i), queries = num_queries(request);
      const Span span = visible_keys(call_, request, 0, queries);
      const int32_t chunks = (span.end + kChunk - 1) / kChunk;
      plan_.split_of[request] =
          add_split({request, 0, layer_.num_kv_heads, 0, queries, folded - 1, chunks - (folded - 1), -1});
      need_scratch(queries, layer_.num_kv_heads);
    }
  }

  void need_scratch(int32_t queries, int32_t heads) {
    plan_.scratch_bytes = std::max(plan_.scratch_bytes, attention_kernels().scratch_bytes(call_, queries, heads));
  }

  // Add items for these queries: a single one if it is small enough, else one per few heads, else per few chunks.
  void add(int32_t request, int32_t first_head, int32_t heads, int32_t first, int32_t count) {
    const Span span = own_keys(request, first, count);
    Item item = {request, first_head, heads, first, count, span.begin / kChunk, 0, plan_.split_of[request]};
    item.num_chunks = (span.end + kChunk - 1) / kChunk - item.first_chunk;
    const double parts = this->parts(cost(span.end - span.begin, count));  // per head
    item.num_heads = parts * heads > 1 ? std::max(1, int32_t(1 / parts)) : heads;
    need_scratch(count, item.num_heads);
    for (; item.first_head < first_head + heads; item.first_head += item.num_heads) {
      item.num_heads = std::min(item.num_heads, first_head + heads - item.first_head);
      const bool whole = parts < 1.5 || item.num_chunks == 1;
      if (whole && item.split < 0) {
        plan_.items.push_back(item);
        continue;
      }
      Item piece = item;
      if (piece.split < 0) piece.split = add_split(item);
      cut(piece, whole ? item.num_chunks : std::max(1, int32_t(item.num_chunks / parts)));
    }
  }

  int32_t add_split(const Item& whole) {
    const int64_t floats = partial_floats(layer_, int64_t(whole.num_queries) * group_) * whole.num_heads;
    const Partials partials = {nullptr, floats, whole.first_chunk, whole.num_chunks, whole.first_head};
    plan_.splits.push_back({whole, plan_.partial_floats, partials, 0});
    plan_.partial_floats += floats * whole.num_chunks;
    return int32_t(plan_.splits.size()) - 1;
  }

  // Divide an item of a split into items of a few chunks.
  void cut(Item item, int32_t chunks) {
    const int32_t end = item.first_chunk + item.num_chunks;
    for (; item.first_chunk < end; item.first_chunk += chunks) {
      item.num_chunks = std::min(chunks, end - item.first_chunk);
      plan_.items.push_back(item);
      ++plan_.splits[item.split].left;
    }
  }

  const Call& call_;
  const Layer& layer_;
  const int32_t threads_, group_;
  int32_t per_item_;
  double elements_;
  Plan& plan_;
};

// The thread that finishes last adds up the partial results, in the order of the keys.
void finish(const Call& call, Split& split, char* scratch) {
  if (__atomic_sub_fetch(&split.left, 1, __ATOMIC_ACQ_REL) == 0) {
    attention_kernels().merge(call, split.whole, scratch, split.partials);
  }
}

void run_item(const Call& call, Plan& plan, const Item& item, char* scratch) {
  if (item.split == kShared) {
    const SharedQuery* queries = plan.queries.data() + item.first_query;
    attention_kernels().attend_shared(call, item, scratch, queries);
    for (int32_t i = 0; i < item.num_queries; ++i) finish(call, plan.splits[queries[i].split], scratch);
  } else if (item.split >= 0) {
    Split& split = plan.splits[item.split];
    attention_kernels().attend(call, item, scratch, &split.partials);
    finish(call, split, scratch);
  } else {
    attention_kernels().attend(call, item, scratch, nullptr);
  }
}

}  // namespace

struct TeamAttention::State {
  Call call;
  Plan plan;
  Buffer partials;
  std::atomic<size_t> next;
};

TeamAttention::TeamAttention() : state_(new State) {}
TeamAttention::~TeamAttention() { delete state_; }

// Keys, times KV heads, that the items of a call pass over.
int64_t keys_read(const Call& call, int threads) {
  Plan plan;
  Planner(call, threads, plan).make();
  int64_t count = 0;
  for (const Item& item : plan.items) {
    int64_t end = int64_t(item.first_chunk + item.num_chunks) * kChunk, begin = int64_t(item.first_chunk) * kChunk;
    if (item.split != kShared) {
      const Span span = visible_keys(call, item.request, item.first_query, item.num_queries);
      begin = std::max<int64_t>(begin, span.begin);
      end = std::min<int64_t>(end, span.end);
    }
    count += (end - begin) * item.num_heads;
  }
  return count;
}

bool TeamAttention::plan(const Call& call, int threads) {
  state_->call = call;
  Planner(call, threads, state_->plan).make();
  auto* memory = reinterpret_cast<float*>(state_->partials.get(state_->plan.partial_floats * sizeof(float)));
  for (Split& split : state_->plan.splits) split.partials.data = memory + split.offset;
  for (SharedQuery& query : state_->plan.queries) query.partials = &state_->plan.splits[query.split].partials;
  state_->next.store(0, std::memory_order_relaxed);
  return state_->plan.cost >= kSerialCost;
}

void TeamAttention::work() {
  thread_local Buffer buffer;
  Plan& plan = state_->plan;
  char* scratch = buffer.get(plan.scratch_bytes);
  for (size_t i; (i = state_->next.fetch_add(1, std::memory_order_relaxed)) < plan.items.size();) {
    run_item(state_->call, plan, plan.items[i], scratch);
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

int64_t inflight_attention_keys(const Layer* layer, const Batch* batch, int32_t threads) {
  return keys_read({layer, batch, {}, nullptr, nullptr}, threads);
}

}  // extern "C"
#pragma GCC visibility pop
