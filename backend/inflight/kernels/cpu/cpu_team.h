// Torch's own OpenMP threads, and what a team of them needs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "cpu_attention.h"

// Torch has loaded an OpenMP runtime with these entries (GNU's, or LLVM's, which has them as well)
// and made its symbols global.  Linking to none leaves that one the only runtime of the process: a
// second one would bring threads of its own, which compete with torch's for the cores.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
int omp_in_parallel(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
}

namespace inflight {

// A thread's buffer; grows, and is kept until the thread ends.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = padded(bytes, 4096);
      data_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Call `function` on `threads` threads, or on this one alone where there are no others to be had.
template <class Function>
void run_team(int threads, Function function) {
  if (threads <= 1 || GOMP_parallel == nullptr || (omp_in_parallel != nullptr && omp_in_parallel())) {
    function();
    return;
  }
  GOMP_parallel([](void* data) { (*static_cast<Function*>(data))(); }, &function, unsigned(threads), 0);
}

// The kernels of the instruction set that runs.
const Kernels& attention_kernels();

// One layer's attention as work for a team: `plan` by one thread, then `work` by any number of them.
class TeamAttention {
 public:
  TeamAttention();
  ~TeamAttention();
  TeamAttention(const TeamAttention&) = delete;
  TeamAttention& operator=(const TeamAttention&) = delete;

  // Cut the call into items for `threads` threads.
  // Returns: whether the work is worth waking other threads for.
  bool plan(const Call& call, int threads);
  void work();

 private:
  struct State;
  State* state_;
};

}  // namespace inflight
