// The layers of an encoder like BERT as one parallel region: attention that looks both ways, output projection, layer
// norm, MLP with GELU, layer norm.  Like the decoder's pass (cpu_decoder.cpp): between two attentions each thread takes
// chunks of tokens, and in a short step all threads divide the panels of every product.
//
// Keys and values live in a scratch pool, as long as their layer.
#include <algorithm>

#include "cpu_ops.h"
#include "cpu_work.h"

namespace inflight {
namespace {

constexpr int64_t kChunkRows = 168;  // one chunk of the products; fewer read the panels too often

struct EncoderLayer {
  Linear qkv, output, up, down;
  const float* attention_norm;  // weight and bias of the norm behind attention, [hidden_size]
  const float* attention_shift;
  const float* norm;  // of the one behind the MLP
  const float* shift;
};

struct Encoder {
  const EncoderLayer* layers;
  int64_t num_layers;
  int64_t hidden_size;
  int64_t num_heads;
  float scaling;
  float eps;
};

class Pass {
 public:
  // hidden: [tokens, hidden_size], in place.
  Pass(const Encoder& encoder, const int32_t* starts, int64_t requests, float* hidden, Team& team)
      : encoder_(encoder), team_(team), kernels_(ops_kernels()), starts_(starts), requests_(requests),
        count_(starts[requests]), size_(encoder.hidden_size), width_(encoder.layers->qkv.out_features),
        middle_width_(encoder.layers->up.out_features), hidden_(hidden) {
    for (int64_t i = 0; i < requests; ++i) {
      const int64_t blocks = padded(starts[i + 1] - starts[i], kGroup) / kGroup;
      blocks_ += blocks;
      most_blocks_ = std::max(most_blocks_, blocks);
    }
    const int32_t heads = int32_t(encoder.num_heads), head_size = int32_t(size_ / heads);
    attention_layer_ = {nullptr, kGroup, kFloat32, heads, heads, head_size, head_size, 0, encoder.scaling, 0.0f, 1};
  }

  // Returns: bytes of the workspace.
  size_t lay_out(char* memory) {
    Arena arena(memory);
    qkv_ = reinterpret_cast<float*>(arena.take(count_ * width_ * sizeof(float)));
    attended_ = reinterpret_cast<float*>(arena.take(count_ * size_ * sizeof(float)));
    middle_ = reinterpret_cast<float*>(arena.take(kChunkRows * team_.size() * middle_width_ * sizeof(float)));
    attention_layer_.pool = arena.take(blocks_ * encoder_.num_heads * attention_layer_.panel_bytes() + 64);
    block_table_ = reinterpret_cast<int32_t*>(arena.take(requests_ * most_blocks_ * sizeof(int32_t)));
    lengths_ = reinterpret_cast<int32_t*>(arena.take(requests_ * sizeof(int32_t)));
    slots_ = reinterpret_cast<int64_t*>(arena.take(count_ * sizeof(int64_t)));
    return arena.end() - memory;
  }

  // Give each request blocks of its own.
  void place() {
    int64_t block = 0;
    for (int64_t i = 0; i < requests_; ++i) {
      const int64_t length = starts_[i + 1] - starts_[i], blocks = padded(length, kGroup) / kGroup;
      lengths_[i] = int32_t(length);
      for (int64_t n = 0; n < blocks; ++n) block_table_[i * most_blocks_ + n] = int32_t(block + n);
      for (int64_t n = 0; n < length; ++n) slots_[starts_[i] + n] = block * kGroup + n;
      block += blocks;
    }
    batch_ = {starts_, lengths_, block_table_, slots_, most_blocks_, requests_, count_};
  }

  // Called by every thread of the team.
  void run(bool leads) {
    thread_local Buffer buffer;
    auto* local = reinterpret_cast<float*>(buffer.get(kChunkRows * middle_width_ * sizeof(float)));
    for (int64_t i = 0; i < encoder_.num_layers; ++i) {
      if (leads) plan();
      over_rows(local, [&](Team* team, float* middle, int64_t begin, int64_t end) {
        if (i > 0) after_attention(team, encoder_.layers[i - 1], middle, begin, end);
        before_attention(team, encoder_.layers[i], begin, end);
      });
      attention_.work();
      team_.barrier();
    }
    over_rows(local, [&](Team* team, float* middle, int64_t begin, int64_t end) {
      after_attention(team, encoder_.layers[encoder_.num_layers - 1], middle, begin, end);
    });
  }

 private:
  template <class Function>
  void over_rows(float* local, Function function) {
    if (count_ <= kChunkRows * team_.size()) return function(&team_, middle_, int64_t(0), count_);
    const int64_t unit = kChunkRows * team_.size(), chunks = (count_ + unit - 1) / unit * team_.size();
    team_.each(chunks, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        function(static_cast<Team*>(nullptr), local, count_ * chunk / chunks, count_ * (chunk + 1) / chunks);
      }
    });
  }

  void plan() {
    const Rows query = {reinterpret_cast<char*>(qkv_), width_, attention_layer_.key_size, kFloat32};
    attention_.plan({&attention_layer_, &batch_, query, reinterpret_cast<char*>(attended_), nullptr}, team_.size());
  }

  void multiply(Team* team, const Linear& linear, const float* x, int64_t rows, Into into, float* to) {
    const Matrix matrix = {reinterpret_cast<const char*>(x), linear.in_features, rows};
    const Result result = {into, reinterpret_cast<char*>(to), linear.out_features, 1.0f, kFloat32};
    each(team, linear.num_panels(),
         [&](int64_t first, int64_t last) { kernels_.multiply(linear, matrix, first, last, result); });
  }

  void norm(Team* team, float* x, int64_t rows, const float* weight, const float* shift) {
    each(team, rows, [&](int64_t begin, int64_t end) {
      kernels_.layer_norm(x + begin * size_, end - begin, size_, weight, shift, encoder_.eps);
    });
  }

  // Projections of tokens begin .. end, whose keys and values go to the pool.
  void before_attention(Team* team, const EncoderLayer& layer, int64_t begin, int64_t end) {
    multiply(team, layer.qkv, hidden_ + begin * size_, end - begin, Into::kActivations, qkv_ + begin * width_);
    const Rows keys = {reinterpret_cast<char*>(qkv_ + size_), width_, attention_layer_.key_size, kFloat32};
    const Rows values = {reinterpret_cast<char*>(qkv_ + 2 * size_), width_, attention_layer_.value_size, kFloat32};
    each(team, end - begin, [&](int64_t first, int64_t last) {
      attention_kernels().write(attention_layer_, batch_, keys, values, begin + first, begin + last, 0,
                                attention_layer_.num_kv_heads);
    });
  }

  void after_attention(Team* team, const EncoderLayer& layer, float* middle, int64_t begin, int64_t end) {
    float* hidden = hidden_ + begin * size_;
    const int64_t rows = end - begin;
    multiply(team, layer.output, attended_ + begin * size_, rows, Into::kResidual, hidden);
    norm(team, hidden, rows, layer.attention_norm, layer.attention_shift);
    multiply(team, layer.up, hidden, rows, Into::kGelu, middle);
    multiply(team, layer.down, middle, rows, Into::kResidual, hidden);
    norm(team, hidden, rows, layer.norm, layer.shift);
  }

  const Encoder& encoder_;
  Team& team_;
  const OpsKernels& kernels_;
  const int32_t* starts_;
  const int64_t requests_, count_, size_, width_, middle_width_;
  int64_t blocks_ = 0, most_blocks_ = 0;
  float *hidden_, *qkv_, *attended_, *middle_;
  int32_t *block_table_, *lengths_;
  int64_t* slots_;
  Layer attention_layer_;
  Batch batch_;
  TeamAttention attention_;
};

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// All layers over the tokens of `requests` whole prompts; hidden: float32 [tokens, hidden_size], replaced in place.
void inflight_ops_encode(const Encoder* encoder, const int32_t* starts, int64_t requests, float* hidden,
                         int32_t threads) {
  thread_local Buffer workspace;
  Team team(threads);
  Pass pass(*encoder, starts, requests, hidden, team);
  pass.lay_out(workspace.get(pass.lay_out(nullptr)));
  pass.place();
  team.run([&](bool leads) { pass.run(leads); });
}

}  // extern "C"
#pragma GCC visibility pop
