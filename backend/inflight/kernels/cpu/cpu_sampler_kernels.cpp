// Choosing a token for each row.  Compiled once per instruction set; see cpu_attention_kernels.cpp.
//
// A random token is the winner of a race: the largest x / temperature + noise, with Gumbel noise that is a function
// of seed, position and token (noise.py).  Noise is bounded, so the largest logit of a group of tokens tells how small
// a token's hash must be to beat the best score so far.  Most tokens are dismissed by a comparison of integers, and
// whole groups without reading them; the few that remain get an exact score, in double.  A score depends on nothing
// but the token's own logit: a mask that leaves the winner leaves it the winner.
#include "cpu_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu_simd.h"

namespace inflight {
namespace INFLIGHT_ISA {
namespace {

// `Kind` of metadata.py, and the lines of its columns.
enum Kind : int64_t { kPadding = -1, kGreedy = 0, kRandom = 1, kNarrowed = 2, kTopK = 3 };
enum Line { kRow, kKeys, kK, kInverseTemperature, kTopP, kMinP, kKind };

// noise.py
constexpr uint32_t kMultiplier = 0x7feb352d;
constexpr float kToUnit = float(0x1p-31 * (1.0 - 0x1p-24));

constexpr int64_t kBlock = 128;  // tokens; the largest logit of each block is known
constexpr int64_t kGroup = 8;    // blocks that are dismissed at once
constexpr int64_t kFew = 16;     // a mask of at most one token in so many has its tokens listed
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kEnd = std::numeric_limits<int32_t>::max();
constexpr double kRounding = 4e-7;  // of sums and weights in float32: what is that close to a bound has reached it

// exp and log of double need a newer C library than torch does; expm1 and log1p do not.
double exponential(double x) { return 1.0 + std::expm1(x); }  // within 1e-16, which is all of a small result

double logarithm(double x) {  // x > 0
  int exponent;
  double fraction = std::frexp(x, &exponent);
  if (fraction < 0.70710678118654752) {
    fraction *= 2.0;
    --exponent;
  }
  return exponent * 0.69314718055994531 + std::log1p(fraction - 1.0);
}

// Right shifts of signed numbers are arithmetic.
INFLIGHT_INLINE IntVec noise_bits(IntVec hashes, UintVec key, UintVec offset) {
  IntVec x = (IntVec)((UintVec)hashes * key + offset);
  x ^= x >> 15;
  x = (IntVec)((UintVec)x * kMultiplier);
  x ^= x >> 16;
  return x | 1;
}

int32_t noise_bits(int32_t hash, uint32_t key, uint32_t offset) {
  int32_t x = int32_t(uint32_t(hash) * key + offset);
  x ^= x >> 15;
  x = int32_t(uint32_t(x) * kMultiplier);
  x ^= x >> 16;
  return x | 1;
}

// A bit for each lane whose value is not above the limit.
INFLIGHT_INLINE uint32_t lanes_up_to(IntVec x, int32_t limit) {
#if defined(__AVX512F__)
  return _mm512_cmple_epi32_mask((__m512i)x, _mm512_set1_epi32(limit));
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)(x <= limit)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] <= limit) << i;
  return bits;
#endif
}

// A bit for each lane that is not below the floor.
INFLIGHT_INLINE uint32_t lanes_from(Vec x, float floor) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(floor), _CMP_GE_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)(x >= floor)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] >= floor) << i;
  return bits;
#endif
}

struct Entry {
  float x;
  int32_t token;
};

// Tokens in a strict order: by falling logit, then by rising id.
bool ranks_before(const Entry& a, const Entry& b) { return a.x > b.x || (a.x == b.x && a.token < b.token); }

// The largest logit of a block.  Types of this namespace make instances of std's templates ones of this instruction
// set: the linker takes any of several equal ones.
struct Peak {
  float x;
};

// Tokens above a logit, and some of the tokens that equal it.
struct Kept {
  float floor;     // the least logit
  int32_t before;  // of this logit, only tokens below this id

  bool operator()(float x, int64_t token) const { return x > floor || (x == floor && token < before); }
};

// A row of floats that grows on demand and lives until the thread ends.
float* scratch(int64_t size) {
  struct Float {
    float x;
  };
  thread_local std::vector<Float> row;
  if (int64_t(row.size()) < size) row.resize(size_t(size));
  return &row[0].x;
}

INFLIGHT_INLINE Vec masked(Vec x, uint32_t bits) {
#if defined(__AVX512F__)
  return (Vec)_mm512_mask_blend_ps(__mmask16(bits), _mm512_set1_ps(-kInfinity), (__m512)x);
#else
  UintVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = 1u << i;
  return ((UintVec{} + bits) & lanes) != 0 ? x : splat(-kInfinity);
#endif
}

// Copy a row, with -inf for tokens that the mask does not allow.
void apply_mask(const float* x, const uint32_t* mask, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + 32 <= size; i += 32, ++mask) {
    for (int lane = 0; lane < 32; lane += kLanes) store(to + i + lane, masked(load(x + i + lane), *mask >> lane));
  }
  for (; i < size; ++i) to[i] = (*mask >> (i % 32)) & 1 ? x[i] : -kInfinity;
}

class Row {
 public:
  Row(int64_t size, const int32_t* hashes) : size_(size), hashes_(hashes), blocks_(buffer()) {}

  // The logits, each read once; others before.
  void read(const float* x) {
    x_ = x;
    has_nan_ = false;
    blocks_.clear();
    UintVec is_nan = {};
    top_ = -kInfinity;
    for (int64_t start = 0; start < size_; start += kBlock) {
      const int64_t end = std::min(size_, start + kBlock), whole = start + (end - start) / kLanes * kLanes;
      Vec largest = splat(-kInfinity);
      for (int64_t i = start; i < whole; i += kLanes) {
        const Vec part = load(x_ + i);
        is_nan |= (UintVec)(part != part);
        largest = maximum(part, largest);
      }
      float top = reduce_max(largest);
      for (int64_t i = whole; i < end; ++i) {
        has_nan_ |= x_[i] != x_[i];
        top = x_[i] > top ? x_[i] : top;
      }
      blocks_.push_back({top});
      top_ = top > top_ ? top : top_;
    }
    for (int i = 0; i < kLanes; ++i) has_nan_ |= is_nan[i] != 0;
  }

  // What a race begins with, behind `read`.
  void begin_race() { greedy_ = greedy(); }

  // Only the logits that the mask allows, for `race_few`; false if they are more than `limit`.
  bool read_few(const float* x, const uint32_t* mask, int64_t limit, std::vector<Entry>& few) {
    x_ = x;
    has_nan_ = false;
    top_ = -kInfinity;
    greedy_ = 0;
    few.clear();
    for (int64_t first = 0; first < size_; first += 32, ++mask) {
      uint32_t bits = *mask;
      if (size_ - first < 32) bits &= (1u << (size_ - first)) - 1;
      for (; bits != 0; bits &= bits - 1) {
        if (int64_t(few.size()) == limit) return false;
        const int64_t token = first + __builtin_ctz(bits);
        few.push_back({x[token], int32_t(token)});
        has_nan_ |= x[token] != x[token];
        if (!(x[token] > top_)) continue;
        top_ = x[token];
        greedy_ = token;
      }
    }
    return true;
  }

  bool usable() const { return !has_nan_ && std::fabs(top_) < kInfinity; }

  // The first of the largest logits; 0 if all are NaN.
  int64_t greedy() const {
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (blocks_[block].x != top_) continue;
      for (int64_t i = int64_t(block) * kBlock; i < size_; ++i) {
        if (x_[i] == top_) return i;
      }
    }
    return 0;
  }

  void randomize(int64_t keys, double inverse_temperature) {
    key_ = uint32_t(keys);
    offset_ = uint32_t(uint64_t(keys) >> 32);
    scale_ = inverse_temperature;
  }

  // The winner among the tokens kept, to which the first of the largest logits belongs.
  int64_t race(Kept kept) const {
    int64_t winner = greedy_;
    double best = score(top_, winner);
    for (size_t first = 0; first < blocks_.size(); first += kGroup) {
      const size_t last = std::min(blocks_.size(), first + kGroup);
      float largest = blocks_[first].x;
      for (size_t block = first + 1; block < last; ++block) largest = std::max(largest, blocks_[block].x);
      if (largest < kept.floor) continue;
      int32_t limit = bits_to_beat(best, largest);
      if (limit == 0) continue;
      const int64_t end = std::min(size_, int64_t(last) * kBlock);
      const auto consider = [&](int64_t token) {
        if (!kept(x_[token], token)) return;
        const double scored = score(x_[token], token);
        if (scored < best || (scored == best && token > winner)) return;
        best = scored;
        winner = token;
        limit = bits_to_beat(best, largest);
      };
      int64_t i = int64_t(first) * kBlock;
      for (; i + kLanes <= end; i += kLanes) {
        IntVec hashes;
        __builtin_memcpy(&hashes, hashes_ + i, sizeof hashes);
        const IntVec bits = noise_bits(hashes, UintVec{} + key_, UintVec{} + offset_);
        uint32_t lanes = lanes_up_to(bits, limit);
        if (lanes != 0) lanes &= lanes_to_beat(best, bits, load(x_ + i));
        for (; lanes != 0; lanes &= lanes - 1) consider(i + __builtin_ctz(lanes));
      }
      for (; i < end; ++i) consider(i);
    }
    return winner;
  }

  int64_t race(const std::vector<Entry>& entries) const {
    int64_t winner = greedy_;
    double best = score(top_, winner);
    for (const Entry& entry : entries) {
      const double scored = score(entry.x, entry.token);
      if (scored < best || (scored == best && entry.token > winner)) continue;
      best = scored;
      winner = entry.token;
    }
    return winner;
  }

  // The winner among all that `read_few` found.
  int64_t race_few(const std::vector<Entry>& few) const {
    int64_t winner = greedy_;
    double best = score(top_, winner);
    int32_t limit = bits_to_beat(best, top_);
    for (const Entry& entry : few) {
      if (noise_bits(hashes_[entry.token], key_, offset_) > limit) continue;
      const double scored = score(entry.x, entry.token);
      if (scored < best || (scored == best && entry.token > winner)) continue;
      best = scored;
      winner = entry.token;
      limit = bits_to_beat(best, top_);
    }
    return winner;
  }

  // The first of the largest logits that `read_few` found; 0 if all are -inf.
  int64_t greedy_of_few() const { return greedy_; }

  // The least logit whose weight, relative to the largest, reaches min_p.
  float floor_of(double min_p) const {
    if (min_p <= 0) return -kInfinity;
    const double floor = top_ + (logarithm(min_p) - kRounding) / scale_;
    const float rounded = float(floor);
    return rounded < floor ? std::nextafter(rounded, kInfinity) : rounded;
  }

  // Sum of the kept tokens' weights, relative to the largest.
  double mass(Kept kept) const {
    double total = 0;
    IntVec lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    const float scale = float(scale_ * 1.4426950408889634);
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (blocks_[block].x < kept.floor) continue;
      int64_t i = int64_t(block) * kBlock;
      const int64_t end = std::min(size_, i + kBlock);
      Vec sum = {};
      for (; i + kLanes <= end; i += kLanes) {
        const Vec x = load(x_ + i);
        const IntVec tie = (x == kept.floor) & (lanes + int32_t(i) < kept.before);
        sum += ((x > kept.floor) | tie) ? exp2<true>((x - top_) * scale) : Vec{};
      }
      total += reduce_add(sum);
      for (; i < end; ++i) total += kept(x_[i], i) ? weight(x_[i]) : 0.0;
    }
    return total;
  }

  Kept before(int64_t token) const { return {x_[token], int32_t(token)}; }

  double weight(float x) const { return exponential((double(x) - top_) * scale_); }

  // The k first tokens in rank, in that order; fewer if others are -inf.
  void list_top(int64_t k, std::vector<Entry>& list) const {
    // At least k tokens reach the k-th largest maximum of a block.
    float floor = -std::numeric_limits<float>::max();
    if (k <= int64_t(blocks_.size())) {
      thread_local std::vector<Entry> maxima;
      maxima.clear();
      for (const Peak& block : blocks_) maxima.push_back({block.x, 0});
      std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), ranks_before);
      floor = std::max(floor, maxima[size_t(k - 1)].x);
    }
    list.clear();
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (blocks_[block].x < floor) continue;
      int64_t i = int64_t(block) * kBlock;
      const int64_t end = std::min(size_, i + kBlock);
      for (; i + kLanes <= end; i += kLanes) {
        for (uint32_t lanes = lanes_from(load(x_ + i), floor); lanes != 0; lanes &= lanes - 1) {
          const int64_t token = i + __builtin_ctz(lanes);
          list.push_back({x_[token], int32_t(token)});
        }
      }
      for (; i < end; ++i) {
        if (x_[i] >= floor) list.push_back({x_[i], int32_t(i)});
      }
    }
    if (int64_t(list.size()) > k) {
      std::nth_element(list.begin(), list.begin() + (k - 1), list.end(), ranks_before);
      list.resize(size_t(k));
    }
    std::sort(list.begin(), list.end(), ranks_before);
  }

 private:
  static std::vector<Peak>& buffer() {
    thread_local std::vector<Peak> blocks;
    return blocks;
  }

  double score(float x, int64_t token) const {
    const float u = float(noise_bits(hashes_[token], key_, offset_)) * kToUnit;
    return double(x) * scale_ - logarithm(-std::log1p(-double(u)));
  }

  // The largest noise_bits with which a logit of at most `largest` can reach the score `best`; 0 if none can.
  int32_t bits_to_beat(double best, float largest) const {
    const double margin = double(largest) * scale_ - best;  // the exponential variate must be below exp(margin)
    if (!(margin > -23.0)) return 0;                        // the least is above 2^-32
    if (margin > 3.5) return kEnd;                          // the largest is below 24
    const double bits = -std::expm1(-exponential(margin)) / kToUnit * (1.0 + 1e-6) + 2.0;
    return bits < kEnd ? int32_t(bits) : kEnd;
  }

  // A bit for each lane whose own logit can reach the score `best` with these noise_bits; a bit too many costs an exact
  // score.  The exponential variate, at least u, must be below exp(x * scale - best).  That exponent is taken from the
  // largest logit, so that float32 has room for it at any temperature.
  INFLIGHT_INLINE uint32_t lanes_to_beat(double best, IntVec bits, Vec x) const {
    constexpr float kLog2E = 1.4426950408889634f;
    const float from_top = float((double(top_) * scale_ - best) * kLog2E);
    const Vec bound = exp2<true>((x - top_) * float(scale_ * kLog2E) + from_top);
    return lanes_from(bound * (1.0f + 1e-4f) - __builtin_convertvector(bits, Vec) * kToUnit, 0.0f);
  }

  const float* x_ = nullptr;
  int64_t size_;
  const int32_t* hashes_;
  std::vector<Peak>& blocks_;
  float top_ = 0;
  bool has_nan_ = false;
  uint32_t key_ = 0, offset_ = 0;
  double scale_ = 1;
  int64_t greedy_ = 0;
};

// Race in the smallest set of top tokens that reaches top_p of the mass.  A winner outside this set is dismissed with
// all that rank behind it, which are outside, too.
int64_t draw_narrowed(const Row& row, double top_p, double min_p) {
  const Kept kept = {row.floor_of(min_p), kEnd};
  int64_t token = row.race(kept);
  if (top_p >= 1.0) return token;
  const double bound = top_p * row.mass(kept) * (1.0 - kRounding);
  for (;;) {
    const Kept above = row.before(token);
    const double mass = row.mass(above);
    if (mass == 0.0 || mass < bound) return token;
    token = row.race(above);
  }
}

int64_t draw_top_k(const Row& row, int64_t k, double top_p, double min_p) {
  thread_local std::vector<Entry> list;
  row.list_top(k, list);
  const float floor = row.floor_of(min_p);
  while (list.size() > 1 && list.back().x < floor) list.pop_back();
  if (top_p < 1.0) {
    double total = 0, above = 0;
    for (const Entry& entry : list) total += row.weight(entry.x);
    const double bound = top_p * total * (1.0 - kRounding);
    size_t size = 0;
    do above += row.weight(list[size++].x);
    while (size < list.size() && above < bound);
    list.resize(size);
  }
  return row.race(list);
}

double real(int64_t bits) {
  double value;
  __builtin_memcpy(&value, &bits, 8);
  return value;
}

void draw(const Draws& draws, int64_t first, int64_t last) {
  Row row(draws.size, draws.hashes);
  for (int64_t i = first; i < last; ++i) {
    const auto at = [&](Line line) { return draws.columns[line * draws.line + i]; };
    if (at(kKind) == kPadding) continue;
    const float* x = draws.logits + at(kRow) * draws.stride;
    int64_t& token = draws.out[at(kRow)];
    if (draws.masks == nullptr || draws.marks) {
      row.read(x);
      if (!row.usable()) {
        token = draws.marks ? kNoToken : row.greedy();
        continue;
      }
    }
    const float scale = float(real(at(kInverseTemperature)));
    if (draws.masks != nullptr) {
      const uint32_t* mask = draws.masks + i * draws.mask_words;
      thread_local std::vector<Entry> few;
      if (at(kKind) <= kRandom && row.read_few(x, mask, draws.size / kFew, few)) {
        row.randomize(at(kKeys), scale);
        token = at(kKind) == kGreedy || !row.usable() ? row.greedy_of_few() : row.race_few(few);
        continue;
      }
      float* masked = scratch(draws.size);
      apply_mask(x, mask, draws.size, masked);
      row.read(masked);
      if (!row.usable()) {  // no token is left, which is no fault of the model
        token = row.greedy();
        continue;
      }
    }
    row.randomize(at(kKeys), scale);
    row.begin_race();
    const double top_p = real(at(kTopP)), min_p = real(at(kMinP));
    switch (at(kKind)) {
      case kGreedy: token = row.greedy(); break;
      case kRandom: token = row.race(Kept{-kInfinity, 0}); break;
      case kNarrowed: token = draw_narrowed(row, top_p, min_p); break;
      default: token = draw_top_k(row, std::min(at(kK), draws.size), top_p, min_p);
    }
  }
}

}  // namespace

extern const SamplerKernels sampler_kernels;
const SamplerKernels sampler_kernels = {draw};

}  // namespace INFLIGHT_ISA
}  // namespace inflight
