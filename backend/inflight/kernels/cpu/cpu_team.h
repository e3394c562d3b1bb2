// Torch's OpenMP threads, and attention as work for a team of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "cpu_attention.h"

// Torch has already loaded an OpenMP runtime with these entry points (GNU's, or LLVM's, which has them too)
// and made its symbols global.  This library links to no runtime: a second one would start more threads,
// which would compete with torch's for the cores.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
int omp_in_parallel(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
}

namespace inflight {

// A per-thread buffer that grows on demand and lives until the thread ends.
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

// Call `function` on `threads` threads, or on this one only if no others are available.
template <class Function>
void run_team(int threads, Function function) {
  if (threads <= 1 || GOMP_parallel == nullptr || (omp_in_parallel != nullptr && omp_in_parallel())) {
    function();
    return;
  }
  GOMP_parallel([](void* data) { (*static_cast<Function*>(data))(); }, &function, unsigned(threads), 0);
}

// One layer's attention as work for a team: one thread calls `plan`, then any number call `work`.
class TeamAttention {
 public:
  TeamAttention();
  ~TeamAttention();
  TeamAttention(const TeamAttention&) = delete;
  TeamAttention& operator=(const TeamAttention&) = delete;

  // Split the call into items for `threads` threads.
  // Returns: whether waking other threads pays off.
  bool plan(const Call& call, int threads);
  void work();

 private:
  struct State;
  State* state_;
};

}  // namespace inflight
