// A warp on the CPU: 32 threads, which meet where lanes exchange something; and what the headers of the attention kernel
// need of those that have PTX. The memories of a cluster's blocks are `memories`, each beginning at address 0.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <tuple>
#include <vector>
#define JITGEN_DEVICE inline
struct Dim { int x; };
inline thread_local Dim threadIdx;
inline std::barrier<> warp(32);
inline int64_t lanes[32];
inline uint32_t __ballot_sync(uint32_t, bool mine) {
  lanes[threadIdx.x % 32] = mine;
  warp.arrive_and_wait();
  uint32_t found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= uint32_t(lanes[lane]) << lane;
  warp.arrive_and_wait();
  return found;
}
inline int64_t __shfl_xor_sync(uint32_t, int64_t mine, int step) {
  lanes[threadIdx.x % 32] = mine;
  warp.arrive_and_wait();
  const int64_t found = lanes[threadIdx.x % 32 ^ step];
  warp.arrive_and_wait();
  return found;
}
inline int __clz(uint32_t a) { return a ? __builtin_clz(a) : 32; }
inline float __shfl_xor_sync(uint32_t mask, float mine, int step) {
  int32_t bits;
  memcpy(&bits, &mine, 4);
  bits = int32_t(__shfl_xor_sync(mask, int64_t(bits), step));
  memcpy(&mine, &bits, 4);
  return mine;
}
inline void __syncwarp() { warp.arrive_and_wait(); }
inline bool __any_sync(uint32_t mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline void __syncthreads() {}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
#define __shared__
#define __align__(bytes)
inline Dim blockIdx, gridDim;
inline uint8_t* memories[8];

namespace cute {
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int n> void warpgroup_wait() {}
}
namespace cutlass::arch {
template <int n> void warpgroup_reg_dealloc() {}
template <int n> void warpgroup_reg_alloc() {}
}
namespace jitgen {
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };
struct TensorMap {};
template <class T, int n> struct Vector;
template <class T, class V> void store_vector(T*, const V&);
template <class Element, int n> struct Wgmma;
inline int smaller(int a, int b) { return a < b ? a : b; }
inline float exp2_normal(float a) { return std::exp2(a); }
inline void barrier_init(uint32_t, int) {}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t) {}
inline void barrier_arrive_expect(uint32_t, int) {}
inline void barrier_wait_in_place(uint32_t, uint32_t) {}
inline void proxy_fence() {}
inline void previous_kernel_wait() {}
inline void next_kernel_may_start() {}
inline void cluster_sync() {}
inline int cluster_rank() { return 0; }
inline int cluster_blocks() { return 1; }
inline uint32_t shared_address(const void*) { return 0; }
inline uint64_t descriptor_k_major(uint32_t) { return 0; }
inline uint64_t descriptor_transposed(uint32_t, int) { return 0; }
template <int threads> void group_barrier(int) {}
template <int threads> void group_arrive(int) {}
inline float load_remote_float(uint32_t at, int rank) { return *reinterpret_cast<const float*>(memories[rank] + at); }
inline float4 load_remote(uint32_t at, int rank) { return *reinterpret_cast<const float4*>(memories[rank] + at); }
}
