#pragma once

namespace jitgen {

static inline void row_sums(const float* x, float* sums, int64_t length, int64_t x_step, int64_t sums_step) {
  double sum = 0;
  for (int64_t i = 0; i < length; ++i) sums[i * sums_step] = float(sum += x[i * x_step]);
}

}  // namespace jitgen
