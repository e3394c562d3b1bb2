// The decoder's forward pass as one parallel region, from embedding to logits, without returning to Python.
//
// Between two attentions everything is local to a token.  A long step is therefore split into chunks of
// tokens; one thread takes each group from one layer's attention to the next one's:
//
//   attend 0 | output, norm, gate_up, down, norm, qkv | attend 1 | ...       one chunk of tokens per thread
//
// In a short step that would make each thread read all weights; there, the threads divide the panels of
// every product among themselves, with a barrier after each.
#include "cpu_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

namespace inflight {
namespace {

// Tokens whose activations stay in a core's second-level cache throughout a layer.
constexpr int64_t kChunkRows = 96;
// Up to this many elements, each thread normalises or quantizes all rows itself instead of waiting for others.
constexpr int64_t kAloneElements = 1 << 15;

// Buffers between two attentions: of one thread, or of the team in a short step.
struct Scratch {
  char* normed;  // [rows, hidden_size] activations
  char* middle;  // [rows, results of gate_up] activations
  char* bytes;   // the operand of weights in codes: rows of bytes, then their groups
  float* inner;  // [rows, Tokens::inner] of adapters
  bool alone;    // normed and bytes are per thread, with the same contents on all
};

// The operand of codes: rows of activations in bytes.
Matrix quantized(Team* team, const Linear& linear, const Matrix& x, int32_t dtype, const Scratch& scratch) {
  const int64_t size = linear.in_features, element = element_size(dtype);
  auto* bytes = reinterpret_cast<int8_t*>(scratch.bytes);
  auto* groups = reinterpret_cast<GroupSums*>(scratch.bytes + padded(x.rows * size, 64));
  each(scratch.alone ? nullptr : team, x.rows, [&](int64_t first, int64_t last) {
    const Quantized to = {bytes + first * size, groups + first, x.rows, linear.input_group, linear.order};
    ops_kernels().quantize(x.data + first * size * element, dtype, last - first, size, to);
  });
  return {scratch.bytes, size, x.rows, groups};
}

void multiply(Team* team, const Linear& linear, const Matrix& x, Result result, const Scratch& scratch) {
  Matrix bytes = {};
  const Linear* quantized_for = nullptr;
  const int64_t element = result.into == Into::kActivations ? element_size(result.dtype) : sizeof(float);
  for (const Linear* part = &linear; part != nullptr; part = part->next) {
    if (part->has_codes() && (quantized_for == nullptr || part->input_group != quantized_for->input_group ||
                              part->order != quantized_for->order)) {
      bytes = quantized(team, *part, x, result.dtype, scratch);
      quantized_for = part;
    }
    const Matrix& operand = part->has_codes() ? bytes : x;
    each(team, part->num_panels(),
         [&](int64_t first, int64_t last) { ops_kernels().multiply(*part, operand, first, last, result); });
    result.data += part->num_results() * element;
    ++result.part;
  }
}

// A layer's projection of rows whose adapters are `adapters`; null: none has one.
void multiply(Team* team, const Linear& linear, const Matrix& x, Result result, const Scratch& scratch,
              AdapterRows* adapters, int64_t layer, Projection projection) {
  if (adapters != nullptr) {
    adapters->shrink(layer, projection, x, element_size(result.dtype),
                     [&](int64_t count, auto function) { each(team, count, function); });
    result.deltas = adapters->deltas(layer, projection);
  }
  multiply(team, linear, x, result, scratch);
}

int64_t quantized_bytes(int64_t rows, int64_t size) {
  return padded(rows * size, 64) + rows * ((size + kFinestGroup - 1) / kFinestGroup) * int64_t(sizeof(GroupSums));
}

class Pass {
 public:
  Pass(const Decoder& decoder, const Tokens& tokens, Team& team)
      : decoder_(decoder), tokens_(tokens), team_(team), kernels_(ops_kernels()), count_(tokens.batch->num_tokens) {
    dtype_ = kernels_.activation_dtype(decoder.dtype);
    element_ = element_size(dtype_);
    const Layer& attention = *decoder.layers->attention;
    query_width_ = int64_t(attention.num_heads) * attention.key_size;
    key_width_ = int64_t(attention.num_kv_heads) * attention.key_size;
    width_ = decoder.layers->qkv.all_results();
    out_width_ = decoder.layers->output.in_features;
    middle_width_ = decoder.layers->down.in_features;
    if (tokens.adapters == nullptr) return;
    for (int64_t i = 0; i < num_selected(); ++i) selected_adapters_.push_back(tokens.adapters[selected(i)]);
  }

  // Returns: bytes of the workspace.
  size_t lay_out(char* memory) {
    Arena arena(memory);
    const int64_t hidden_bytes = decoder_.hidden_size * sizeof(float);
    hidden_ = reinterpret_cast<float*>(arena.take(count_ * hidden_bytes));
    cos_ = reinterpret_cast<float*>(arena.take(count_ * decoder_.rotary_size / 2 * sizeof(float)));
    sin_ = reinterpret_cast<float*>(arena.take(count_ * decoder_.rotary_size / 2 * sizeof(float)));
    qkv_ = arena.take(count_ * width_ * element_);
    attended_ = arena.take(count_ * out_width_ * element_);
    selected_hidden_ = reinterpret_cast<float*>(arena.take(num_selected() * hidden_bytes));
    selected_attended_ = arena.take(num_selected() * out_width_ * element_);
    scratch_ = take_scratch(arena, kChunkRows * team_.size());
    return arena.end() - memory;
  }

  size_t scratch_bytes() const {
    Arena arena(nullptr);
    take_scratch(arena, kChunkRows);
    return reinterpret_cast<size_t>(arena.end());
  }

  // Called by every thread of the team.
  void run(bool leads) {
    thread_local Buffer buffer;
    Arena arena(buffer.get(scratch_bytes()));
    const Scratch local = take_scratch(arena, kChunkRows);
    embed();
    for (int64_t i = 0; i < decoder_.num_layers; ++i) {
      if (leads) plan(decoder_.layers[i]);
      over_rows(count_, local, [&](Team* team, const Scratch& scratch, int64_t begin, int64_t end) {
        std::optional<AdapterRows> adapters = adapters_of(tokens_.adapters, scratch, begin, end);
        AdapterRows* rows = adapters ? &*adapters : nullptr;
        if (i > 0) after_attention(team, i - 1, {hidden_, attended_}, scratch, rows, begin, end);
        before_attention(team, i, scratch, rows, begin, end);
      });
      attention_.work();
      team_.barrier();
    }
    if (num_selected() > 0) finish(local);
  }

 private:
  int64_t num_selected() const { return tokens_.num_logits + tokens_.num_hidden; }

  // The i-th requested token.
  int64_t selected(int64_t i) const {
    const int64_t other = i - tokens_.num_logits;
    return other < 0 ? tokens_.logits_indices[i] : tokens_.hidden_indices[other];
  }

  // Of rows begin .. end, if one of them has an adapter.
  std::optional<AdapterRows> adapters_of(const Adapter* const* adapters, const Scratch& scratch, int64_t begin,
                                         int64_t end) const {
    if (adapters == nullptr) return std::nullopt;
    AdapterRows rows(adapters + begin, end - begin, scratch.inner, tokens_.inner);
    if (rows.empty()) return std::nullopt;
    return rows;
  }

  struct Stream {
    float* hidden;
    char* attended;
  };

  Scratch take_scratch(Arena& arena, int64_t rows) const {
    char* normed = arena.take(rows * decoder_.hidden_size * element_);
    char* middle = arena.take(rows * middle_width_ * element_);
    const int64_t widest = std::max({decoder_.hidden_size, middle_width_, out_width_});
    char* bytes = arena.take(quantized_bytes(rows, widest));
    return {normed, middle, bytes, reinterpret_cast<float*>(arena.take(rows * tokens_.inner * sizeof(float))), false};
  }

  // Divide the rows into chunks, one thread each; if they are few, process them together.
  template <class Function>
  void over_rows(int64_t rows, const Scratch& local, Function function) {
    if (rows <= kChunkRows * team_.size()) {
      const bool alone = rows <= kChunkRows && rows * decoder_.hidden_size <= kAloneElements;
      const Scratch mixed = {local.normed, scratch_.middle, local.bytes, scratch_.inner, true};
      function(&team_, alone ? mixed : scratch_, int64_t(0), rows);
      return;
    }
    const int64_t unit = kChunkRows * team_.size(), chunks = (rows + unit - 1) / unit * team_.size();
    team_.each(chunks, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        function(static_cast<Team*>(nullptr), local, rows * chunk / chunks, rows * (chunk + 1) / chunks);
      }
    });
  }

  void embed() {
    const int64_t size = decoder_.hidden_size, half = decoder_.rotary_size / 2;
    team_.each(count_, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const char* row = decoder_.embedding + tokens_.input_ids[token] * size * element_size(decoder_.dtype);
        kernels_.to_floats(row, decoder_.dtype, decoder_.embedding_factor, hidden_ + token * size, size);
        const float position = float(tokens_.positions[token]);
        for (int64_t i = 0; i < half; ++i) {
          const float angle = position * decoder_.inverse_frequencies[i];
          cos_[token * half + i] = std::cos(angle) * decoder_.rotary_scaling;
          sin_[token * half + i] = std::sin(angle) * decoder_.rotary_scaling;
        }
      }
    });
  }

  void norm(Team* team, const float* weight, const float* hidden, int64_t rows, const Scratch& scratch) {
    const int64_t size = decoder_.hidden_size;
    each(scratch.alone ? nullptr : team, rows, [&](int64_t begin, int64_t end) {
      char* out = scratch.normed + begin * size * element_;
      kernels_.norm(hidden + begin * size, end - begin, size, weight, decoder_.eps, out, dtype_);
    });
  }

  // Norm and projections of tokens begin .. end; writes their keys and values to the pool.
  void before_attention(Team* team, int64_t index, const Scratch& scratch, AdapterRows* adapters, int64_t begin,
                        int64_t end) {
    const DecoderLayer& layer = decoder_.layers[index];
    norm(team, layer.input_norm, hidden_ + begin * decoder_.hidden_size, end - begin, scratch);
    char* qkv = qkv_ + begin * width_ * element_;
    multiply(team, layer.qkv, {scratch.normed, decoder_.hidden_size, end - begin},
             {Into::kActivations, qkv, width_, 1.0f, dtype_}, scratch, adapters, index, kQkv);
    const int64_t half = decoder_.rotary_size / 2;
    const Layer& attention = *layer.attention;
    const Rows keys = {qkv_ + query_width_ * element_, width_, attention.key_size, dtype_};
    const Rows values = {keys.data + key_width_ * element_, width_, attention.value_size, dtype_};
    each(team, end - begin, [&](int64_t first, int64_t last) {
      for (int64_t token = begin + first; token < begin + last; ++token) {
        const Angles angles = {cos_ + token * half, sin_ + token * half};
        kernels_.place(decoder_, layer, angles, qkv_ + token * width_ * element_, dtype_);
      }
      attention_kernels().write(attention, *tokens_.batch, keys, values, begin + first, begin + last, 0,
                                attention.num_kv_heads);
    });
  }

  // Plan the layer's attention while the other threads compute what precedes it.
  void plan(const DecoderLayer& layer) {
    const Rows query = {qkv_, width_, layer.attention->key_size, dtype_};
    attention_.plan({layer.attention, tokens_.batch, query, attended_, nullptr}, team_.size());
  }

  // Output projection and MLP of rows begin .. end, added to the residual stream.
  void after_attention(Team* team, int64_t index, const Stream& stream, const Scratch& scratch, AdapterRows* adapters,
                       int64_t begin, int64_t end) {
    const DecoderLayer& layer = decoder_.layers[index];
    const int64_t size = decoder_.hidden_size, rows = end - begin;
    float* hidden = stream.hidden + begin * size;
    const Result residual = {Into::kResidual, reinterpret_cast<char*>(hidden), size, decoder_.residual_factor, dtype_};
    const char* attended = stream.attended + begin * out_width_ * element_;
    multiply(team, layer.output, {attended, out_width_, rows}, residual, scratch, adapters, index, kOutput);
    norm(team, layer.post_norm, hidden, rows, scratch);
    multiply(team, layer.gate_up, {scratch.normed, size, rows},
             {Into::kActivations, scratch.middle, middle_width_, 1.0f, dtype_}, scratch, adapters, index, kGateUp);
    multiply(team, layer.down, {scratch.middle, middle_width_, rows}, residual, scratch, adapters, index, kDown);
  }

  // The rest of the last layer for the requested tokens only, then logits of some and hidden states of the others.
  void finish(const Scratch& local) {
    const int64_t size = decoder_.hidden_size, bytes = out_width_ * element_;
    const Stream selected = {selected_hidden_, selected_attended_};
    team_.each(num_selected(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = this->selected(i);
        std::memcpy(selected.hidden + i * size, hidden_ + token * size, size * sizeof(float));
        std::memcpy(selected.attended + i * bytes, attended_ + token * bytes, bytes);
      }
    });
    over_rows(num_selected(), local, [&](Team* team, const Scratch& scratch, int64_t begin, int64_t end) {
      const Adapter* const* own = selected_adapters_.empty() ? nullptr : selected_adapters_.data();
      std::optional<AdapterRows> adapters = adapters_of(own, scratch, begin, end);
      after_attention(team, decoder_.num_layers - 1, selected, scratch, adapters ? &*adapters : nullptr, begin, end);
      const int64_t middle = std::clamp(tokens_.num_logits, begin, end);
      if (begin < middle) put_logits(team, scratch, begin, middle);
      if (middle < end) put_hidden(team, middle, end);
    });
  }

  void put_logits(Team* team, const Scratch& scratch, int64_t begin, int64_t end) {
    const int64_t size = decoder_.hidden_size, vocabulary = decoder_.head.out_features;
    norm(team, decoder_.final_norm, selected_hidden_ + begin * size, end - begin, scratch);
    char* logits = reinterpret_cast<char*>(tokens_.logits + begin * vocabulary);
    multiply(team, decoder_.head, {scratch.normed, size, end - begin},
             {Into::kFloats, logits, vocabulary, decoder_.logits_factor, dtype_}, scratch);
  }

  void put_hidden(Team* team, int64_t begin, int64_t end) {
    const int64_t size = decoder_.hidden_size, first = tokens_.num_logits;
    each(team, end - begin, [&](int64_t from, int64_t to) {
      const float* rows = selected_hidden_ + (begin + from) * size;
      char* out = reinterpret_cast<char*>(tokens_.hidden + (begin + from - first) * size);
      kernels_.norm(rows, to - from, size, decoder_.final_norm, decoder_.eps, out, kFloat32);
    });
  }

  const Decoder& decoder_;
  const Tokens& tokens_;
  Team& team_;
  const OpsKernels& kernels_;
  const int64_t count_;
  int32_t dtype_;
  int64_t element_, query_width_, key_width_, width_, out_width_, middle_width_;
  float *hidden_, *cos_, *sin_, *selected_hidden_;
  char *qkv_, *attended_, *selected_attended_;
  std::vector<const Adapter*> selected_adapters_;
  Scratch scratch_;
  TeamAttention attention_;
};

}  // namespace

void run_linear(const Linear& linear, const char* x, int64_t rows, int32_t dtype, char* out, int threads) {
  const OpsKernels& kernels = ops_kernels();
  const int64_t size = linear.in_features, results = linear.num_results();
  const int32_t activations = linear.has_codes() ? kFloat32 : kernels.activation_dtype(linear.dtype);
  const bool converts = activations != dtype;
  thread_local Buffer buffer;
  Arena arena(buffer.get(quantized_bytes(rows, size) + (converts ? rows * (size + results) * sizeof(float) : 0) + 192));
  const Scratch scratch = {nullptr, nullptr, arena.take(quantized_bytes(rows, size)), nullptr, false};
  if (converts) {
    auto* floats = reinterpret_cast<float*>(arena.take(rows * size * sizeof(float)));
    kernels.to_floats(x, dtype, 1.0f, floats, rows * size);
    x = reinterpret_cast<const char*>(floats);
  }
  char* to = converts ? arena.take(rows * results * sizeof(float)) : out;
  Team team(threads);
  team.run([&](bool) {
    if (rows <= kChunkRows * team.size()) {
      multiply(&team, linear, {x, size, rows}, {Into::kActivations, to, results, 1.0f, activations}, scratch);
      return;
    }
    thread_local Buffer local;
    const Scratch alone = {nullptr, nullptr, local.get(quantized_bytes(kChunkRows, size)), nullptr, true};
    const int64_t chunks = (rows + kChunkRows - 1) / kChunkRows, element = element_size(activations);
    team.each(chunks, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
        multiply(nullptr, linear, {x + begin * size * element, size, end - begin},
                 {Into::kActivations, to + begin * results * element, results, 1.0f, activations}, alone);
      }
    });
  });
  if (converts) kernels.from_floats(reinterpret_cast<const float*>(to), dtype, out, rows * results);
}

void run_decoder(const Decoder& decoder, const Tokens& tokens, int threads) {
  thread_local Buffer workspace;
  Team team(threads);
  Pass pass(decoder, tokens, team);
  pass.lay_out(workspace.get(pass.lay_out(nullptr)));
  team.run([&](bool leads) { pass.run(leads); });
}

}  // namespace inflight
