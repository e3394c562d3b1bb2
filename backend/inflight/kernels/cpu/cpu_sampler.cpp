// The sampler's C ABI.
#include "cpu_sampler.h"

#include "cpu_work.h"

using namespace inflight;

#pragma GCC visibility push(default)
extern "C" {

// Choose a token for the row of each of `count` columns.
void inflight_sampler_choose(const Draws* draws, int64_t count, int32_t threads) {
  Team team(threads);
  team.run([&](bool) {
    team.each(count, [&](int64_t first, int64_t last) { sampler_kernels().draw(*draws, first, last); });
  });
}

}  // extern "C"
#pragma GCC visibility pop
