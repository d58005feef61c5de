// y = x W^T for few rows of x in full float32 or float64, by fused multiply-adds. Dense weights, contiguous along k or
// along their rows, are read once, in loads of up to 16 bytes from global memory into registers. A warp computes a tile
// of a weight: its lanes are neighbours along the weight's contiguous dimension, and each has `run` elements of the
// other one. x comes from shared memory (gemm_activation.cuh), and all tokens use the same registers of a weight. K is
// distributed among warps_k groups of warps, and among the blocks of a cluster. Each group has `depth` tiles in flight
// and two windows of x, as in gemm_mma.cuh.
//
// Where lanes are neighbours along k, their sums are added in a tree at the end; each step of it halves the sums that a
// lane has. The epilogue is called by gemm_epilogue.cuh.
#pragma once

#include "jitgen/gemm_activation.cuh"
#include "jitgen/gemm_epilogue.cuh"

namespace jitgen {

JITGEN_DEVICE float stream_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
JITGEN_DEVICE double stream_multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// What the mainloop is compiled for:
//
//   struct Config {
//     using Scalar = float;                        // or double
//     static constexpr int contractions = 1;       // weights that share x
//     static constexpr int tokens = 4;             // of a block
//     static constexpr int run = 4;                // elements of a lane along the dimension that is not contiguous
//     static constexpr int warps_n, warps_k = 8;   // warps along the rows, and groups of warps that share K
//     static constexpr int cluster = 1;            // blocks that share K
//     static constexpr int depth = 2;              // tiles that a group of warps has in flight
//     static constexpr int window = 4;             // tiles whose x is staged together, a multiple of depth
//     static constexpr int width = 1;              // columns of one epilogue call
//     static constexpr bool along_k = true;        // whether weights are contiguous along k, or else along their rows
//     static constexpr int vector = 4;             // elements of a load, to which weights are aligned; K (along_k) or N
//                                                  // is a multiple of it
//   };
template <class Config>
struct StreamBlock : Config {
  static constexpr int lanes = 32 * Config::vector;
  // A tile, in rows and k.
  static constexpr int warp_rows = Config::along_k ? Config::run : lanes, chunk = Config::along_k ? lanes : Config::run;
  static constexpr int token_tiles = (Config::tokens + 7) / 8, rows = warp_rows * Config::warps_n;
  static constexpr int threads = 32 * Config::warps_n * Config::warps_k;
};

template <class Config>
struct StreamShared {
  using Scalar = typename Config::Scalar;
  using Block = StreamBlock<Config>;
  using Partial = PartialTile<Config::contractions, Block::token_tiles * 8, Block::rows, Config::warps_k>;
  static constexpr int slot = Config::tokens * Block::chunk;  // of x, in scalars
  static constexpr int ring = 2 * Config::window * slot;
  static constexpr int all = Config::warps_k * ring;
  static constexpr int main = all > Partial::floats ? all : Partial::floats;
  static constexpr int bytes = (main + inbox_floats<Block>()) * int(sizeof(Scalar));
};

template <class Scalar>
struct StreamWeight {
  const Scalar* pointer;
  int64_t row_stride, k_stride;
};

// One lane's elements of a weight's tiles. Each tile is `step` elements after the one before it.
template <class Block>
struct StreamWalk {
  using Scalar = typename Block::Scalar;
  static constexpr int run = Block::run, vector = Block::vector;
  const Scalar* from[Block::along_k ? run : 1];
  int64_t step, line;  // line: elements from one k to the next, where weights are contiguous along rows
  int k, length;       // the lane's first k
  bool live;

  JITGEN_DEVICE void start(const StreamWeight<Scalar>& weight, int row0, int N, int first, int K, int lane) {
    length = K;
    line = weight.k_stride;
    if constexpr (Block::along_k) {
      k = first * Block::chunk + lane * vector;
      step = Block::warps_k * Block::chunk;
#pragma unroll
      for (int r = 0; r < run; ++r) {
        from[r] = weight.pointer + (smaller(row0 + r, N - 1) * weight.row_stride + k);
      }
    } else {
      k = first * Block::chunk;
      step = Block::warps_k * Block::chunk * line;
      live = row0 + lane * vector < N;
      from[0] = weight.pointer + (live ? row0 + lane * vector + k * line : 0);
    }
  }
  // Loads the lane's elements of the tile `ahead` tiles after this one.
  JITGEN_DEVICE void load(Vector<Scalar, vector> (&to)[run], int ahead) const {
    const int there = k + ahead * (Block::warps_k * Block::chunk);
#pragma unroll
    for (int r = 0; r < run; ++r) {
      to[r] = {};
      if constexpr (Block::along_k) {
        if (there < length) to[r] = load_vector_once<vector>(from[r] + ahead * step);
      } else {
        if (live && there + r < length) to[r] = load_vector_once<vector>(from[0] + (ahead * step + r * line));
      }
    }
  }
  JITGEN_DEVICE void advance(int tiles) {
    k += tiles * (Block::warps_k * Block::chunk);
#pragma unroll
    for (int r = 0; r < (Block::along_k ? run : 1); ++r) from[r] += tiles * step;
  }
};

// Adds `count` (a power of two) numbers over the lanes of a warp. A lane is left with count / 32 of the sums, or with
// one, from `first` on. Returns true for one of the lanes that have the same sum.
template <int count, class Scalar>
JITGEN_DEVICE bool add_over_lanes(Scalar (&values)[count], int lane, int& first) {
  bool mine = true;
  first = 0;
#pragma unroll
  for (int mask = 16, left = count; mask > 0; mask /= 2) {
    if (left > 1) {
      left /= 2;
      const bool upper = lane & mask;
      first += upper ? left : 0;
#pragma unroll
      for (int i = 0; i < left; ++i) {
        const Scalar sent = upper ? values[i] : values[i + left], retained = upper ? values[i + left] : values[i];
        values[i] = retained + __shfl_xor_sync(0xffffffffu, sent, mask);
      }
    } else {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], mask);
      mine = mine && !(lane & mask);
    }
  }
  return mine;
}

// The mainloop; its parameters are those of mma_gemm in gemm_mma.cuh.
template <class Config, class X, class Epilogue>
JITGEN_DEVICE void stream_gemm(unsigned char* shared, const X& x, int M, int N, int K,
                               const StreamWeight<typename Config::Scalar> (&weights)[Config::contractions],
                               const Epilogue& epilogue, int m_block, int n_block) {
  using Scalar = typename Config::Scalar;
  using Block = StreamBlock<Config>;
  using Shared = StreamShared<Config>;
  constexpr int C = Config::contractions, T = Config::tokens, R = Config::run, V = Config::vector, D = Config::depth;
  constexpr int warps_k = Config::warps_k, window = Config::window, group_threads = 32 * Config::warps_n;
  constexpr int chunk = Block::chunk, rows_per_lane = Config::along_k ? R : V;  // rows of a lane
  static_assert(window % D == 0 && chunk % X::vector == 0, "");

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp_k = warp / Config::warps_n, warp_n = warp % Config::warps_n;
  const uint32_t rank = Config::cluster > 1 ? block_of_cluster() : 0;
  waits_begin<(Config::cluster > 1)>();
  if constexpr (Config::cluster > 1) cluster_arrive_relaxed();

  const int m0 = m_block * T, n0 = n_block * Block::rows, live_tokens = smaller(M - m0, T);
  const int chunks = (K + chunk - 1) / chunk, per_block = (chunks + Config::cluster - 1) / Config::cluster;
  const int first = int(rank) * per_block + warp_k, last = smaller(int(rank + 1) * per_block, chunks);
  const int count = last > first ? (last - first + warps_k - 1) / warps_k : 0;

  next_kernel_may_start();
  previous_kernel_wait();
  StreamWalk<Block> walks[C];
  Vector<Scalar, V> w[D][C][R];
#pragma unroll
  for (int c = 0; c < C; ++c) walks[c].start(weights[c], n0 + warp_n * Block::warp_rows, N, first, K, lane);
  auto fetch = [&](int slot, int ahead) {
#pragma unroll
    for (int c = 0; c < C; ++c) walks[c].load(w[slot][c], ahead);
  };
#pragma unroll
  for (int d = 0; d < D; ++d) {
    if (d < count) fetch(d, d);
  }

  Scalar* const ring = reinterpret_cast<Scalar*>(shared) + warp_k * Shared::ring;
  auto stage = [&](int number) {
    constexpr int pieces = chunk / X::vector;
    Scalar* const to = ring + number % 2 * (Shared::ring / 2);
    constexpr int total = window * T * pieces, batch = total >= 2 * group_threads ? 2 : 1;
    stage_elements<batch>(x, K, threadIdx.x % group_threads, total, group_threads, [&](int i) -> StagedPlace {
      const int token = i / pieces % T, tile = first + (number * window + i / (pieces * T)) * warps_k;
      return {shared_address(to + i * X::vector), m0 + smaller(token, live_tokens - 1),
              tile * chunk + i % pieces * X::vector, token < live_tokens && tile < last};
    });
    copy_commit();
  };
  stage(0);

  Scalar acc[C][rows_per_lane * T];
#pragma unroll
  for (int i = 0; i < C * rows_per_lane * T; ++i) (&acc[0][0])[i] = Scalar(0);

#pragma unroll 1
  for (int base = 0; base < count; base += D) {
    if (base % window == 0) {
      copy_wait<0>();
      group_barrier<group_threads>(1 + warp_k, "window of a group of warps");
      if (base + window < count) stage(base / window + 1);
    }
    const Scalar* const from = ring + base / window % 2 * (Shared::ring / 2) + base % window * Shared::slot;
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (base + d >= count) break;
#pragma unroll
      for (int t = 0; t < T; ++t) {
        const Scalar* const token = from + (d * Shared::slot + t * chunk);
        if constexpr (Config::along_k) {
          const Vector<Scalar, V> values = load_vector<V>(token + lane * V);
#pragma unroll
          for (int i = 0; i < C * R * V; ++i) {
            const int c = i / (R * V), r = i / V % R;
            acc[c][r * T + t] = stream_multiply_add(w[d][c][r][i % V], values[i % V], acc[c][r * T + t]);
          }
        } else {
          constexpr int four = R < 4 ? R : 4;
#pragma unroll
          for (int r0 = 0; r0 < R; r0 += four) {
            const Vector<Scalar, four> values = load_vector<four>(token + r0);
#pragma unroll
            for (int i = 0; i < C * four * V; ++i) {
              const int c = i / (four * V), r = i / V % four;
              acc[c][i % V * T + t] = stream_multiply_add(w[d][c][r0 + r][i % V], values[r], acc[c][i % V * T + t]);
            }
          }
        }
      }
      if (base + d + D < count) fetch(d, d + D);
    }
#pragma unroll
    for (int c = 0; c < C; ++c) walks[c].advance(D);
  }
  __syncthreads();

  using Tile = typename Shared::Partial;
  Scalar* const partial = reinterpret_cast<Scalar*>(shared);
#pragma unroll
  for (int c = 0; c < C; ++c) {
    int begin = 0;
    bool mine = true;
    constexpr int left = !Config::along_k ? rows_per_lane * T : rows_per_lane * T > 32 ? rows_per_lane * T / 32 : 1;
    if constexpr (Config::along_k) mine = add_over_lanes(acc[c], lane, begin);
    const int row = warp_n * Block::warp_rows + (Config::along_k ? 0 : lane * V);
#pragma unroll
    for (int i = 0; i < left; ++i) {
      if (mine) partial[Tile::place(warp_k, c, (begin + i) % T, row + (begin + i) / T)] = acc[c][i];
    }
  }
  finish<Block>(partial, partial + Shared::main, M, N, m0, n0, rank, epilogue);
}

}  // namespace jitgen
