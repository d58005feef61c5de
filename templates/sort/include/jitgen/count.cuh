// A row of whole numbers below a bound, put in order by counting: how many there are of each number gives where those
// of the next one begin. Each block ranks a few of the numbers, wherever they are in the row, and reads all of the row
// for that: counts of few numbers are in registers, and nothing is added in memory. Equal numbers keep the order of
// their columns, so that the order is that of a stable sort, whichever block or warp comes first.
#pragma once

#include "jitgen/storage.cuh"

namespace jitgen {

// Ranks the elements that are one of the `range` numbers from `first` on. `sums` has room for what a warp counts.
// number(column) is an element; place(column, number, rank) is called for each that is ranked, and end(number, count)
// with how many elements are at most `number`. Elements beyond the bound have no rank. A warp has a piece of the row,
// of which it reads `batch` columns a lane at once, so that their loads wait together.
template <int threads, int range, class Index, class Number, class Place, class End>
JITGEN_DEVICE void count_numbers(
    int32_t (&sums)[threads / 32][range + 1], Index length, int bound, int first, const Number& number,
    const Place& place, const End& end) {
  constexpr int warps = threads / 32, batch = 8;
  constexpr unsigned all = 0xffffffffu;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Index piece = length / threads * 32 + (length % threads ? 32 : 0);
  const int64_t left = int64_t(length) - int64_t(warp) * piece;
  const Index columns = Index(left < 0 ? 0 : left < piece ? left : piece), begin = columns ? warp * piece : 0;
  int numbers[batch];  // less `first`; `bound`, beyond those that are ranked, where there is none
  const auto read = [&](Index at) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const Index column = at + i * 32 + lane;
      const int64_t value = column < columns ? int64_t(number(begin + column)) : -1;
      numbers[i] = uint64_t(value) < uint64_t(bound) ? int(value) - first : bound;
    }
  };
  int32_t less = 0, equal[range] = {};  // elements of a lane
  for (Index at = 0; at < columns; at += batch * 32) {
    read(at);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (at + i * 32 >= columns) break;
      less += numbers[i] < 0;
#pragma unroll
      for (int r = 0; r < range; ++r) equal[r] += numbers[i] == r;
    }
  }
#pragma unroll
  for (int r = 0; r <= range; ++r) {
    const uint32_t sum = __reduce_add_sync(all, uint32_t(r < range ? equal[r] : less));
    if (lane == 0) sums[warp][r] = int32_t(sum);
  }
  __syncthreads();
  // The next element of each number has the rank `next`: behind lesser numbers, and equal ones of the warps before.
  const bool counted = lane < warps;
  Index upto = Index(__reduce_add_sync(all, uint32_t(counted ? sums[lane][range] : 0)));
  Index next[range];
#pragma unroll
  for (int r = 0; r < range; ++r) {
    const uint32_t sum = counted ? sums[lane][r] : 0;
    next[r] = upto + Index(__reduce_add_sync(all, lane < warp ? sum : 0u));
    upto += Index(__reduce_add_sync(all, sum));
    if (threadIdx.x == r && first + r < bound) end(Index(first + r), int32_t(upto));
  }
  for (Index at = 0; at < columns; at += batch * 32) {
    if (piece > batch * 32) read(at);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (at + i * 32 >= columns) break;
      const bool ranked = numbers[i] >= 0 && numbers[i] < range;
      if (!__any_sync(all, ranked)) continue;
      Index rank = 0;
#pragma unroll
      for (int r = 0; r < range; ++r) {
        const unsigned same = __ballot_sync(all, numbers[i] == r);
        if (numbers[i] == r) rank = next[r] + __popc(same & ((1u << lane) - 1));
        next[r] += __popc(same);
      }
      if (ranked) place(begin + at + i * 32 + lane, first + numbers[i], rank);
    }
  }
}

}  // namespace jitgen
