// What wgmma_ptx.cuh does, on the host (tests/cuda_on_host.py): tensor copies and products happen where they are asked for.
#pragma once

#include "jitgen/ptx.cuh"
#include "jitgen/register_deal.cuh"

namespace jitgen {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int groups>
void wgmma_wait() {}
template <class Sum, int n>
void wgmma_written(Sum (&)[n]) {}

// The address, five sizes and five strides in elements, outermost first, the rows of a box, the bytes of an element, and
// the columns of a box; of the size of a CUtensorMap.
struct alignas(64) TensorMap {
  uint64_t address;
  int64_t sizes[5], strides[5], box, item, columns;
};
constexpr uint64_t keep_normal = 0, evict_first = 1;
inline void prefetch_map(const TensorMap&) {}

// There are no registers to deal; RegisterDeal checks the numbers.
template <int consumers, int blocks, bool is_copier, int copier_registers = 40>
void registers_deal() {
  static_assert(RegisterDeal<consumers, blocks, copier_registers>::consumer > 0);
}
inline void barrier_wait_in_place(uint32_t barrier, uint32_t parity, const char* name) {
  barrier_wait(barrier, parity, name);
}
inline void barrier_arrive_on_copies(uint32_t barrier) { barrier_arrive(barrier); }
inline void proxy_fence() {}
inline int own_warp() { return running / 32; }
inline void store_matrices_transposed(uint32_t address, const uint32_t (&words)[4]) {
  const int self = running, lane = self % 32, warp = self - lane;
  for (int i = 0; i < 4; ++i) operands[self][i] = words[i];
  pause();
  if (address % 16 != 0) abort();
  for (int c = 0; c < 8; ++c) {
    const uint16_t half = operands[warp + c * 4 + lane % 8 / 2][lane / 8] >> lane % 2 * 16;
    memcpy(shared_memory + address + c * 2, &half, 2);
  }
  pause();
}
inline void copy_box_of_batch(
    uint32_t to, const TensorMap& map, int column, int row, const int (&batch)[3], uint32_t barrier) {
  if (column * map.item % 16 != 0) abort();  // an illegal instruction of a GPU
  for (int r = 0; r < map.box; ++r) {
    for (int c = 0; c < 128 / map.item; ++c) {
      const int64_t at[] = {batch[0], batch[1], batch[2], row + r, column + c};
      int64_t offset = 0;
      bool exists = true;
      for (int dim = 0; dim < 5; ++dim) {
        offset += at[dim] * map.strides[dim];
        exists = exists && at[dim] >= 0 && at[dim] < map.sizes[dim];
      }
      const uint32_t place = to + r * 128 + c * map.item, swizzled = place ^ (place >> 7 & 7) << 4;
      const uint8_t* const element = reinterpret_cast<const uint8_t*>(map.address) + offset * map.item;
      if (exists) {
        memcpy(shared_memory + swizzled, element, map.item);
      } else {
        memset(shared_memory + swizzled, 0, map.item);
      }
    }
  }
  barrier_copied(barrier, int(map.box) * 128);
}
inline void copy_box_of_matrix(
    uint32_t to, const TensorMap& map, int column, int row, int inner, int outer, uint32_t barrier) {
  copy_box_of_batch(to, map, column, row, {0, outer, inner}, barrier);
}
inline void copy_box(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier) {
  copy_box_of_batch(to, map, column, row, {0, 0, 0}, barrier);
}
// Of a matrix of codes: rows of a box lie side by side, without a swizzle.
inline void copy_box(uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, uint64_t) {
  const int64_t bytes = map.columns * map.item;
  for (int r = 0; r < map.box; ++r) {
    for (int c = 0; c < map.columns; ++c) {
      uint8_t* const place = shared_memory + to + r * bytes + c * map.item;
      const int64_t offset = (row + r) * map.strides[3] + (column + c) * map.strides[4];
      if (row + r < map.sizes[3] && column + c < map.sizes[4]) {
        memcpy(place, reinterpret_cast<const uint8_t*>(map.address) + offset * map.item, map.item);
      } else {
        memset(place, 0, map.item);
      }
    }
  }
  barrier_copied(barrier, int(map.box * bytes));
}
inline void copy_box_multicast(uint32_t, const TensorMap&, int, int, uint32_t, uint16_t) { abort(); }
inline void copy_box_of_matrix_multicast(uint32_t, const TensorMap&, int, int, int, int, uint32_t, uint16_t) { abort(); }
// What each block of the grid has when it waits for the others of its cluster.
static uint8_t* left_memory[64];
inline void cluster_sync(const char*) {
  if (JITGEN_CLUSTER == 1) return;
  __syncthreads();
  uint8_t*& own = left_memory[blockIdx.x];
  if (!own) own = static_cast<uint8_t*>(calloc(1, sizeof(shared_memory)));
  if (running == 0) memcpy(own, shared_memory, sizeof(shared_memory));
}
inline float4 load_remote(uint32_t address, int rank) {
  if (JITGEN_CLUSTER == 1) abort();
  const uint8_t* const left = left_memory[blockIdx.x - cluster_rank() + rank];
  float4 found = {};
  if (left) memcpy(&found, left + address, sizeof(found));
  return found;
}

inline uint64_t descriptor_transposed(uint32_t address, int block) { return uint64_t(block >> 4) << 16 | address >> 4; }
inline uint64_t descriptor_k_major(uint32_t address) { return descriptor_transposed(address, 16); }

template <class Element>
float shared_element(uint64_t address) {  // with the 128-byte swizzle
  uint16_t bits;
  memcpy(&bits, shared_memory + (address ^ (address >> 7 & 7) << 4), 2);
  return half_of<Element>(bits, 0);
}
// Where an element of an operand in shared memory is, whose elements have `size` bytes: `item` is its row or column, and k
// is counted from where the descriptor says.
template <int transposed, int size>
uint64_t operand_address(uint64_t descriptor, int item, int k) {
  const uint64_t begin = (descriptor & 0x3fff) << 4, run = (descriptor >> 16 & 0x3fff) << 4;
  return transposed ? begin + item / 64 * run + k * 128 + item % 64 * size : begin + item * 128 + k * size;
}
// Adds to a thread's sums `steps` products along k of two operands in shared memory.
template <int steps, int size, int transposed = 0, int left_transposed = 0, class Sum, int sums, class ReadLeft, class ReadRight>
void shared_product(Sum (&d)[sums], uint64_t a, uint64_t b, int accumulate, ReadLeft of_left, ReadRight of_right) {
  for (int i = 0; i < sums; ++i) {
    const int row = running / 32 % 4 * 16 + running % 32 / 4 + i % 4 / 2 * 8;
    const int column = i / 4 * 8 + running % 4 * 2 + i % 2;
    Sum sum = accumulate ? d[i] : Sum(0);
    for (int k = 0; k < steps; ++k) {
      sum += of_left(operand_address<left_transposed, size>(a, row, k)) *
             of_right(operand_address<transposed, size>(b, column, k));
    }
    d[i] = sum;
  }
}
template <class Element, int n>
struct Wgmma {
  using Sum = float;
  static constexpr bool promoted = false;
  template <int transposed, int left_transposed = 0>
  static void shared(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    shared_product<16, 2, transposed, left_transposed>(
        d, a, b, accumulate, shared_element<Element>, shared_element<Element>);
  }
  template <int transposed = 0>
  static void registers(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    const int self = running, lane = self % 32, warp = self - lane;
    for (int i = 0; i < 4; ++i) operands[self][i] = a[i];
    pause();
    for (int i = 0; i < n / 2; ++i) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = accumulate ? d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        const uint32_t pair = operands[warp + lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + i % 4 / 2];
        sum += half_of<Element>(pair, k % 2) * shared_element<Element>(operand_address<transposed, 2>(b, column, k));
      }
      d[i] = sum;
    }
    pause();
  }
};

}  // namespace jitgen
