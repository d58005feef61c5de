// jitgen 0.1.0: template launch/launch.cu.j2
// target sm_90a: as launched
// stages: launch
// writes sums, reads x
// 1 operations before x, where the kernel loads it
// 1 operations behind sums, where the kernel stores it
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/launch.cuh>

namespace jitgen_launch {

using Index = int32_t;

struct Params {
  jitgen::Operand<const float, Index, 0> input;
  jitgen::Operand<const float, Index, 0> input_2;
  jitgen::Operand<const float, Index, 0> input_3;
  jitgen::Operand<jitgen::bfloat16, Index, 0> result;
  Index n0;
  Index n1;
  Index m0;
  Index m1;
};
static_assert(
    sizeof(Params) == 48 && JITGEN_OFFSET(input) == 0 && JITGEN_OFFSET(input_2) == 8 && JITGEN_OFFSET(input_3) == 16
    && JITGEN_OFFSET(result) == 24 && JITGEN_OFFSET(n0) == 32 && JITGEN_OFFSET(n1) == 36 && JITGEN_OFFSET(m0) == 40
    && JITGEN_OFFSET(m1) == 44, "the launch packs it so");


template <class Element>
JITGEN_DEVICE Element prologue0(const Params& params, Index at, Index row, Index column) {
  const int32_t guess = row;
  const int64_t after = at - int64_t(guess) * params.m0;
  const bool is_in_row = after >= 0 && after < params.m0;
  const Index i0 = is_in_row ? guess : at / params.m0, i1 = is_in_row ? Index(after) : at % params.m0;
  const float v0 = jitgen::load(params.input.pointer[at]);
  const float v1 = jitgen::load(params.input_2.pointer[i0]);
  const float v2 = v0 * v1;
  return bits_as<Element>(jitgen::store<float>(v2));
}

template <class Element>
JITGEN_DEVICE void epilogue1(const Params& params, Index at, Element element, Index row, Index column) {
  const float v0 = jitgen::load(jitgen_launch::bits_as<float>(element));
  const float v1 = jitgen::load(params.input_3.pointer[at]);
  const float v2 = v0 + v1;
  const float v3 = jitgen::load(jitgen::store<jitgen::bfloat16>(v2));
  params.result.pointer[at] = jitgen::store<jitgen::bfloat16>(v3);
}


}  // namespace jitgen_launch

#define JITGEN_PROLOGUE(value, row, column) (value)
#define JITGEN_EPILOGUE(value, row, column) (value)


template <typename T>
__device__ __forceinline__ void  column_sums(const jitgen_launch::Params& jitgen_params, const T* __restrict__ x, T* sums, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  T sum = 0;
  for (int row = 0; row < rows; ++row) sum += jitgen_launch::prologue0<T>(jitgen_params, row * columns + column, row, column);
  jitgen_launch::epilogue1(jitgen_params, column, (T)(sum), 0, column);
}

extern "C" __global__ void __launch_bounds__(256) jitgen_launch_column_sums_41f8dac4(const __grid_constant__ jitgen_launch::Params params) {
  column_sums<float>(params, jitgen_launch::Pointer{params.input.pointer}, jitgen_launch::Pointer{params.result.pointer}, params.n0, params.n1);
}
