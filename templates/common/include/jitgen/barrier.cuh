// mbarriers of Hopper and later, which count arrivals and the bytes of copies, and the bulk copies that complete on them
// (PTX ISA, "mbarrier" and "Data Movement: Bulk copy"). Addresses of shared memory are 32-bit, as the instructions take
// them. A barrier's phases alternate between parity 0, the first, and 1.
#pragma once

#include "jitgen/waits.cuh"

namespace jitgen {

JITGEN_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

JITGEN_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#ifdef JITGEN_RACECHECK
  __threadfence_block();  // without it racecheck warns of this write beside an arrival of the same thread
#endif
}
// Makes initialised barriers visible to the copy engine and to the other blocks of a cluster.
JITGEN_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
JITGEN_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
JITGEN_DEVICE void barrier_arrive_at(uint32_t barrier, int rank) {  // the same barrier of block `rank` of the cluster
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
JITGEN_DEVICE void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// How often a warp arrives at a barrier that says that all of its lanes have read something: one lane does, after a
// __syncwarp(). racecheck (compute-sanitizer of CUDA 13.0) does not see that this orders the other lanes' reads, and
// reports the textbook form of it as a race. Where it watches, every lane arrives: what is reported then is one.
#ifdef JITGEN_RACECHECK
constexpr int warp_arrivals = 32;
#else
constexpr int warp_arrivals = 1;
#endif
// `blocks`: of the cluster, each of which has the barrier.
template <int blocks = 1>
JITGEN_DEVICE void warp_arrive(uint32_t barrier) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if constexpr (blocks == 1) {
    if (lane < warp_arrivals) barrier_arrive(barrier);
  } else {
#pragma unroll
    for (int turn = 0; turn < warp_arrivals; ++turn) {
      if (lane < blocks) barrier_arrive_at(barrier, lane);
    }
  }
}
#ifdef JITGEN_BOUNDED_WAITS
JITGEN_DEVICE void barrier_bounded_wait(uint32_t barrier, uint32_t parity, const char* name) {
  const BoundedWait wait(name);
  for (uint32_t done = 0; true; wait.check()) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) break;
  }
}
#endif
// Returns when the phase of that parity is over; `name` is what a debug build calls the barrier.
JITGEN_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity, const char* name) {
#ifdef JITGEN_BOUNDED_WAITS
  barrier_bounded_wait(barrier, parity, name);
#else
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
// `bytes` between addresses that are multiples of 16, as is their number, by the copy engine: one thread asks for them.
JITGEN_DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace jitgen
