// wgmma and setmaxnreg, as the PTX ISA has them ("Asynchronous Warpgroup Level Matrix", "setmaxnreg"). The instructions
// are those of CUTLASS's cute/arch/mma_sm90_gmma.hpp, whose compilation takes a sixth of that of a product.
#pragma once

#include "jitgen/storage.cuh"

namespace jitgen {

// Before the first wgmma, and before one whose registers other instructions have written since.
JITGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of wgmmas, for which `wgmma_wait` waits.
JITGEN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `groups` of the groups are under way.
template <int groups>
JITGEN_DEVICE void wgmma_wait() {
  static_assert(groups >= 0 && groups <= 7, "groups that wgmma.wait_group names");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// By all warps of a warpgroup. A thread has `registers` from then on.
template <int registers>
JITGEN_DEVICE void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
JITGEN_DEVICE void registers_request() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
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
// A B that is contiguous along K has 128 bytes a row; `transposed` says that it is contiguous along n, and
// `left_transposed` that A is along its rows. `Sum` is the type of sums, and `promoted` says whether sums of many products
// should be added up outside of wgmma.
template <class Element, int n>
struct Wgmma;

// Eight operands, by their numbers in the text and as sums.
#define JITGEN_TEXT0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JITGEN_TEXT1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define JITGEN_TEXT2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define JITGEN_TEXT3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define JITGEN_TEXT4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define JITGEN_TEXT5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define JITGEN_TEXT6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define JITGEN_TEXT7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define JITGEN_TEXT8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define JITGEN_TEXT9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define JITGEN_TEXT10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define JITGEN_TEXT11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define JITGEN_TEXT12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define JITGEN_TEXT13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define JITGEN_TEXT14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define JITGEN_TEXT15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define JITGEN_SUMS(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define JITGEN_TEXTS1 JITGEN_TEXT0
#define JITGEN_TEXTS2 JITGEN_TEXTS1 ", " JITGEN_TEXT1
#define JITGEN_TEXTS3 JITGEN_TEXTS2 ", " JITGEN_TEXT2
#define JITGEN_TEXTS4 JITGEN_TEXTS3 ", " JITGEN_TEXT3
#define JITGEN_TEXTS5 JITGEN_TEXTS4 ", " JITGEN_TEXT4
#define JITGEN_TEXTS6 JITGEN_TEXTS5 ", " JITGEN_TEXT5
#define JITGEN_TEXTS7 JITGEN_TEXTS6 ", " JITGEN_TEXT6
#define JITGEN_TEXTS8 JITGEN_TEXTS7 ", " JITGEN_TEXT7
#define JITGEN_TEXTS9 JITGEN_TEXTS8 ", " JITGEN_TEXT8
#define JITGEN_TEXTS10 JITGEN_TEXTS9 ", " JITGEN_TEXT9
#define JITGEN_TEXTS11 JITGEN_TEXTS10 ", " JITGEN_TEXT10
#define JITGEN_TEXTS12 JITGEN_TEXTS11 ", " JITGEN_TEXT11
#define JITGEN_TEXTS13 JITGEN_TEXTS12 ", " JITGEN_TEXT12
#define JITGEN_TEXTS14 JITGEN_TEXTS13 ", " JITGEN_TEXT13
#define JITGEN_TEXTS15 JITGEN_TEXTS14 ", " JITGEN_TEXT14
#define JITGEN_ALL1 JITGEN_SUMS(0)
#define JITGEN_ALL2 JITGEN_ALL1, JITGEN_SUMS(8)
#define JITGEN_ALL3 JITGEN_ALL2, JITGEN_SUMS(16)
#define JITGEN_ALL4 JITGEN_ALL3, JITGEN_SUMS(24)
#define JITGEN_ALL5 JITGEN_ALL4, JITGEN_SUMS(32)
#define JITGEN_ALL6 JITGEN_ALL5, JITGEN_SUMS(40)
#define JITGEN_ALL7 JITGEN_ALL6, JITGEN_SUMS(48)
#define JITGEN_ALL8 JITGEN_ALL7, JITGEN_SUMS(56)
#define JITGEN_ALL9 JITGEN_ALL8, JITGEN_SUMS(64)
#define JITGEN_ALL10 JITGEN_ALL9, JITGEN_SUMS(72)
#define JITGEN_ALL11 JITGEN_ALL10, JITGEN_SUMS(80)
#define JITGEN_ALL12 JITGEN_ALL11, JITGEN_SUMS(88)
#define JITGEN_ALL13 JITGEN_ALL12, JITGEN_SUMS(96)
#define JITGEN_ALL14 JITGEN_ALL13, JITGEN_SUMS(104)
#define JITGEN_ALL15 JITGEN_ALL14, JITGEN_SUMS(112)
#define JITGEN_TEXTS16 JITGEN_TEXTS15 ", " JITGEN_TEXT15
#define JITGEN_ALL16 JITGEN_ALL15, JITGEN_SUMS(120)

// The operands after the sums are numbered A, B, C, ... .
#define JITGEN_WGMMA(ELEMENT, TYPE, N, EIGHTS, A, B, C, D, E, F, G)                                                   \
  template <>                                                                                                         \
  struct Wgmma<ELEMENT, N> {                                                                                          \
    using Sum = float;                                                                                                \
    static constexpr bool promoted = false;                                                                           \
    template <int transposed, int left_transposed = 0>                                                                \
    static JITGEN_DEVICE void shared(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                     \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE        \
          "." TYPE " {" JITGEN_TEXTS##EIGHTS "}, %" #A ", %" #B ", p, 1, 1, %" #E ", %" #D ";\n}"                     \
          : JITGEN_ALL##EIGHTS                                                                                        \
          : "l"(a), "l"(b), "r"(accumulate), "n"(transposed), "n"(left_transposed));                                  \
    }                                                                                                                 \
    template <int transposed = 0>                                                                                     \
    static JITGEN_DEVICE void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {      \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE        \
          "." TYPE " {" JITGEN_TEXTS##EIGHTS "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1, %" #G ";\n}" \
          : JITGEN_ALL##EIGHTS                                                                                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(transposed));                    \
    }                                                                                                                 \
  };
#define JITGEN_WGMMA_OF_BOTH(...)                \
  JITGEN_WGMMA(bfloat16, "bf16", __VA_ARGS__) \
  JITGEN_WGMMA(float16, "f16", __VA_ARGS__)
JITGEN_WGMMA_OF_BOTH(16, 1, 8, 9, 10, 11, 12, 13, 14)
JITGEN_WGMMA_OF_BOTH(32, 2, 16, 17, 18, 19, 20, 21, 22)
JITGEN_WGMMA_OF_BOTH(64, 4, 32, 33, 34, 35, 36, 37, 38)
JITGEN_WGMMA_OF_BOTH(80, 5, 40, 41, 42, 43, 44, 45, 46)
JITGEN_WGMMA_OF_BOTH(96, 6, 48, 49, 50, 51, 52, 53, 54)
JITGEN_WGMMA_OF_BOTH(112, 7, 56, 57, 58, 59, 60, 61, 62)
JITGEN_WGMMA_OF_BOTH(128, 8, 64, 65, 66, 67, 68, 69, 70)
JITGEN_WGMMA_OF_BOTH(144, 9, 72, 73, 74, 75, 76, 77, 78)
JITGEN_WGMMA_OF_BOTH(160, 10, 80, 81, 82, 83, 84, 85, 86)
JITGEN_WGMMA_OF_BOTH(176, 11, 88, 89, 90, 91, 92, 93, 94)
JITGEN_WGMMA_OF_BOTH(192, 12, 96, 97, 98, 99, 100, 101, 102)
JITGEN_WGMMA_OF_BOTH(208, 13, 104, 105, 106, 107, 108, 109, 110)
JITGEN_WGMMA_OF_BOTH(224, 14, 112, 113, 114, 115, 116, 117, 118)
JITGEN_WGMMA_OF_BOTH(240, 15, 120, 121, 122, 123, 124, 125, 126)
JITGEN_WGMMA_OF_BOTH(256, 16, 128, 129, 130, 131, 132, 133, 134)
#undef JITGEN_WGMMA_OF_BOTH
#undef JITGEN_WGMMA

}  // namespace jitgen
