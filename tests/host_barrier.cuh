// What barrier.cuh does, on the host (tests/cuda_on_host.py): 8 bytes of shared memory count arrivals and bytes.
#pragma once

#include "jitgen/waits.cuh"

namespace jitgen {

struct Barrier {
  int32_t bytes;
  uint8_t pending, expected, phase, unused;
  void turn() {
    if (pending == 0 && bytes == 0) pending = expected, ++phase;
  }
};
inline Barrier& barrier_at(uint32_t address) { return *reinterpret_cast<Barrier*>(shared_memory + address); }

inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }
inline void barrier_init(uint32_t barrier, int arrivals) {
  barrier_at(barrier) = {0, uint8_t(arrivals), uint8_t(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
  --barrier_at(barrier).pending;
  barrier_at(barrier).turn();
}
inline void barrier_arrive_expect(uint32_t barrier, int bytes) {
  barrier_at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
constexpr int warp_arrivals = 1;
template <int blocks = 1>
inline void warp_arrive(uint32_t barrier) {
  static_assert(blocks == 1, "the host has no clusters");
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
inline void barrier_copied(uint32_t barrier, int bytes) {
  barrier_at(barrier).bytes -= bytes;
  barrier_at(barrier).turn();
}
inline void barrier_wait(uint32_t barrier, uint32_t parity, const char* name) {
  for (int turns = 0; (barrier_at(barrier).phase & 1u) == parity; ++turns) {
    if (turns == most_turns) give_up(name);
    pause();
  }
}

}  // namespace jitgen
