// Hopper's instructions under the names the matmul mainloops use: tensor copies and wgmma; mbarriers are in
// barrier.cuh. Only sm_90a has wgmma. Encodings are those of the PTX ISA ("Asynchronous Warpgroup Level Matrix",
// "Tensor-map").
#pragma once

#include "jitgen/barrier.cuh"
#include "jitgen/gemm_ptx.cuh"

namespace jitgen {

// A CUtensorMap, made by the driver; a kernel takes it as `const __grid_constant__ jitgen::TensorMap`.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// -------------------------------------------------------------------------------------------------------- mbarriers

// `barrier_wait` that retries in a loop of its own; the mainloops were measured with it.
JITGEN_DEVICE void barrier_wait_in_place(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// This thread's cp.async copies, once complete, arrive on the barrier, which counts that arrival.
JITGEN_DEVICE void barrier_arrive_on_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Moves registers between warpgroups: each releases or requests registers, all four warps with the same instruction.
template <int count>
JITGEN_DEVICE void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
JITGEN_DEVICE void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
// Registers of a thread in a block of `warpgroups` consumers and a warpgroup that copies. At the start all threads have
// the same number, the largest for which `blocks` blocks fit a multiprocessor (__launch_bounds__ tells the assembler).
// Numbers of registers are multiples of 8.
constexpr int copier_registers = 40;
constexpr int registers_at_start(int warpgroups, int blocks) { return 512 / blocks / (warpgroups + 1) / 8 * 8; }
constexpr int registers_of(int warpgroups, int blocks) {
  const int each = (registers_at_start(warpgroups, blocks) * (warpgroups + 1) - copier_registers) / warpgroups / 8 * 8;
  return each < 240 ? each : 240;
}
template <int warpgroups, int blocks, bool copier>
JITGEN_DEVICE void registers_deal() {
  if constexpr (registers_at_start(warpgroups, blocks) < registers_of(warpgroups, blocks)) {
    if constexpr (copier) {
      registers_give<copier_registers>();
    } else {
      registers_take<registers_of(warpgroups, blocks)>();
    }
  }
}

// --------------------------------------------------------------------------------------------------------- clusters

JITGEN_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
JITGEN_DEVICE int cluster_blocks() {
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return int(count);
}
JITGEN_DEVICE void cluster_sync() {  // all threads of all blocks
  cluster_arrive_release();
  cluster_wait_acquire();
}
JITGEN_DEVICE float4 load_remote(uint32_t address, int rank) {  // reads the shared memory of block `rank`
  float4 value;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(address), "r"(rank));
  return value;
}

// ----------------------------------------------------------------------------------------------------------- copies

constexpr uint64_t keep_normal = 0x1000000000000000;  // createpolicy's encodings of whole-range L2 policies
constexpr uint64_t evict_first = 0x12F0000000000000;

JITGEN_DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies a box of a matrix with its corner at (column, row). Elements outside the matrix become zeros.
JITGEN_DEVICE void copy_box(
    uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, uint64_t policy = keep_normal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
// The same for one matrix of a tensor of four dimensions.
JITGEN_DEVICE void copy_box_of_matrix(
    uint32_t to, const TensorMap& map, int column, int row, int inner, int outer, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(inner), "r"(outer), "r"(barrier)
      : "memory");
}
JITGEN_DEVICE void copy_box_of_matrix_multicast(
    uint32_t to, const TensorMap& map, int column, int row, int inner, int outer, uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(inner), "r"(outer), "r"(barrier), "h"(mask)
      : "memory");
}
// As copy_box, to every block in `mask`: to the same address of each, and completing on the same barrier of each.
JITGEN_DEVICE void copy_box_multicast(
    uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

// Orders ordinary accesses of shared memory before it ahead of copies and wgmma after it.
JITGEN_DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ------------------------------------------------------------------------------------------------------------ wgmma

JITGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JITGEN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
JITGEN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Descriptors of operands in shared memory, with the 128-byte swizzle of a tensor copy whose box has rows of 128 bytes.
// A K-major operand has rows of 64 k's, and a k16 step adds 32 bytes. A transposed one ("MN-major") has rows of 64 n's,
// with `block` bytes from one run of 64 n's to the next, and a k16 step adds 16 rows, which are 2048 bytes.
JITGEN_DEVICE uint64_t descriptor_transposed(uint32_t address, int block) {
  constexpr uint64_t swizzled = uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32;  // eight rows of 128 bytes
  return swizzled | uint64_t(block >> 4) << 16 | (address & 0x3FFFF) >> 4;
}
JITGEN_DEVICE uint64_t descriptor_k_major(uint32_t address) { return descriptor_transposed(address, 16); }

#define JITGEN_S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JITGEN_S1 JITGEN_S0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JITGEN_S2 JITGEN_S1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JITGEN_S3 JITGEN_S2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JITGEN_S4 JITGEN_S3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JITGEN_S5 JITGEN_S4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JITGEN_S6 JITGEN_S5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JITGEN_S7 JITGEN_S6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JITGEN_S8 JITGEN_S7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JITGEN_S9 JITGEN_S8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JITGEN_S10 JITGEN_S9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JITGEN_S11 JITGEN_S10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JITGEN_S12 JITGEN_S11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define JITGEN_S13 JITGEN_S12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define JITGEN_S14 JITGEN_S13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define JITGEN_S15 JITGEN_S14 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define JITGEN_D4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define JITGEN_D(o) JITGEN_D4(o), JITGEN_D4(o + 4)
#define JITGEN_D0 JITGEN_D(0)
#define JITGEN_D1 JITGEN_D0, JITGEN_D(8)
#define JITGEN_D3 JITGEN_D1, JITGEN_D(16), JITGEN_D(24)
#define JITGEN_D5 JITGEN_D3, JITGEN_D(32), JITGEN_D(40)
#define JITGEN_D7 JITGEN_D5, JITGEN_D(48), JITGEN_D(56)
#define JITGEN_D11 JITGEN_D7, JITGEN_D(64), JITGEN_D(72), JITGEN_D(80), JITGEN_D(88)
#define JITGEN_D15 JITGEN_D11, JITGEN_D(96), JITGEN_D(104), JITGEN_D(112), JITGEN_D(120)

// d[64 rows, n] (+)= A[64, 16] B[n, 16]^T for one warpgroup, asynchronously. A comes from registers (`registers` are
// the four words of an m16n8k16 fragment, and warp w of the group has rows 16w..16w+15), or is given by a descriptor.
template <class Element, int n>
struct Wgmma;

#define JITGEN_WGMMA(ELEMENT, TYPE, N, S, D, I0, I1, I2, I3, I4, I5)                                                \
  template <>                                                                                                       \
  struct Wgmma<ELEMENT, N> {                                                                                        \
    static JITGEN_DEVICE void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" I5 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" S "}, {%" I0 ", %" I1 ", %" \
                   I2 ", %" I3 "}, %" I4 ", p, 1, 1, 0;\n}"                                                         \
                   : D                                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                          \
    }                                                                                                               \
    template <int transposed>                                                                                       \
    static JITGEN_DEVICE void shared(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" I2 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" S "}, %" I0 ", %" I1        \
                   ", p, 1, 1, 0, %" I3 ";\n}"                                                                      \
                   : D                                                                                              \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(transposed));                                             \
    }                                                                                                               \
  };
// Inline assembly with so many operands takes long to compile. A source that defines JITGEN_WGMMA_SIZE before it
// includes this file gets the statement for that n alone.
#ifdef JITGEN_WGMMA_SIZE
#define JITGEN_HAS_WGMMA(n) (n == JITGEN_WGMMA_SIZE)
#else
#define JITGEN_HAS_WGMMA(n) 1
#endif
#if JITGEN_HAS_WGMMA(16)
JITGEN_WGMMA(bfloat16, "bf16", 16, JITGEN_S0, JITGEN_D0, "8", "9", "10", "11", "12", "13")
JITGEN_WGMMA(float16, "f16", 16, JITGEN_S0, JITGEN_D0, "8", "9", "10", "11", "12", "13")
#endif
#if JITGEN_HAS_WGMMA(32)
JITGEN_WGMMA(bfloat16, "bf16", 32, JITGEN_S1, JITGEN_D1, "16", "17", "18", "19", "20", "21")
JITGEN_WGMMA(float16, "f16", 32, JITGEN_S1, JITGEN_D1, "16", "17", "18", "19", "20", "21")
#endif
#if JITGEN_HAS_WGMMA(64)
JITGEN_WGMMA(bfloat16, "bf16", 64, JITGEN_S3, JITGEN_D3, "32", "33", "34", "35", "36", "37")
JITGEN_WGMMA(float16, "f16", 64, JITGEN_S3, JITGEN_D3, "32", "33", "34", "35", "36", "37")
#endif
#if JITGEN_HAS_WGMMA(96)
JITGEN_WGMMA(bfloat16, "bf16", 96, JITGEN_S5, JITGEN_D5, "48", "49", "50", "51", "52", "53")
JITGEN_WGMMA(float16, "f16", 96, JITGEN_S5, JITGEN_D5, "48", "49", "50", "51", "52", "53")
#endif
#if JITGEN_HAS_WGMMA(128)
JITGEN_WGMMA(bfloat16, "bf16", 128, JITGEN_S7, JITGEN_D7, "64", "65", "66", "67", "68", "69")
JITGEN_WGMMA(float16, "f16", 128, JITGEN_S7, JITGEN_D7, "64", "65", "66", "67", "68", "69")
#endif
#if JITGEN_HAS_WGMMA(192)
JITGEN_WGMMA(bfloat16, "bf16", 192, JITGEN_S11, JITGEN_D11, "96", "97", "98", "99", "100", "101")
JITGEN_WGMMA(float16, "f16", 192, JITGEN_S11, JITGEN_D11, "96", "97", "98", "99", "100", "101")
#endif
#if JITGEN_HAS_WGMMA(256)
JITGEN_WGMMA(bfloat16, "bf16", 256, JITGEN_S15, JITGEN_D15, "128", "129", "130", "131", "132", "133")
JITGEN_WGMMA(float16, "f16", 256, JITGEN_S15, JITGEN_D15, "128", "129", "130", "131", "132", "133")
#endif
#undef JITGEN_HAS_WGMMA
#undef JITGEN_WGMMA

}  // namespace jitgen
