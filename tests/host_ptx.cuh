// What ptx.cuh and the loads of gemm_planes.cuh do, on the host (tests/cuda_on_host.py): the threads of a warp put
// their operands where the others see them, and a thread computes its own part of the result.
#pragma once

#include "jitgen/barrier.cuh"
#include "jitgen/dependent_launch.cuh"
#include "jitgen/vector.cuh"

namespace jitgen {

inline int smaller(int a, int b) { return a < b ? a : b; }

template <int size>
void copy_async(uint32_t to, const void* from, int bytes) {
  memset(shared_memory + to, 0, size);
  memcpy(shared_memory + to, from, bytes);
}
template <int size>
void copy_async(uint32_t to, const void* from) {
  memcpy(shared_memory + to, from, size);
}
inline void copy_commit() {}
template <int pending>
void copy_wait() {}

// Threads of this block that have come to a named barrier, or to those of their warp. Blocks run one after another, and
// some may have left arrivals behind that nobody waited for.
constexpr int barrier_ids = 16;
inline int& arrivals(int id) {
  static int counts[barrier_ids + most_threads / 32];
  static dim block;
  if (memcmp(&block, &blockIdx, sizeof(dim)) != 0) {
    memset(counts, 0, sizeof(counts));
    block = blockIdx;
  }
  return counts[id];
}
// A warp by itself waits without a barrier's id, as on a GPU.
template <int threads>
int& arrivals_among(int id) {
  if (threads == 32) return arrivals(barrier_ids + running / 32);
  if (id < 1 || id >= barrier_ids) give_up("a named barrier that no GPU has");
  return arrivals(id);
}
template <int threads>
void group_arrive(int id) {
  ++arrivals_among<threads>(id);
}
template <int threads>
void group_barrier(int id, const char* name) {
  const int enough = (arrivals_among<threads>(id)++ / threads + 1) * threads;
  for (int turns = 0; arrivals_among<threads>(id) < enough; ++turns) {
    if (turns == most_turns) give_up(name);
    pause();
  }
}
inline uint32_t block_of_cluster() { return 0; }
inline int cluster_rank() { return blockIdx.x % JITGEN_CLUSTER; }
inline int cluster_blocks() { return JITGEN_CLUSTER; }
inline void cluster_arrive_release() {}
inline void cluster_arrive_relaxed() {}
// What the blocks of a cluster have stored in the memory of this one, and where. Blocks run one after another, and the
// grid runs twice: the second time all have stored what they do.
struct Received {
  uint8_t bytes[sizeof(shared_memory)];
  bool stored[sizeof(shared_memory)];
};
static Received* received[128];
inline Received& received_by(int rank) {
  Received*& block = received[int(blockIdx.x) - cluster_rank() + rank];
  if (!block) block = static_cast<Received*>(calloc(1, sizeof(Received)));
  return *block;
}
inline void cluster_wait_acquire(const char*) {
  if (JITGEN_CLUSTER == 1) return;
  __syncthreads();
  Received& mine = received_by(cluster_rank());
  for (size_t i = running; i < sizeof(shared_memory); i += count) {
    if (mine.stored[i]) shared_memory[i] = mine.bytes[i];
  }
  __syncthreads();
}
template <class T>
void store_to_block(uint32_t address, uint32_t rank, T value) {
  Received& block = received_by(int(rank));
  memcpy(block.bytes + address, &value, sizeof(T));
  memset(block.stored + address, true, sizeof(T));
}

static uint32_t operands[most_threads][6];

inline void load_matrices(uint32_t (&fragment)[4], uint32_t address) {
  const int self = running, lane = self % 32, warp = self - lane;
  operands[self][0] = address;
  pause();
  for (int i = 0; i < 4; ++i) {
    memcpy(&fragment[i], shared_memory + operands[warp + i * 8 + lane / 4][0] + lane % 4 * 4, 4);
  }
  pause();
}

template <class Element>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<bfloat16> = true;

template <class Element>
float half_of(uint32_t pair, int half) {
  const uint16_t bits = uint16_t(pair >> (16 * half));
  return is_bfloat16<Element> ? from_bfloat16(bits) : from_float16(bits);
}

template <class Element>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&start)[4]) {
  const int self = running, lane = self % 32, warp = self - lane;
  for (int i = 0; i < 4; ++i) operands[self][i] = a[i];
  operands[self][4] = b0;
  operands[self][5] = b1;
  pause();
  float found[4];
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2, column = lane % 4 * 2 + i % 2;
    double total = start[i];
    for (int t = 0; t < 4; ++t) {
      const uint32_t* const left = operands[warp + lane / 4 * 4 + t];
      const uint32_t* const right = operands[warp + column * 4 + t];
      for (int q = 0; q < 2; ++q) {
        for (int half = 0; half < 2; ++half) {
          total += double(half_of<Element>(left[row_half + 2 * q], half)) * half_of<Element>(right[4 + q], half);
        }
      }
    }
    found[i] = float(total);
  }
  pause();
  for (int i = 0; i < 4; ++i) sum[i] = found[i];
}

inline uint32_t transposed_matrix(uint32_t pair) {
  const int self = running, lane = self % 32, warp = self - lane;
  operands[self][0] = pair;
  pause();
  const uint32_t low = operands[warp + lane % 4 * 8 + lane / 8][0], high = operands[warp + lane % 4 * 8 + 4 + lane / 8][0];
  const int shift = lane / 4 % 2 * 16;
  pause();
  return (low >> shift & 0xffff) | (high >> shift & 0xffff) << 16;
}

template <uint32_t mask, uint32_t bits>
uint32_t and_or(uint32_t a) {
  return (a & mask) | bits;
}
template <uint32_t mask, uint32_t bits>
uint32_t and_xor(uint32_t a) {
  return (a & mask) ^ bits;
}
inline float2 unpack_pair(uint32_t pair) {
  return {__int_as_float(int(pair << 16)), __int_as_float(int(pair & 0xffff0000u))};
}
inline float2 unpack_pair(uint2 pair) { return {__int_as_float(int(pair.x)), __int_as_float(int(pair.y))}; }

template <class Element>
uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t found = 0;
  for (int half = 0; half < 2; ++half) {
    const double exact = double(half_of<Element>(a, half)) * half_of<Element>(b, half) + half_of<Element>(c, half);
    const float rounded = float(exact);  // exact, where numbers are of about one magnitude
    found |= uint32_t(is_bfloat16<Element> ? to_bfloat16(rounded) : to_float16(rounded)) << (16 * half);
  }
  return found;
}

inline uint32_t multiply_pair(uint32_t a, uint32_t b) { return fma_pair<bfloat16>(a, b, 0x80008000u); }
inline uint32_t subtract_pair(uint32_t a, uint32_t b) { return fma_pair<bfloat16>(b, 0xbf80bf80u, a); }
template <class Element>
uint32_t round_pair(float low, float high) {
  const auto bits = is_bfloat16<Element> ? to_bfloat16 : to_float16;
  return uint32_t(bits(low)) | uint32_t(bits(high)) << 16;
}

}  // namespace jitgen
