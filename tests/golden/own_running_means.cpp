// jitgen 0.1.0: template launch/launch.cpp.j2
// target x86-64-v4: as launched
// stages: launch
// writes out, reads x
// 1 operations before x, where the kernel loads it
// 2 operations behind out, where the kernel stores it
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#include <jitgen/entry.hpp>
#include <jitgen/launch.hpp>

namespace jitgen_launch {

using Index = int64_t;

// What a launch packs, a value in each slot of eight bytes; first what may differ between two calls of one shape.
struct Params {
  const float* input_pointer;
  const float* input_2_pointer;
  float* result_pointer;
  alignas(8) int32_t threads;
  int64_t n0, n1, m0, m1;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 72, "the launch packs it so");

template <class Element>
JITGEN_INLINE Element prologue0(const Params& params, Index at, Index row, Index column) {
  const float v0 = jitgen::load(params.input_pointer[at]);
  const float v1 = 0.0f;
  const float v2 = jitgen::maximum(v0, v1);
  return bits_as<Element>(jitgen::store<float>(v2));
}

template <class Element>
JITGEN_INLINE void epilogue1(const Params& params, Index at, Element element, Index row, Index column) {
  const int32_t guess = row;
  const int64_t after = at - int64_t(guess) * params.m0;
  const bool is_in_row = after >= 0 && after < params.m0;
  const Index i0 = is_in_row ? guess : at / params.m0, i1 = is_in_row ? Index(after) : at % params.m0;
  const float v0 = jitgen::load(jitgen_launch::bits_as<float>(element));
  const float v1 = jitgen::load(params.input_2_pointer[i1]);
  const float v2 = jitgen::sigmoid(v1);
  const float v3 = v0 * v2;
  params.result_pointer[at] = jitgen::store<float>(v3);
}


}  // namespace jitgen_launch

#define JITGEN_PROLOGUE(value, row, column) (value)
#define JITGEN_EPILOGUE(value, row, column) (value)


extern "C" void running_means(const jitgen_launch::Params& jitgen_params, const float* x, float* out, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      sum += jitgen_launch::prologue0<float>(jitgen_params, row * columns + i, row, i);
      jitgen_launch::epilogue1(jitgen_params, row * columns + i, (float)(sum / (i + 1)), row, i);
    }
  }
}

void jitgen_launch::Params::run() const {
  const Params& params = *this;
  ::running_means(params, jitgen_launch::Pointer{params.input_pointer}, jitgen_launch::Pointer{params.result_pointer}, params.n0, params.n1);
}

namespace jitgen_launch {
JITGEN_ENTRY(jitgen_launch_running_means_bce90652)
}  // namespace jitgen_launch
