// From accumulators, which are distributed over the threads of a block, to the epilogue on runs of consecutive columns.
// Where K is split among groups of warps or the blocks of a cluster, their partial sums are added here, in a fixed
// order.
//
// The epilogue is a functor of the generated source:
//   struct Epilogue { ... template <int W> __device__ void run(Index m, Index n, const float (&acc)[C][W], int live) const; };
// It is called once for W consecutive columns of row m, from n on, `live` of which exist. acc[c] is of contraction c.
// An epilogue that stores the largest of each run of columns has a constant `run_columns`, and combines what neighbouring
// lanes have: all lanes of a warp call it then, those without columns with a `live` of 0. N is a multiple of a run.
#pragma once

#include "jitgen/ptx.cuh"

namespace jitgen {

// Partial sums in shared memory, as floats or doubles: for each of `parts` groups of warps and each contraction a tile
// of tokens x rows. Rows of the weight are columns of the result.
template <int contractions, int tokens, int rows, int parts>
struct PartialTile {
  static constexpr int stride = rows + 4;  // padded: lanes 4g+t write tokens 2t and rows g to different banks
  static constexpr int plane = tokens * stride;
  static constexpr int floats = parts * contractions * plane;
  static JITGEN_DEVICE int place(int part, int contraction, int token, int row) {
    return (part * contractions + contraction) * plane + token * stride + row;
  }
};

// The lanes of neighbouring columns that an epilogue combines, each of which has W columns; 1 where it combines none.
template <int W, class Epilogue>
constexpr auto lanes_together(const Epilogue*) -> decltype(Epilogue::run_columns + 0) {
  return Epilogue::run_columns / W;
}
template <int W>
constexpr int lanes_together(...) {
  return 1;
}

// The largest value of each `lanes` neighbouring lanes of a warp.
template <int lanes, class T>
JITGEN_DEVICE T largest_of_lanes(T value) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// The end of every mainloop: adds partial sums and calls the epilogue.
//
// Config has contractions, tokens, token_tiles (eights of tokens in `partial`), rows, warps_k (partial sums in
// `partial`), cluster, threads and width. `inbox` is needed where cluster > 1: shared memory of inbox_floats() numbers
// that no block of the cluster uses for anything else. The mainloop has called cluster_arrive_relaxed() at its start.
template <class Config, class Scalar, class Epilogue>
JITGEN_DEVICE void finish(Scalar* partial, Scalar* inbox, int M, int N, int m0, int n0, uint32_t rank,
                          const Epilogue& epilogue) {
  constexpr int W = Config::width, runs = Config::rows / W, C = Config::contractions, cluster = Config::cluster;
  constexpr int together = lanes_together<W>(static_cast<const Epilogue*>(nullptr));
  static_assert(together == 1 || (cluster == 1 && runs % together == 0), "lanes that an epilogue combines have one tile");
  using Tile = PartialTile<C, Config::token_tiles * 8, Config::rows, Config::warps_k>;
  const int live_tokens = smaller(M - m0, Config::tokens);
  const int total = live_tokens * runs;
  __syncthreads();

  if constexpr (together > 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i - int(threadIdx.x % 32) < total; i += Config::threads) {
      const int own = smaller(i, total - 1), token = own / runs, row = own % runs * W;
      Scalar acc[C][W];
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          acc[c][j] = partial[Tile::place(0, c, token, row + j)];
#pragma unroll
          for (int part = 1; part < Config::warps_k; ++part) acc[c][j] += partial[Tile::place(part, c, token, row + j)];
        }
      }
      const int live = i < total && n0 + row < N ? W : 0;
      epilogue.template run<W>(m0 + token, n0 + (live ? row : 0), acc, live);
    }
  } else if constexpr (cluster == 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < total; i += Config::threads) {
      const int token = i / runs, row = i % runs * W;
      if (n0 + row >= N) continue;
      Scalar acc[C][W];
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int j = 0; j < W; ++j) acc[c][j] = partial[Tile::place(0, c, token, row + j)];
#pragma unroll
        for (int part = 1; part < Config::warps_k; ++part) {
#pragma unroll
          for (int j = 0; j < W; ++j) acc[c][j] += partial[Tile::place(part, c, token, row + j)];
        }
      }
      epilogue.template run<W>(m0 + token, n0 + row, acc, smaller(N - n0 - row, W));
    }
  } else {
    // Run i is added by block i % cluster. Its inbox has one run for each sender at index i / cluster.
    constexpr int places = (Config::tokens * runs + cluster - 1) / cluster;
    cluster_wait_acquire("the start of the cluster's blocks");  // before it, nothing may be written to their memory
#pragma unroll 1
    for (int i = threadIdx.x; i < total; i += Config::threads) {
      const int token = i / runs, row = i % runs * W;
      const int place = (int(rank) * places + i / cluster) * C * W;
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          Scalar sum = partial[Tile::place(0, c, token, row + j)];
#pragma unroll
          for (int part = 1; part < Config::warps_k; ++part) sum += partial[Tile::place(part, c, token, row + j)];
          store_to_block(shared_address(inbox + place + c * W + j), i % cluster, sum);
        }
      }
    }
    cluster_arrive_release();
    cluster_wait_acquire("sums of the cluster's blocks");
#pragma unroll 1
    for (int i = threadIdx.x * cluster + rank; i < total; i += Config::threads * cluster) {
      const int token = i / runs, row = i % runs * W;
      if (n0 + row >= N) continue;
      Scalar acc[C][W];
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          acc[c][j] = Scalar(0);
#pragma unroll
          for (int from = 0; from < cluster; ++from) {
            acc[c][j] += inbox[(from * places + i / cluster) * C * W + c * W + j];
          }
        }
      }
      epilogue.template run<W>(m0 + token, n0 + row, acc, smaller(N - n0 - row, W));
    }
  }
}

// The size of the `inbox` of `finish`, in numbers.
template <class Config>
constexpr int inbox_floats() {
  constexpr int runs = Config::rows / Config::width, cluster = Config::cluster;
  return cluster == 1 ? 0 : (Config::tokens * runs + cluster - 1) / cluster * cluster * Config::contractions * Config::width;
}

}  // namespace jitgen
