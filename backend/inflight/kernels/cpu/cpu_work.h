// A team of threads that goes through phases of work within one parallel region.
#pragma once

#include <sched.h>

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_team.h"

namespace inflight {

constexpr int kSpins = 500;  // iterations at a barrier before the thread yields its core

inline bool can_fork() {
  return GOMP_parallel != nullptr && omp_get_num_threads != nullptr && omp_get_thread_num != nullptr &&
         !(omp_in_parallel != nullptr && omp_in_parallel());
}

// Threads that divide each phase of work among themselves.
class Team {
 public:
  explicit Team(int threads) : size_(can_fork() ? threads : 1) {}

  // Run `function(leads)` on every thread of the team.
  template <class Function>
  void run(Function function) {
    if (size_ == 1) return function(true);
    run_team(size_, [&] {
      size_.store(omp_get_num_threads(), std::memory_order_relaxed);  // the runtime may give fewer
      function(omp_get_thread_num() == 0);
    });
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  // Call `function(begin, end)` on parts of 0 .. count.  Every thread calls this; it returns when all are done.
  template <class Function>
  void each(int64_t count, Function function) {
    if (size() == 1) {
      if (count > 0) function(int64_t(0), count);
      return;
    }
    for (int64_t begin = next_.load(std::memory_order_relaxed); begin < count;) {
      // Half of a fair share of the remainder: long runs first, and short waits at the end.
      const int64_t end = begin + std::max(int64_t(1), (count - begin) / (2 * size()));
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      function(begin, end);
      begin = next_.load(std::memory_order_relaxed);
    }
    barrier();
  }

  void barrier() {
    if (size() == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins >= kSpins) {
        sched_yield();
      } else {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    }
  }

 private:
  std::atomic<int> size_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Divide the work among the team, or do all of it on this thread if `team` is null.
template <class Function>
void each(Team* team, int64_t count, Function function) {
  if (team != nullptr) {
    team->each(count, function);
  } else if (count > 0) {
    function(int64_t(0), count);
  }
}

// Pieces of a block of memory, each at a multiple of 64 bytes; of a null pointer: how many bytes they need.
class Arena {
 public:
  explicit Arena(char* memory) : at_(memory) {}
  char* take(int64_t bytes) {
    char* result = at_;
    at_ += padded(bytes, 64);
    return result;
  }
  const char* end() const { return at_; }

 private:
  char* at_;
};

}  // namespace inflight
