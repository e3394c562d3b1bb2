// The part of the C ABI that attention and decoder share: version, choice of the instruction set, memory advice.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <string_view>
#include <thread>

#include "cpu_ops.h"
#include "cpu_sampler.h"

namespace inflight {

// A table is null if the compiler of the build lacked the instruction set.
#define INFLIGHT_DECLARE(isa)                                              \
  namespace isa {                                                          \
  extern const AttentionKernels attention_kernels __attribute__((weak));   \
  extern const OpsKernels ops_kernels __attribute__((weak));               \
  extern const SamplerKernels sampler_kernels __attribute__((weak));       \
  }
INFLIGHT_DECLARE(avx512bf16)
INFLIGHT_DECLARE(avx512vnni)
INFLIGHT_DECLARE(avx512)
INFLIGHT_DECLARE(avx2)
INFLIGHT_DECLARE(portable)

namespace {

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool made_by_intel() { return __builtin_cpu_is("intel"); }
#else
bool has_avx512() { return false; }
bool has_avx512vnni() { return false; }
bool has_avx512bf16() { return false; }
bool has_avx2() { return false; }
bool made_by_intel() { return false; }
#endif

struct InstructionSet {
  const AttentionKernels* attention;
  const OpsKernels* ops;
  const SamplerKernels* sampler;
  bool (*runs_here)();

  bool available() const {
    return attention != nullptr && ops != nullptr && sampler != nullptr && runs_here();
  }
};

// Best first.
const InstructionSet kInstructionSets[] = {
    {&avx512bf16::attention_kernels, &avx512bf16::ops_kernels, &avx512bf16::sampler_kernels, has_avx512bf16},
    {&avx512vnni::attention_kernels, &avx512vnni::ops_kernels, &avx512vnni::sampler_kernels, has_avx512vnni},
    {&avx512::attention_kernels, &avx512::ops_kernels, &avx512::sampler_kernels, has_avx512},
    {&avx2::attention_kernels, &avx2::ops_kernels, &avx2::sampler_kernels, has_avx2},
    {&portable::attention_kernels, &portable::ops_kernels, &portable::sampler_kernels, [] { return true; }}};

// The best instruction set of this name, or of any name if it is empty; null if none is available.
const InstructionSet* find(std::string_view name) {
  for (const InstructionSet& set : kInstructionSets) {
    if (set.available() && (name.empty() || name == set.attention->name)) return &set;
  }
  return nullptr;
}

const InstructionSet* chosen = find("");

// Zen 4 finds a stream of reads itself, and prefetches far ahead, a second stream, slow it by a fifth.  Intel's prefetcher
// stops at the end of a page; from a page ahead, one row's product is a fifth faster than from 512 bytes (Emerald Rapids).
const int64_t distance = made_by_intel() ? 4096 : 512;

constexpr uintptr_t kPage = 4096;
constexpr int64_t kPiece = 2 << 20;  // of a huge page's size: one fault, and no longer until the next look at `stop`

// madvise() for the whole pages within a range of memory.
void advise(char* data, int64_t bytes, int advice) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

// Write a byte of each page without changing it, whatever other threads write there meanwhile: each keeps its value.
void map_pages(char* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kPage) {
    char found = __atomic_load_n(data + at, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(data + at, &found, found, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
}

}  // namespace

const AttentionKernels& attention_kernels() { return *chosen->attention; }
const OpsKernels& ops_kernels() { return *chosen->ops; }
const SamplerKernels& sampler_kernels() { return *chosen->sampler; }
int64_t prefetch_distance() { return distance; }

}  // namespace inflight

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// Incremented whenever a struct or a signature changes; library.py accepts this version only.
int inflight_abi() { return 14; }

// Digest of the sources; build.py searches the file for it.
#if defined(INFLIGHT_SOURCES)
const char* inflight_sources() { return INFLIGHT_SOURCES; }
#endif

const char* inflight_instruction_set() { return chosen->attention->name; }

// Switch to the instruction set `name`, or to the best one if it is empty.  Returns 0, and changes
// nothing, if it is not available.
int inflight_use_instruction_set(const char* name) {
  const InstructionSet* found = find(name);
  if (found == nullptr) return 0;
  chosen = found;
  return 1;
}

// Request huge pages for memory not yet touched: a KV pool is read in blocks all over its range.
void inflight_advise_huge_pages(char* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  advise(data, bytes, MADV_HUGEPAGE);
#endif
}

// Return the whole pages within the range to the system; their contents are lost.
void inflight_discard(char* data, int64_t bytes) { advise(data, bytes, MADV_DONTNEED); }

// Have the system provide the pages of `count` ranges, from their beginnings on, in a thread that has the cores only
// when nothing else wants them, until *stop is not 0.  Other threads may use the ranges meanwhile.
// The thread ends here: one without the right to leave the idle priority could not take the interpreter's lock after it.
void inflight_map_pages(char* const* data, const int64_t* bytes, int64_t count, const int32_t* stop) {
  std::thread([=] {
#if defined(SCHED_IDLE)
    const sched_param lowest{};
    sched_setscheduler(0, SCHED_IDLE, &lowest);
#endif
    const int64_t longest = count ? *std::max_element(bytes, bytes + count) : 0;
    for (int64_t at = 0; at < longest; at += kPiece) {
      for (int64_t i = 0; i < count; ++i) {
        if (__atomic_load_n(stop, __ATOMIC_RELAXED)) return;
        map_pages(data[i] + at, std::min(kPiece, bytes[i] - at));
      }
    }
  }).join();
}

}  // extern "C"
#pragma GCC visibility pop
