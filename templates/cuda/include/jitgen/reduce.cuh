// Combining values over the threads of a row: a warp's by shuffles, a block's through shared memory, a cluster's through
// distributed shared memory. Every thread gets the result, always combined in the same order, so sums are reproducible.
//
//   float total = jitgen::combine_lanes<jitgen::Sum, 32>(mine);
//   jitgen::combine_row<jitgen::Sum, threads, cluster>(mine, scratch_of_row)
#pragma once

#include "jitgen/math.cuh"

namespace jitgen {

// A value and where in the row it stands, for argmax and argmin.
template <class T>
struct Indexed {
  T value;
  int64_t index;
};

// ---------------------------------------------------------------------------------------------------------- what

struct Sum {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return add(a, b);
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a + b; }
  static JITGEN_DEVICE double combine(double a, double b) { return a + b; }
};
struct Prod {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return mul(a, b);
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a * b; }
  static JITGEN_DEVICE double combine(double a, double b) { return a * b; }
};
struct Max {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return maximum(a, b);
  }
};
struct Min {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return minimum(a, b);
  }
};
struct Any {
  static JITGEN_DEVICE bool combine(bool a, bool b) { return a || b; }
};
struct All {
  static JITGEN_DEVICE bool combine(bool a, bool b) { return a && b; }
};

// The first place of the extremum; NaN counts as beyond every number.
template <bool largest>
struct ArgExtremum {
  template <class T>
  static JITGEN_DEVICE bool wins(const Indexed<T>& a, const Indexed<T>& b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan || b_nan) return a_nan && (!b_nan || a.index < b.index);
    if (a.value == b.value) return a.index < b.index;
    return largest ? a.value > b.value : a.value < b.value;
  }
  template <class T>
  static JITGEN_DEVICE Indexed<T> combine(const Indexed<T>& a, const Indexed<T>& b) {
    return wins(a, b) ? a : b;
  }
};
using ArgMax = ArgExtremum<true>;
using ArgMin = ArgExtremum<false>;

// ---------------------------------------------------------------------------------------------------- among lanes

template <class T>
JITGEN_DEVICE T from_lane(T value, int distance) {
  constexpr int words = (sizeof(T) + 3) / 4;
  union {
    T whole;
    uint32_t parts[words];
  } from, to;
  for (int i = 0; i < words; ++i) from.parts[i] = 0;
  from.whole = value;
#pragma unroll
  for (int i = 0; i < words; ++i) to.parts[i] = __shfl_xor_sync(0xffffffffu, from.parts[i], distance);
  return to.whole;
}

// Over aligned groups of `lanes` (a power of two) neighbours; both partners combine lower with upper, so they agree.
template <class Op, int lanes, class T>
JITGEN_DEVICE T combine_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) value = Op::combine(value, from_lane(value, distance));
  return value;
}

// ------------------------------------------------------------------------------------------------ among the cluster

JITGEN_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
JITGEN_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
JITGEN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The object at `address` of this block's shared memory, as block `rank` of the cluster has it.
template <class T>
JITGEN_DEVICE T load_from_block(const T* address, uint32_t rank) {
  constexpr int words = (sizeof(T) + 3) / 4;
  union {
    T whole;
    uint32_t parts[words];
  } value;
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
#pragma unroll
  for (int i = 0; i < words; ++i) {
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value.parts[i]) : "r"(remote + 4 * i) : "memory");
  }
  return value.whole;
}

// ------------------------------------------------------------------------------------------------------ over a row

// What a row's threads share while they combine one value. Never reused within a kernel, so nothing has to be awaited
// before it is written.
template <class T, int warps>
struct Scratch {
  alignas(16) T partial[warps];
  alignas(16) T block;
};

template <class Op, int threads, int cluster, class T, int warps>
JITGEN_DEVICE T combine_row(T value, Scratch<T, warps>& scratch, int thread) {
  value = combine_lanes<Op, (threads < 32 ? threads : 32)>(value);
  if (threads > 32) {
    if (thread % 32 == 0) scratch.partial[thread / 32] = value;
    __syncthreads();
    value = combine_lanes<Op, warps>(scratch.partial[thread % warps]);
  }
  if (cluster > 1) {
    if (thread == 0) scratch.block = value;
    cluster_arrive();
    cluster_wait();
    value = combine_lanes<Op, cluster>(load_from_block(&scratch.block, thread % cluster));
  }
  return value;
}

// The same where a warp's lanes belong to as many rows, and the threads of one row to as many warps.
template <class T, int threads>
struct BesideScratch {
  T partial[threads + 1];  // one more, so that a warp's lanes meet different banks
};

template <class Op, int threads, int cluster, class T>
JITGEN_DEVICE T combine_beside(T value, BesideScratch<T, threads>& scratch, int thread) {
  static_assert(cluster == 1, "rows beside one another are not spread over a cluster");
  scratch.partial[thread] = value;
#pragma unroll
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (thread < distance) {
      scratch.partial[thread] = Op::combine(scratch.partial[thread], scratch.partial[thread + distance]);
    }
  }
  __syncthreads();
  return scratch.partial[0];
}

}  // namespace jitgen
