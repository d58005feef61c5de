// A row of whole numbers below a bound, put in order by counting: how many there are of each number gives where those
// of the next one begin. Each warp has a piece of the row and counts it by itself; a number of the piece then comes
// behind all lesser ones, and behind equal ones of the warps before and of the columns before. Equal numbers keep the
// order of their columns, so that the order is that of a stable sort, whichever block or warp comes first.
#pragma once

#include "jitgen/lanes.cuh"
#include "jitgen/ptx.cuh"
#include "jitgen/storage.cuh"

namespace jitgen {

// The shared memory of a block that counts numbers below `tile`, a power of two from 32 on.
template <int threads_, int tile_, int cluster_, class Index_>
struct Counts {
  static constexpr int threads = threads_, tile = tile_, cluster = cluster_, warps = threads / 32;
  using Index = Index_;
  Index starts[tile];  // ranks of the first of each number in this block
  Index sums[warps];
  int32_t of_warps[warps][tile];  // how many a warp has of each number, then how many the warps before it have
  int32_t of_blocks[cluster][tile];

  // May run before the row is there.
  JITGEN_DEVICE void clear() {
    if constexpr (cluster > 1) {
      waits_begin<true>();
      cluster_arrive_relaxed();
    }
    for (int i = threadIdx.x; i < warps * tile; i += threads) of_warps[i / tile][i % tile] = 0;
    __syncthreads();
  }

  // Adds up what the warps have of each number, and tells the blocks of the cluster.
  JITGEN_DEVICE void add_warps(int block) {
    __syncthreads();
    if constexpr (cluster > 1) cluster_wait_acquire("the start of the cluster's blocks");
    for (int number = threadIdx.x; number < tile; number += threads) {
      int32_t before = 0;
#pragma unroll
      for (int warp = 0; warp < warps; ++warp) {
        const int32_t count = of_warps[warp][number];
        of_warps[warp][number] = before;
        before += count;
      }
      if constexpr (cluster == 1) {
        of_blocks[0][number] = before;
      } else {
#pragma unroll
        for (int other = 0; other < cluster; ++other) {
          store_to_block(shared_address(&of_blocks[block][number]), other, before);
        }
      }
    }
    if constexpr (cluster == 1) {
      __syncthreads();
    } else {
      cluster_arrive_release();
      cluster_wait_acquire("counts of the cluster's blocks");
    }
  }

  // Finds where each number starts; end(number, count) is called with how many elements are at most `number`, a number
  // below `bound`.
  template <class End>
  JITGEN_DEVICE void add_numbers(int block, int bound, const End& end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Index lesser = 0;  // elements of the numbers before
#pragma unroll 1
    for (int first = 0; first < tile; first += threads) {
      const int number = first + threadIdx.x;
      Index before = 0, count = 0;
      if (number < tile) {
#pragma unroll
        for (int other = 0; other < cluster; ++other) {
          const int32_t theirs = of_blocks[other][number];
          before += other < block ? theirs : 0;
          count += theirs;
        }
      }
      Index upto = count;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const Index others = by_words(upto, [=](uint32_t word) { return __shfl_up_sync(~0u, word, distance, 32); });
        upto += lane >= distance ? others : 0;
      }
      if (lane == 31) sums[warp] = upto;
      __syncthreads();
#pragma unroll
      for (int other = 0; other < warps && other * 32 < tile; ++other) {
        upto += other < warp ? sums[other] : 0;
      }
      if (number < tile) starts[number] = lesser + upto - count + before;
      if (number < bound) end(Index(number), int32_t(lesser + upto));
      if constexpr (tile > threads) {
#pragma unroll
        for (int other = 0; other < warps; ++other) lesser += sums[other];
        __syncthreads();
      }
    }
    __syncthreads();
  }
};

// Ranks the elements of a row, of which each warp of a cluster has a piece. Every cluster counts all of them; of each
// piece it ranks a share of its own. number(column) is an element; place(column, number, rank) is called for each that is
// below `bound`; others have no rank. A warp reads `batch` columns a lane at once, so that their loads wait together.
template <int batch, class Counts, class Number, class Place, class End>
JITGEN_DEVICE void count_numbers(Counts& counts, typename Counts::Index length, int bound, const Number& number,
                                 const Place& place, const End& end) {
  using Index = typename Counts::Index;
  constexpr int warps = Counts::warps * Counts::cluster;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int block = 0;
  if constexpr (Counts::cluster > 1) block = cluster_rank();
  const Index piece = length / (warps * 32) * 32 + (length % (warps * 32) ? 32 : 0);
  const int64_t start = int64_t(block * Counts::warps + warp) * piece, left = int64_t(length) - start;
  const Index columns = Index(left < 0 ? 0 : left < piece ? left : piece), begin = columns ? Index(start) : 0;
  int32_t* const own = counts.of_warps[warp];
  int numbers[batch];  // -1 where there is none
  const auto read = [&](Index at) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const Index column = at + i * 32 + lane;
      const int64_t value = column < columns ? int64_t(number(begin + column)) : -1;
      numbers[i] = uint64_t(value) < uint64_t(bound) ? int(value) : -1;
    }
  };
#pragma unroll 1
  for (Index at = 0; at < columns; at += batch * 32) {
    read(at);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (numbers[i] >= 0) atomicAdd(&own[numbers[i]], 1);
    }
  }
  counts.add_warps(block);
  counts.add_numbers(block, blockIdx.x == 0 ? bound : 0, end);
  const int share = blockIdx.x / Counts::cluster, shares = gridDim.x / Counts::cluster;
  const Index steps = (piece / 32 + shares - 1) / shares * 32, first = share * steps, last = first + steps;
#pragma unroll 1
  for (Index at = 0; at < columns && at < last; at += batch * 32) {
    if (piece > batch * 32) read(at);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (at + i * 32 >= columns || at + i * 32 >= last) break;
      const int mine = numbers[i];
      if (at + i * 32 < first) {
        if (mine >= 0) atomicAdd(&own[mine], 1);
        __syncwarp();
        continue;
      }
      unsigned same = __ballot_sync(~0u, mine >= 0);
#pragma unroll
      for (int bit = 1; bit < Counts::tile; bit *= 2) {
        const unsigned ones = __ballot_sync(~0u, (mine & bit) != 0);
        same &= mine & bit ? ones : ~ones;
      }
      const unsigned before = same & ((1u << lane) - 1);
      Index rank = 0;
      if (mine >= 0) rank = counts.starts[mine] + own[mine] + __popc(before);
      __syncwarp();
      if (mine >= 0 && !before) own[mine] += __popc(same);
      __syncwarp();
      if (mine >= 0) place(begin + at + i * 32 + lane, mine, rank);
    }
  }
}

}  // namespace jitgen
