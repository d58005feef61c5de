// Hopper's instructions under the names that mainloops use: tensor copies and descriptors of wgmma; mbarriers are in
// barrier.cuh, wgmma itself in wgmma_atoms.cuh. Only sm_90a has wgmma. Encodings are those of the PTX ISA ("Asynchronous
// Warpgroup Level Matrix", "Tensor-map").
#pragma once

#include "jitgen/barrier.cuh"
#include "jitgen/ptx.cuh"
#include "jitgen/register_deal.cuh"
#include "jitgen/wgmma_atoms.cuh"

namespace jitgen {

// A CUtensorMap, made by the driver; a kernel takes it as `const __grid_constant__ jitgen::TensorMap`.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// -------------------------------------------------------------------------------------------------------- mbarriers

// `barrier_wait` that retries in a loop of its own; the mainloops were measured with it.
JITGEN_DEVICE void barrier_wait_in_place(uint32_t barrier, uint32_t parity, const char* name) {
#ifdef JITGEN_BOUNDED_WAITS
  barrier_bounded_wait(barrier, parity, name);
#else
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
// This thread's cp.async copies, once complete, arrive on the barrier, which counts that arrival.
JITGEN_DEVICE void barrier_arrive_on_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Gives this warpgroup the registers of its role (register_deal.cuh); all four warps call it together.
template <int consumers, int blocks, bool is_copier, int copier_registers = 40>
JITGEN_DEVICE void registers_deal() {
  using Deal = RegisterDeal<consumers, blocks, copier_registers>;
  if constexpr (Deal::deals) {
    if constexpr (is_copier) {
      registers_release<copier_registers>();
    } else {
      registers_request<Deal::consumer>();
    }
  }
}

// --------------------------------------------------------------------------------------------------------- clusters

JITGEN_DEVICE void cluster_sync(const char* name) {  // all threads of all blocks
  cluster_arrive_release();
  cluster_wait_acquire(name);
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

JITGEN_DEVICE float load_remote_float(uint32_t address, int rank) {
  float value;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n}"
      : "=f"(value)
      : "r"(address), "r"(rank));
  return value;
}

// This thread's warp, as a number that ptxas knows to be the same for all lanes: branches by it are uniform.
JITGEN_DEVICE int own_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// ------------------------------------------------------------------------------------------------------------ stores

// Stores four matrices of 8 x 8 elements of 16 bits, of which a lane has two neighbours of row lane / 4 in a word: lane
// 8 i + r says where row r of that of `words[i]` is, 16 bytes.
JITGEN_DEVICE void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// The same as their transposes.
JITGEN_DEVICE void store_matrices_transposed(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
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
// The same of a tensor of five dimensions.
JITGEN_DEVICE void copy_box_of_batch(
    uint32_t to, const TensorMap& map, int column, int row, const int (&batch)[3], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]), "r"(barrier)
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

// Descriptors of operands in shared memory, with the 128-byte swizzle of a tensor copy whose box has rows of 128 bytes.
// A K-major operand has rows of 64 k's, and a k16 step adds 32 bytes. A transposed one ("MN-major") has rows of 64 n's,
// with `block` bytes from one run of 64 n's to the next, and a k16 step adds 16 rows, which are 2048 bytes.
JITGEN_DEVICE uint64_t descriptor_transposed(uint32_t address, int block) {
  constexpr uint64_t swizzled = uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32;  // eight rows of 128 bytes
  return swizzled | uint64_t(block >> 4) << 16 | (address & 0x3FFFF) >> 4;
}
JITGEN_DEVICE uint64_t descriptor_k_major(uint32_t address) { return descriptor_transposed(address, 16); }

}  // namespace jitgen
