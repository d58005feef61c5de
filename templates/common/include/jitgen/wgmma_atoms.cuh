// wgmma by the atoms of CUTLASS's cute/arch/mma_sm90_gmma.hpp, and setmaxnreg by its reg_reconfig.h. The atoms take each
// accumulator as an argument of its own, and here they take arrays.
//
// Of all headers of CuTe these two alone compile quickly: 0.1 s together, where any other adds 1.4 s or more. All they
// include beyond CUTLASS are four headers of the CUDA toolkit, of which they use nothing in device code: under NVRTC the
// files beside `jitgen/` of those names stand in for them, so that no toolkit and no CCCL is needed.
#pragma once

#include "jitgen/storage.cuh"
#include "jitgen/wgmma_widths.cuh"

#ifdef __CUDACC_RTC__
#include <cuda/std/cassert>
#include <cuda/std/cstdint>
#include <cccl/cuda/std/cstdint>
#include <cuda_runtime_api.h>
#endif

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/reg_reconfig.h>

namespace jitgen {

using cute::SM90::GMMA::Major;

// The atoms that multiply 64 rows of A by n rows of B, 16 k's: `Shared` takes both operands from shared memory,
// `Registers` takes A from registers. `major` says along which dimension B is contiguous.
template <class Element, int n>
struct WgmmaAtoms;

#define JITGEN_WGMMA_ATOMS(ELEMENT, TYPE, N)                                                               \
  template <>                                                                                              \
  struct WgmmaAtoms<ELEMENT, N> {                                                                          \
    template <Major major>                                                                                 \
    using Shared = cute::SM90::GMMA::MMA_64x##N##x16_F32##TYPE##TYPE##_SS<Major::K, major>;                \
    template <Major major>                                                                                 \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32##TYPE##TYPE##_RS<Major::K, major>;             \
  };
#define JITGEN_WGMMA_ATOMS_OF_BOTH(N)     \
  JITGEN_WGMMA_ATOMS(bfloat16, BF16, N) \
  JITGEN_WGMMA_ATOMS(float16, F16, N)
JITGEN_WGMMA_ATOMS_OF_BOTH(16)
JITGEN_WGMMA_ATOMS_OF_BOTH(32)
JITGEN_WGMMA_ATOMS_OF_BOTH(64)
JITGEN_WGMMA_ATOMS_OF_BOTH(96)
JITGEN_WGMMA_ATOMS_OF_BOTH(128)
JITGEN_WGMMA_ATOMS_OF_BOTH(192)
JITGEN_WGMMA_ATOMS_OF_BOTH(256)
#undef JITGEN_WGMMA_ATOMS_OF_BOTH
#undef JITGEN_WGMMA_ATOMS

// 0, ..., count - 1 as template arguments.
template <int... i>
struct Indices {};
template <int count, int... i>
struct IndicesTo : IndicesTo<count - 1, count - 1, i...> {};
template <int... i>
struct IndicesTo<0, i...> {
  using type = Indices<i...>;
};

template <class Atom, int n, int... i, class... Operands>
JITGEN_DEVICE void wgmma_of(float (&d)[n], Indices<i...>, int accumulate, const Operands&... operands) {
  Atom::fma(operands..., d[i]..., cute::SM90::GMMA::ScaleOut(accumulate));
}

// Says that wgmma has written `d`, after the wait for it. Nothing else ties reads of these registers to that wait: to the
// compiler wgmma has written them when it began, so that it may move arithmetic on them ahead of the wait. (CUTLASS and
// DeepGEMM have the same after their waits, warpgroup_fence_operand.) It takes no instruction.
template <int n>
JITGEN_DEVICE void wgmma_written(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}
template <int n>
JITGEN_DEVICE void wgmma_written(int32_t (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(d[i]) : : "memory");
}

// d[64 rows, n] (+)= A[64, 16] B[n, 16]^T for one warpgroup, asynchronously. A comes from registers (`registers` are
// the four words of an m16n8k16 fragment, and warp w of the group has rows 16w..16w+15), or is given by a descriptor.
// A B that is contiguous along K has 128 bytes a row.
template <class Element, int n>
struct Wgmma {
  using Instruction = WgmmaInstruction<Element, n>;
  using All = typename IndicesTo<n / 2>::type;
  using Sum = float;
  static constexpr bool promoted = false;  // whether sums of many products should be added up outside of wgmma
  static JITGEN_DEVICE void registers(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    if constexpr (Instruction::exists) {
      Instruction::registers(d, a, b, accumulate);
    } else {
      using Atom = typename WgmmaAtoms<Element, n>::template Registers<Major::K>;
      wgmma_of<Atom>(d, All(), accumulate, a[0], a[1], a[2], a[3], b);
    }
  }
  static JITGEN_DEVICE void registers_transposed(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    using Atom = typename WgmmaAtoms<Element, n>::template Registers<Major::MN>;
    wgmma_of<Atom>(d, All(), accumulate, a[0], a[1], a[2], a[3], b);
  }
  template <int transposed>
  static JITGEN_DEVICE void shared(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (Instruction::exists) {
      Instruction::template shared<transposed>(d, a, b, accumulate);
    } else {
      using Atom = typename WgmmaAtoms<Element, n>::template Shared<transposed ? Major::MN : Major::K>;
      wgmma_of<Atom>(d, All(), accumulate, a, b);
    }
  }
};

}  // namespace jitgen
