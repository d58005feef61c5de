// Bounds on waits, in debug builds alone (JITGEN_DEBUG=5): a wait that takes too long ends the kernel, and the driver
// prints the names of the kernel and of what was waited for, the block and the thread. mbarriers are polled. Named
// barriers and those of a cluster cannot be polled, so arrivals are counted in shared memory, and a thread waits in
// hardware only when all have arrived. In other builds these functions are empty.
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

#ifdef JITGEN_BOUNDED_WAITS  // the name of the kernel, a string
constexpr int64_t wait_cycles = int64_t(1) << 34;  // 8.7 s at the 1.98 GHz of an H100

struct BoundedWait {
  const char* const name;
  const int64_t start = clock64();
  JITGEN_DEVICE explicit BoundedWait(const char* name) : name(name) {}
  // Called between two looks at what is waited for.
  JITGEN_DEVICE void check() const {
    if (clock64() - start > wait_cycles) {  // the compiler knows this function, which `assert` calls
      __assertfail(name, "a wait of more than 2^34 cycles", 0, JITGEN_BOUNDED_WAITS, 1);
    }
  }
};

// Arrivals since the kernel began. Barriers of the same id and another number of whole
// warpgroups are counted apart.
struct Arrivals {
  static constexpr int ids = 16, sizes = 5, warps = 32;
  uint32_t named[ids][sizes];       // threads
  uint32_t of_cluster;              // warps; only that of the cluster's first block counts
  uint32_t cluster_target[warps];   // what each warp of this block waits for
};
JITGEN_DEVICE Arrivals& arrivals() {
  __shared__ Arrivals counted;
  return counted;
}
// Counts the threads of named barrier `id` among `threads`.
template <int threads>
JITGEN_DEVICE uint32_t& group_counter(int id) {
  static_assert(threads / 128 < Arrivals::sizes, "there is a counter for each number of whole warpgroups");
  return arrivals().named[id][threads / 128];
}
JITGEN_DEVICE bool has_come(uint32_t count, uint32_t target) { return int32_t(count - target) >= 0; }

JITGEN_DEVICE uint32_t cluster_counter() {  // the address of the first block's
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, 0;"
      : "=r"(address)
      : "r"(uint32_t(__cvta_generic_to_shared(&arrivals().of_cluster))));
  return address;
}
JITGEN_DEVICE uint32_t cluster_warps() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks * ((blockDim.x * blockDim.y * blockDim.z + 31) / 32);
}
#endif

// Every thread of a kernel that has named barriers, or of one that meets its cluster, calls this first.
template <bool clusters>
JITGEN_DEVICE void waits_begin() {
#ifdef JITGEN_BOUNDED_WAITS
  uint32_t* const words = reinterpret_cast<uint32_t*>(&arrivals());
  for (int i = threadIdx.x; i < int(sizeof(Arrivals) / 4); i += blockDim.x) words[i] = 0;
  __syncthreads();
  if (clusters) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Counts this thread among the `threads` of named barrier `id`.
template <int threads>
JITGEN_DEVICE uint32_t group_arrived(int id) {
#ifdef JITGEN_BOUNDED_WAITS
  const uint32_t before = atomicAdd(&group_counter<threads>(id), 1u);
  return (before / threads + 1) * threads;
#else
  return 0;
#endif
}
// Waits until all of them have come.
template <int threads>
JITGEN_DEVICE void group_bounded(int id, const char* name) {
#ifdef JITGEN_BOUNDED_WAITS
  const uint32_t target = group_arrived<threads>(id);
  const volatile uint32_t& count = group_counter<threads>(id);
  const BoundedWait wait(name);
  while (!has_come(count, target)) wait.check();
#endif
}

// Counts this warp among those of its cluster.
JITGEN_DEVICE void cluster_arrived() {
#ifdef JITGEN_BOUNDED_WAITS
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    uint32_t before;
    asm volatile("atom.release.cluster.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(cluster_counter()) : "memory");
    const uint32_t warps = cluster_warps();
    arrivals().cluster_target[threadIdx.x / 32] = (before / warps + 1) * warps;
  }
  __syncwarp();
#endif
}
// Waits until all of them have come.
JITGEN_DEVICE void cluster_bounded(const char* name) {
#ifdef JITGEN_BOUNDED_WAITS
  if (threadIdx.x % 32 == 0) {
    const uint32_t target = arrivals().cluster_target[threadIdx.x / 32];
    const BoundedWait wait(name);
    for (uint32_t count = target - 1; true; wait.check()) {
      asm volatile("ld.acquire.cluster.shared::cluster.u32 %0, [%1];" : "=r"(count) : "r"(cluster_counter()) : "memory");
      if (has_come(count, target)) break;
    }
  }
  __syncwarp();
#endif
}

}  // namespace jitgen
