// The instructions that matrix kernels are built from, one small function each: asynchronous copies into shared memory,
// matrix fragments out of it, tensor-core products, named barriers, and a cluster's distributed shared memory.
// Addresses of shared memory are 32-bit, as the instructions take them.
#pragma once

#include "jitgen/barrier.cuh"
#include "jitgen/dependent_launch.cuh"
#include "jitgen/vector.cuh"

namespace jitgen {

JITGEN_DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// -------------------------------------------------------------------------------------------------- asynchronous copies

// Copies `bytes` (0..size) from global to shared memory and fills the rest of `size` (4, 8 or 16) with zeros.
template <int size>
JITGEN_DEVICE void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(size), "r"(bytes) : "memory");
}
template <int size>
JITGEN_DEVICE void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(size) : "memory");
}
JITGEN_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's latest groups of copies are incomplete.
template <int pending>
JITGEN_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ------------------------------------------------------------------------------------------------------------ barriers

// A barrier among the `threads` of a block that use the same id, 1..15; __syncthreads uses 0. `name` is what a debug
// build calls it.
template <int threads>
JITGEN_DEVICE void group_barrier(int id, const char* name) {
  if constexpr (threads == 32) {
    __syncwarp();
  } else {
    group_bounded<threads>(id, name);
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
  }
}

// Arrives at such a barrier without waiting there.
template <int threads>
JITGEN_DEVICE void group_arrive(int id) {
  group_arrived<threads>(id);
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

JITGEN_DEVICE uint32_t block_of_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
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
// A cluster's threads see each other's shared-memory writes made before arrive_release after wait_acquire.
JITGEN_DEVICE void cluster_arrive_release() {
  cluster_arrived();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
JITGEN_DEVICE void cluster_arrive_relaxed() {
  cluster_arrived();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
JITGEN_DEVICE void cluster_wait_acquire(const char* name) {
  cluster_bounded(name);
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes one number to the shared memory of block `rank` of the cluster, at the offset of `address` in this block's.
JITGEN_DEVICE void store_to_block(uint32_t address, uint32_t rank, float value) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
JITGEN_DEVICE void store_to_block(uint32_t address, uint32_t rank, double value) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
}
JITGEN_DEVICE void store_to_block(uint32_t address, uint32_t rank, int32_t value) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}
JITGEN_DEVICE void store_to_block(uint32_t address, uint32_t rank, float4 values) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

// ----------------------------------------------------------------------------------------------------------- fragments

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
JITGEN_DEVICE void load_matrices(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
JITGEN_DEVICE void load_matrices_transposed(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// The transpose of an 8x8 matrix of 16-bit elements, of which lane 4g+t has elements 2t and 2t+1 of row g.
JITGEN_DEVICE uint32_t transposed_matrix(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// sum[16 x 8] = a[16 x 16] b[16 x 8] + start. Lane 4g+t holds a's rows g and g+8 at columns 2t, 2t+1, 2t+8, 2t+9 (in
// the order (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8), pairs), b's column g at those rows, and the sum's row g at
// columns 2t, 2t+1, then row g+8.
template <class Element>
JITGEN_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                const float (&start)[4]);

#define JITGEN_MULTIPLY_ADD(type, name)                                                                               \
  template <>                                                                                                         \
  JITGEN_DEVICE void multiply_add<type>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,            \
                                        const float (&start)[4]) {                                                    \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%10, %11, %12, %13};"                                                                                       \
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]), \
          "f"(start[3]));                                                                                             \
  }
JITGEN_MULTIPLY_ADD(bfloat16, "bf16")
JITGEN_MULTIPLY_ADD(float16, "f16")
#undef JITGEN_MULTIPLY_ADD

// ------------------------------------------------------------------------------------------------------ pairs of halves

// (a & mask) | bits, and (a & mask) ^ bits: one three-input logic instruction each.
template <uint32_t mask, uint32_t bits>
JITGEN_DEVICE uint32_t and_or(uint32_t a) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(mask), "n"(bits));
  return result;
}
template <uint32_t mask, uint32_t bits>
JITGEN_DEVICE uint32_t and_xor(uint32_t a) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "n"(mask), "n"(bits));
  return result;
}

template <class T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<bfloat16> = true;

// Two neighbouring numbers: bfloat16, the first one in the low half, or float.
JITGEN_DEVICE float2 unpack_pair(uint32_t pair) {
  return {__int_as_float(int(pair << 16)), __int_as_float(int(pair & 0xffff0000u))};
}
JITGEN_DEVICE float2 unpack_pair(uint2 pair) { return {__int_as_float(int(pair.x)), __int_as_float(int(pair.y))}; }

template <class Element>
JITGEN_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);
template <>
JITGEN_DEVICE uint32_t fma_pair<bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
template <>
JITGEN_DEVICE uint32_t fma_pair<float16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Of bfloat16 numbers.
JITGEN_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
JITGEN_DEVICE uint32_t subtract_pair(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
// Two floats, each rounded to Element.
template <class Element>
JITGEN_DEVICE uint32_t round_pair(float low, float high) {
  uint32_t pair;
  if constexpr (is_bfloat16<Element>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

}  // namespace jitgen
