// Warps, blocks and clusters on the CPU, a thread for each of theirs, which meet where lanes exchange something and wait
// at barriers; and what the headers of the attention kernel need of those that have PTX. Products of wgmma are computed
// where they are issued, from the operands' places in shared memory. Each block's shared memory begins at address 0.
#pragma once
#include "jitgen/register_deal.cuh"
#include <condition_variable>
#include <cmath>
#include <memory>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>
#define JITGEN_DEVICE inline
struct Dim { int x; };
inline thread_local Dim threadIdx, blockIdx, gridDim;

// Where a number of threads meet.
class Meeting {
 public:
  explicit Meeting(int threads) : threads(threads), missing(threads) {}
  void arrive_and_wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const uint32_t now = round;
    if (--missing == 0) {
      missing = threads;
      ++round;
      changed.notify_all();
      return;
    }
    changed.wait(lock, [&] { return round != now; });
  }

 private:
  const int threads;
  int missing;
  uint32_t round = 0;
  std::mutex mutex;
  std::condition_variable changed;
};
struct Warp {
  Meeting all{32};
  int64_t lanes[32];
  uint32_t words[32][4];
};
// A barrier of shared memory, or a named one: `pending` of `expected` arrivals are missing in this phase, and so many bytes.
struct Barrier {
  int expected = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
};
struct Block {
  std::vector<uint8_t> bytes;
  uint8_t* memory = nullptr;
  std::map<uint32_t, Barrier> barriers;
  Barrier named[16];
  std::mutex mutex;
  std::condition_variable changed;
  Warp warps[16];
  Meeting* all = nullptr;  // of its threads

  explicit Block(int size) : bytes(size + 1024, 0xff) {  // all NaN
    memory = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 1023) / 1024 * 1024);
  }
  void arrive(Barrier& barrier) {
    --barrier.pending;
    turn(barrier);
  }
  void turn(Barrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.expected;
    ++barrier.phase;
    changed.notify_all();
  }
};
struct Cluster {
  std::vector<Block*> blocks;
  Meeting* all = nullptr;
};
inline Warp only_warp;
inline thread_local Warp* warp = &only_warp;
inline thread_local Block* block = nullptr;
inline thread_local Cluster* cluster = nullptr;
inline uint8_t* memories[8];  // where there is no cluster
inline uint32_t __ballot_sync(uint32_t, bool mine) {
  warp->lanes[threadIdx.x % 32] = mine;
  warp->all.arrive_and_wait();
  uint32_t found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= uint32_t(warp->lanes[lane]) << lane;
  warp->all.arrive_and_wait();
  return found;
}
inline int64_t __shfl_xor_sync(uint32_t, int64_t mine, int step) {
  warp->lanes[threadIdx.x % 32] = mine;
  warp->all.arrive_and_wait();
  const int64_t found = warp->lanes[threadIdx.x % 32 ^ step];
  warp->all.arrive_and_wait();
  return found;
}
inline uint32_t __shfl_sync(uint32_t, uint32_t mine, int lane) {
  warp->lanes[threadIdx.x % 32] = mine;
  warp->all.arrive_and_wait();
  const uint32_t found = uint32_t(warp->lanes[lane]);
  warp->all.arrive_and_wait();
  return found;
}
inline int __ffs(uint32_t a) { return __builtin_ffs(int(a)); }
inline int __clz(uint32_t a) { return a ? __builtin_clz(a) : 32; }
inline float __shfl_xor_sync(uint32_t mask, float mine, int step) {
  int32_t bits;
  memcpy(&bits, &mine, 4);
  bits = int32_t(__shfl_xor_sync(mask, int64_t(bits), step));
  memcpy(&mine, &bits, 4);
  return mine;
}
inline void __syncwarp() { warp->all.arrive_and_wait(); }
inline bool __any_sync(uint32_t mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline void __syncthreads() {
  if (block && block->all) block->all->arrive_and_wait();
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __float_as_int(float value) {
  int bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
struct float2 { float x, y; };
struct uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct uint4 { uint32_t x, y, z, w; };
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
inline float2 make_float2(float x, float y) { return {x, y}; }
#define __shared__
#define __align__(bytes)

namespace jitgen {
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int groups> void wgmma_wait() {}
template <int n> void wgmma_written(float (&)[n]) {}
using ::int64_t;
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };
struct TensorMap {};
inline float load(bfloat16 element) { return __int_as_float(int(uint32_t(element.bits) << 16)); }
template <class T>
T store(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return T{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <class T, int n>
struct Vector {
  T elements[n];
  T& operator[](int i) { return elements[i]; }
};
template <class T, class V>
void store_vector(T* to, const V& vector) { memcpy(to, &vector, sizeof(vector)); }
inline int smaller(int a, int b) { return a < b ? a : b; }
inline float exp2_normal(float a) { return std::exp2(a); }

inline void barrier_init(uint32_t at, int arrivals) { block->barriers[at].expected = block->barriers[at].pending = arrivals; }
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t at) {
  const std::lock_guard<std::mutex> guard(block->mutex);
  block->arrive(block->barriers.at(at));
}
constexpr int warp_arrivals = 1;
template <int blocks = 1>
inline void warp_arrive(uint32_t at) {
  static_assert(blocks == 1, "for a cluster there are remote arrivals");
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(at);
}
inline void barrier_arrive_expect(uint32_t at, int bytes) {
  const std::lock_guard<std::mutex> guard(block->mutex);
  block->barriers.at(at).bytes += bytes;
  block->arrive(block->barriers.at(at));
}
inline void barrier_copied(uint32_t at, int bytes) {  // what a tensor copy does at its end
  const std::lock_guard<std::mutex> guard(block->mutex);
  block->barriers.at(at).bytes -= bytes;
  block->turn(block->barriers.at(at));
}
inline void barrier_wait_in_place(uint32_t at, uint32_t parity, const char*) {  // by a whole warp, whose lanes wait as one
  if (threadIdx.x % 32 == 0) {
    std::unique_lock<std::mutex> lock(block->mutex);
    Barrier& barrier = block->barriers.at(at);
    block->changed.wait(lock, [&] { return (barrier.phase & 1) != parity; });
  }
  warp->all.arrive_and_wait();
}
template <int threads>
void group_arrive(int id) {
  const std::lock_guard<std::mutex> guard(block->mutex);
  Barrier& barrier = block->named[id];
  if (barrier.expected == 0) barrier.expected = barrier.pending = threads;
  block->arrive(barrier);
}
template <int threads>
void group_barrier(int id, const char*) {
  std::unique_lock<std::mutex> lock(block->mutex);
  Barrier& barrier = block->named[id];
  if (barrier.expected == 0) barrier.expected = barrier.pending = threads;
  const uint32_t phase = barrier.phase;
  block->arrive(barrier);
  block->changed.wait(lock, [&] { return barrier.phase != phase; });
}
inline void proxy_fence() {}
inline void previous_kernel_wait() {}
inline void next_kernel_may_start() {}
inline void cluster_sync(const char* = nullptr) { cluster->all->arrive_and_wait(); }
inline void cluster_arrive_relaxed() {}
inline void cluster_arrive_release() {}
inline void cluster_wait_acquire(const char*) { cluster_sync(); }
template <bool clusters>
void waits_begin() {}
template <int consumers, int blocks, bool is_copier, int copier_registers = 40>
void registers_deal() {  // there are none to deal; RegisterDeal checks the numbers
  static_assert(RegisterDeal<consumers, blocks, copier_registers>::consumer > 0);
}
template <class T>
void store_to_block(uint32_t at, uint32_t rank, T value) { memcpy(cluster->blocks[rank]->memory + at, &value, sizeof(T)); }
inline int cluster_rank() { return 0; }
inline int cluster_blocks() { return 1; }
inline uint32_t shared_address(const void*) { return 0; }
inline const uint8_t* remote(uint32_t at, int rank) {
  return (cluster ? cluster->blocks[rank]->memory : memories[rank]) + at;
}
inline float load_remote_float(uint32_t at, int rank) { return *reinterpret_cast<const float*>(remote(at, rank)); }
inline float4 load_remote(uint32_t at, int rank) { return *reinterpret_cast<const float4*>(remote(at, rank)); }

// As wgmma_ptx.cuh: the address in units of 16 bytes, and from bit 16 on the bytes between runs of 64 columns.
inline uint64_t descriptor_transposed(uint32_t address, int run) { return uint64_t(run >> 4) << 16 | address >> 4; }
inline uint64_t descriptor_k_major(uint32_t address) { return descriptor_transposed(address, 16); }
inline float operand(uint64_t address) {  // with the 128-byte swizzle
  const uint64_t at = address ^ (address >> 7 & 7) << 4;
  return load(*reinterpret_cast<const bfloat16*>(block->memory + at));
}
// A lane's two elements of row `row` of a matrix of 16-bit elements, of which lane 4g+t has elements 2t and 2t+1 of row g.
inline uint16_t element_of(int word, int row, int column) {
  return uint16_t(warp->words[row * 4 + column / 2][word] >> column % 2 * 16);
}
inline uint32_t transposed_matrix(uint32_t pair) {
  const int lane = threadIdx.x % 32;
  warp->words[lane][0] = pair;
  warp->all.arrive_and_wait();
  const uint32_t low = element_of(0, lane % 4 * 2, lane / 4), high = element_of(0, lane % 4 * 2 + 1, lane / 4);
  warp->all.arrive_and_wait();
  return high << 16 | low;
}
inline void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 32;
  memcpy(warp->words[lane], words, 16);
  warp->all.arrive_and_wait();
  uint32_t row[4];
  for (int word = 0; word < 4; ++word) row[word] = warp->words[lane % 8 * 4 + word][lane / 8];
  memcpy(block->memory + address, row, 16);
  warp->all.arrive_and_wait();
}
template <class Element>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&start)[4]) {
  const int lane = threadIdx.x % 32;
  float left[4][16];
  memcpy(warp->words[lane], a, 16);
  warp->all.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) left[i][k] = load(Element{element_of(i / 2 + k / 8 * 2, lane / 4, k % 8)});
  }
  warp->all.arrive_and_wait();
  warp->words[lane][0] = b0, warp->words[lane][1] = b1;
  warp->all.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    float found = start[i];
    for (int k = 0; k < 16; ++k) found += left[i][k] * load(Element{element_of(k / 8, lane % 4 * 2 + i % 2, k % 8)});
    sum[i] = found;
  }
  warp->all.arrive_and_wait();
}

template <class Element, int n>
struct Wgmma {
  template <int transposed>
  static void shared(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    const uint64_t left = (a & 0x3fff) << 4, right = (b & 0x3fff) << 4;
    for (int i = 0; i < n / 2; ++i) {
      const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i % 4 / 2 * 8;
      const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      float sum = accumulate ? d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += operand(left + row * 128 + k * 2) * operand(right + column * 128 + k * 2);
      d[i] = sum;
    }
  }
  template <int transposed>
  static void registers(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    static_assert(transposed == 1, "as attention has values");
    const uint64_t right = (b & 0x3fff) << 4, run = (b >> 16 & 0x3fff) << 4;
    const int lane = threadIdx.x % 32;
    memcpy(warp->words[lane], a, 16);
    warp->all.arrive_and_wait();
    for (int i = 0; i < n / 2; ++i) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = accumulate ? d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        const uint32_t pair = warp->words[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + i % 4 / 2];
        const float weight = load(bfloat16{uint16_t(k % 2 ? pair >> 16 : pair)});
        sum += weight * operand(right + column / 64 * run + k * 128 + column % 64 * 2);
      }
      d[i] = sum;
    }
    warp->all.arrive_and_wait();
  }
};
}
