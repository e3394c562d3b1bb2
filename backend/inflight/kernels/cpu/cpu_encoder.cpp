// The layers of an encoder like BERT as one parallel region: attention that looks both ways, output projection, layer
// norm, MLP with GELU, layer norm.  Like the decoder's pass (cpu_decoder.cpp): between two attentions each thread takes
// chunks of tokens, and in a short step all threads divide the panels of every product.
//
// Keys and values live in a scratch pool, as long as their layer.  Where few rows of the last layer are read, no others
// have queries there, or go on behind its attention.
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
  // read: rows that the last layer computes, ascending; null: all.
  Pass(const Encoder& encoder, const int32_t* starts, int64_t requests, float* hidden, const int64_t* read,
       int64_t num_read, Team& team)
      : encoder_(encoder), team_(team), kernels_(ops_kernels()), starts_(starts), requests_(requests),
        count_(starts[requests]), size_(encoder.hidden_size), width_(encoder.layers->qkv.out_features),
        middle_width_(encoder.layers->up.out_features), read_(read), num_read_(read == nullptr ? 0 : num_read),
        hidden_(hidden) {
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
    picked_ = reinterpret_cast<float*>(arena.take(num_read_ * size_ * sizeof(float)));
    read_starts_ = reinterpret_cast<int32_t*>(arena.take((requests_ + 1) * sizeof(int32_t)));
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
    if (read_ == nullptr) return;
    for (int64_t i = 0; i <= requests_; ++i) {
      read_starts_[i] = int32_t(std::lower_bound(read_, read_ + num_read_, int64_t(starts_[i])) - read_);
    }
    read_batch_ = {read_starts_, lengths_, block_table_, slots_, most_blocks_, requests_, num_read_};
  }

  // Called by every thread of the team.
  void run(bool leads) {
    thread_local Buffer buffer;
    auto* local = reinterpret_cast<float*>(buffer.get(kChunkRows * middle_width_ * sizeof(float)));
    const EncoderLayer* layers = encoder_.layers;
    const int64_t last = encoder_.num_layers - 1;
    for (int64_t i = 0; i <= last; ++i) {
      const bool picks = i == last && read_ != nullptr;
      if (leads) plan(picks ? read_batch_ : batch_);
      over_rows(count_, local, [&](Team* team, float* middle, int64_t begin, int64_t end) {
        if (i > 0) after_attention(team, layers[i - 1], hidden_, middle, begin, end);
        before_attention(team, layers[i], begin, end, picks ? size_ / kPanel : 0);
      });
      if (picks) {
        over_rows(num_read_, local,
                  [&](Team* team, float*, int64_t begin, int64_t end) { pick(team, layers[i], begin, end); });
      }
      attention_.work();
      team_.barrier();
    }
    over_rows(read_ == nullptr ? count_ : num_read_, local, [&](Team* team, float* middle, int64_t begin, int64_t end) {
      after_attention(team, layers[last], read_ == nullptr ? hidden_ : picked_, middle, begin, end);
      if (read_ != nullptr) put_back(team, begin, end);
    });
  }

 private:
  template <class Function>
  void over_rows(int64_t count, float* local, Function function) {
    if (count <= kChunkRows * team_.size()) return function(&team_, middle_, int64_t(0), count);
    const int64_t unit = kChunkRows * team_.size(), chunks = (count + unit - 1) / unit * team_.size();
    team_.each(chunks, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        function(static_cast<Team*>(nullptr), local, count * chunk / chunks, count * (chunk + 1) / chunks);
      }
    });
  }

  void plan(const Batch& batch) {
    const Rows query = {reinterpret_cast<char*>(qkv_), width_, attention_layer_.key_size, kFloat32};
    attention_.plan({&attention_layer_, &batch, query, reinterpret_cast<char*>(attended_), nullptr}, team_.size());
  }

  // Panels begin .. end of a product.
  void multiply(Team* team, const Linear& linear, int64_t begin, int64_t end, const float* x, int64_t rows, Into into,
                float* to) {
    const Matrix matrix = {reinterpret_cast<const char*>(x), linear.in_features, rows};
    const Result result = {into, reinterpret_cast<char*>(to), linear.out_features, 1.0f, kFloat32};
    each(team, end - begin, [&](int64_t first, int64_t last) {
      kernels_.multiply(linear, matrix, begin + first, begin + last, result);
    });
  }

  void multiply(Team* team, const Linear& linear, const float* x, int64_t rows, Into into, float* to) {
    multiply(team, linear, 0, linear.num_panels(), x, rows, into, to);
  }

  void norm(Team* team, float* x, int64_t rows, const float* weight, const float* shift) {
    each(team, rows, [&](int64_t begin, int64_t end) {
      kernels_.layer_norm(x + begin * size_, end - begin, size_, weight, shift, encoder_.eps);
    });
  }

  // Projections of tokens begin .. end, from a panel on; their keys and values go to the pool.
  void before_attention(Team* team, const EncoderLayer& layer, int64_t begin, int64_t end, int64_t panel) {
    multiply(team, layer.qkv, panel, layer.qkv.num_panels(), hidden_ + begin * size_, end - begin, Into::kActivations,
             qkv_ + begin * width_);
    const Rows keys = {reinterpret_cast<char*>(qkv_ + size_), width_, attention_layer_.key_size, kFloat32};
    const Rows values = {reinterpret_cast<char*>(qkv_ + 2 * size_), width_, attention_layer_.value_size, kFloat32};
    each(team, end - begin, [&](int64_t first, int64_t last) {
      attention_kernels().write(attention_layer_, batch_, keys, values, begin + first, begin + last, 0,
                                attention_layer_.num_kv_heads);
    });
  }

  // Queries of the rows read_[begin .. end], one behind the other; all rows had their keys and values there.
  void pick(Team* team, const EncoderLayer& layer, int64_t begin, int64_t end) {
    each(team, end - begin, [&](int64_t first, int64_t last) {
      for (int64_t i = begin + first; i < begin + last; ++i) {
        std::copy_n(hidden_ + read_[i] * size_, size_, picked_ + i * size_);
      }
    });
    multiply(team, layer.qkv, 0, (size_ + kPanel - 1) / kPanel, picked_ + begin * size_, end - begin,
             Into::kActivations, qkv_ + begin * width_);
  }

  void put_back(Team* team, int64_t begin, int64_t end) {
    each(team, end - begin, [&](int64_t first, int64_t last) {
      for (int64_t i = begin + first; i < begin + last; ++i) {
        std::copy_n(picked_ + i * size_, size_, hidden_ + read_[i] * size_);
      }
    });
  }

  // states: [rows, hidden_size], of the rows that have attended.
  void after_attention(Team* team, const EncoderLayer& layer, float* states, float* middle, int64_t begin,
                       int64_t end) {
    float* hidden = states + begin * size_;
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
  const int64_t* read_;
  const int64_t num_read_;
  int64_t blocks_ = 0, most_blocks_ = 0;
  float *hidden_, *qkv_, *attended_, *middle_, *picked_;
  int32_t *block_table_, *lengths_, *read_starts_;
  int64_t* slots_;
  Layer attention_layer_;
  Batch batch_, read_batch_;
  TeamAttention attention_;
};

}  // namespace
}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// All layers over the tokens of `requests` whole prompts; hidden: float32 [tokens, hidden_size], replaced in place.
// read: the rows that must be right afterwards, ascending; null: all.
void inflight_ops_encode(const Encoder* encoder, const int32_t* starts, int64_t requests, float* hidden,
                         const int64_t* read, int64_t num_read, int32_t threads) {
  thread_local Buffer workspace;
  Team team(threads);
  Pass pass(*encoder, starts, requests, hidden, read, num_read, team);
  pass.lay_out(workspace.get(pass.lay_out(nullptr)));
  pass.place();
  team.run([&](bool leads) { pass.run(leads); });
}

}  // extern "C"
#pragma GCC visibility pop
