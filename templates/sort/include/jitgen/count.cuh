// A row of whole numbers below a bound, put in order by counting: how many there are of each number gives where those of
// the next one begin. Each block counts the whole row, and gives ranks to a piece of it, in which a warp has 32 columns.
// Equal numbers keep the order of their columns, so that the order is that of a stable sort, whichever thread comes first.
#pragma once

#include "jitgen/storage.cuh"

namespace jitgen {

// The lanes of the warp whose number is this lane's, of numbers of `bits` bits; no lanes for a number below zero. It takes
// as long whatever the numbers are; __match_any_sync takes a turn for each that differs.
template <int bits>
JITGEN_DEVICE unsigned equal_lanes(int number) {
  unsigned equal = __ballot_sync(0xffffffffu, number >= 0);
#pragma unroll
  for (int bit = 0; bit < bits; ++bit) {
    const bool is_set = number >> bit & 1;
    const unsigned set = __ballot_sync(0xffffffffu, is_set);
    equal &= is_set ? set : ~set;
  }
  return number < 0 ? 0u : equal;
}

constexpr int bits_below(int power) { return power > 1 ? 1 + bits_below(power / 2) : 0; }

// `counts` has `tile` counters for each warp, `ends` and `before` one for each number; `tile` is a power of two, 32 at
// least. number(column) is an element; place(column, number, rank) is called for each of piece `piece`, of `threads`
// columns, and in the first one end(number, count) with how many elements are at most `number`. Elements beyond the bound
// have no rank.
template <int threads, int tile, class Index, class Number, class Place, class End>
JITGEN_DEVICE void count_numbers(
    int32_t* counts, int32_t* ends, int32_t* before, Index length, int bound, Index piece, const Number& number,
    const Place& place, const End& end) {
  constexpr int warps = threads / 32, batch = 8, bits = bits_below(tile);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < warps * tile; i += threads) counts[i] = 0;
  for (int i = threadIdx.x; i < tile; i += threads) ends[i] = before[i] = 0;
  __syncthreads();
  const auto below = [&](Index column) {  // -1 beyond the row or the bound
    const int64_t value = column < length ? int64_t(number(column)) : -1;
    return value >= 0 && value < bound ? int(value) : -1;
  };
  const Index begin = piece * threads, column = begin + Index(threadIdx.x);
  const int own = below(column);
  // All columns are counted, those before the piece apart. Loads of a batch wait together.
  for (Index at = 0; at < length; at += batch * threads) {
    int numbers[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) numbers[i] = below(at + i * threads + Index(threadIdx.x));
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (at + i * threads >= length) break;
      const unsigned equal = equal_lanes<bits>(numbers[i]);
      if (__ffs(int(equal)) - 1 == lane) {
        int32_t* const counted = at + i * threads < begin ? before : ends;
        atomicAdd(counted + numbers[i], __popc(equal));  // sums of integers have one result
      }
    }
  }
  const unsigned equal = equal_lanes<bits>(own);
  if (__ffs(int(equal)) - 1 == lane) counts[warp * tile + own] = __popc(equal);
  __syncthreads();
  // A warp's counter of a number becomes what comes before it: earlier columns, and the warps before it.
  for (int i = threadIdx.x; i < tile; i += threads) {
    int32_t sum = before[i], of_warp[warps];
    ends[i] += sum;
#pragma unroll
    for (int other = 0; other < warps; ++other) of_warp[other] = counts[other * tile + i];
#pragma unroll
    for (int other = 0; other < warps; ++other) {
      counts[other * tile + i] = sum;
      sum += of_warp[other];
    }
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int width = tile / 32;
    uint32_t sum = 0;
    for (int i = 0; i < width; ++i) sum += uint32_t(ends[lane * width + i]);
    uint32_t upto = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t earlier = __shfl_up_sync(0xffffffffu, upto, step, 32);
      if (lane >= step) upto += earlier;
    }
    int32_t running = int32_t(upto - sum);
    for (int i = 0; i < width; ++i) ends[lane * width + i] = running += ends[lane * width + i];
  }
  __syncthreads();
  if (piece == 0) {
    for (int i = threadIdx.x; i < bound; i += threads) end(i, ends[i]);
  }
  if (own >= 0) {
    const Index first = (own > 0 ? ends[own - 1] : 0) + counts[warp * tile + own];
    place(column, own, first + __popc(equal & ((1u << lane) - 1)));
  }
}

}  // namespace jitgen
