// y^T = W x^T with mma.sync, sm_80 and up: quantised weights are operand A and go straight from global memory into
// registers, in fragment order; tokens are the products' n, eight at a time, and go through shared memory. A block takes
// 16 * row_tiles * warps_n rows of the weight and 8 * token_tiles tokens; its warps_k groups of warps, and the blocks of
// a cluster, share out k. Each group has a ring of `depth` chunks of 64 k in flight, weights and x alike, and waits for
// nobody else, so that a block of few tokens is little more than a stream of 16-byte loads.
//
// Sums are taken in float32 within a group of k and scaled in float32. Beside it: gemm_quant.cuh, gemm_epilogue.cuh.
#pragma once

#include "jitgen/gemm_epilogue.cuh"
#include "jitgen/gemm_quant.cuh"

namespace jitgen {

// width: columns per epilogue call. x_vector: elements per copy of x; 8, 4 and 2 need x's rows aligned to as many and
// its k contiguous, 1 neither. sums: remove the codes' bias through the sum of x (bfloat16 with 4-bit codes only).
template <int contractions_, int token_tiles_, int row_tiles_, int warps_n_, int warps_k_, int cluster_, int depth_,
          int width_, int x_vector_, bool sums_>
struct MmaConfig {
  static constexpr int contractions = contractions_, token_tiles = token_tiles_, row_tiles = row_tiles_;
  static constexpr int warps_n = warps_n_, warps_k = warps_k_, cluster = cluster_, depth = depth_;
  static constexpr int width = width_, x_vector = x_vector_;
  static constexpr bool sums = sums_;
  static constexpr int tokens = 8 * token_tiles, rows = 16 * row_tiles * warps_n;
  static constexpr int threads = 32 * warps_n * warps_k;
};

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Shared memory of a block, in bytes.
template <class Config>
struct MmaShared {
  using Partial = PartialTile<Config::contractions, Config::tokens, Config::rows, Config::warps_k>;
  static constexpr int slot = Config::tokens * 128;
  static constexpr int ring = Config::warps_k * Config::depth * slot;
  static constexpr int main = larger(ring, Partial::floats * 4);
  static constexpr int bytes = main + inbox_floats<Config>() * 4;
};

// One chunk (64 k) of x into a slot: rows of 128 bytes, their 16-byte units exchanged so that eight rows' same unit lies
// in eight different banks. Beyond K there are zeros; rows beyond M stay as they are, since no result depends on them.
template <int vector, int threads, int tokens, class Element>
JITGEN_DEVICE void stage_chunk(uint32_t slot, const Element* x, int64_t row_stride, int64_t k_stride, int rows, int k0,
                               int K, int thread) {
  constexpr int steps = 64 / vector, rows_at_once = threads / steps;
  if constexpr (rows_at_once > 0) {
    const int k = thread % steps * vector, live = K - k0 - k;
    const int bytes = live >= vector ? vector * 2 : live > 0 ? live * 2 : 0;
    const Element* from = x + (thread / steps * row_stride + (bytes ? k0 + k : 0));
#pragma unroll
    for (int first = 0; first < tokens; first += rows_at_once) {
      const int row = first + thread / steps;
      if (row < rows) copy_async<vector * 2>(slot + row * 128 + ((k / 8 ^ row & 7) << 4) + k % 8 * 2, from, bytes);
      from += rows_at_once * row_stride;
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < rows * steps; i += threads) {
      const int row = i / steps, k = i % steps * vector, live = K - k0 - k;
      const uint32_t to = slot + row * 128 + ((k / 8 ^ row & 7) << 4) + k % 8 * 2;
      if constexpr (vector == 1) {
        const uint16_t element = live > 0 ? (x + row * row_stride + (k0 + k) * k_stride)->bits : uint16_t(0);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(element) : "memory");
      } else {
        const int bytes = live >= vector ? vector * 2 : live > 0 ? live * 2 : 0;
        copy_async<vector * 2>(to, x + row * row_stride + (bytes ? k0 + k : 0), bytes);
      }
    }
  }
}

// Weights: an array of Config::contractions weights of equal N and format. x: [M, K]. Called by all threads of a block.
template <class Config, class Weight, class Epilogue>
JITGEN_DEVICE void mma_gemm(unsigned char* shared, const typename Weight::Element* x, int64_t x_row, int64_t x_k, int M,
                            int N, int K, const Weight (&weights)[Config::contractions], const Epilogue& epilogue,
                            int m_block, int n_block) {
  using Element = typename Weight::Element;
  constexpr int C = Config::contractions, T = Config::token_tiles, R = Config::row_tiles, D = Config::depth;
  constexpr int parts = Weight::parts, steps = 4 / parts, group_threads = 32 * Config::warps_n;
  constexpr bool exact = !Config::sums;
  constexpr bool direct = Weight::group == 0 && exact;  // the products' own accumulators serve for all of k
  static_assert(D >= 2 && (exact || (is_bfloat16<Element> && Weight::bits == 4)), "");

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp_k = warp / Config::warps_n, warp_n = warp % Config::warps_n, thread = threadIdx.x % group_threads;
  const uint32_t rank = Config::cluster > 1 ? block_of_cluster() : 0;
  if constexpr (Config::cluster > 1) cluster_arrive_relaxed();

  const int m0 = m_block * Config::tokens, n0 = n_block * Config::rows;
  const int live_tokens = smaller(M - m0, Config::tokens);
  const int chunks = Weight::chunks(K);
  const int per_block = (chunks + Config::cluster - 1) / Config::cluster;
  const int first = int(rank) * per_block + warp_k, last = smaller(int(rank + 1) * per_block, chunks);
  const int count = last > first ? (last - first + Config::warps_k - 1) / Config::warps_k : 0;
  const int last_tile = (N + 15) / 16 - 1;
  typename Weight::TileRows tiles[C][R];
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      tiles[c][r] = weights[c].tile(smaller((n_block * Config::warps_n + warp_n) * R + r, last_tile), chunks);
    }
  }

  x += m0 * x_row;
  const uint32_t ring = shared_address(shared) + warp_k * (D * MmaShared<Config>::slot);
  const uint32_t matrix_row = (lane % 8) * 128 + ((lane / 8 ^ lane % 8) << 4);

  typename Weight::Codes codes[D][C][R];
  typename Weight::Scales scales[Weight::group == 0 ? 1 : D][C][R];
  auto fetch_scales = [&](int slot, int chunk) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int r = 0; r < R; ++r) scales[slot][c][r] = tiles[c][r].load_scales(chunk, lane);
    }
  };
  auto fetch = [&](int slot, int i) {
    const int chunk = first + i * Config::warps_k;
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int r = 0; r < R; ++r) codes[slot][c][r] = tiles[c][r].load_codes(chunk, lane);
    }
    if constexpr (Weight::group != 0) fetch_scales(slot, chunk);
  };
  auto stage = [&](int slot, int i) {
    const int k0 = (first + i * Config::warps_k) * 64;
    stage_chunk<Config::x_vector, group_threads, Config::tokens>(ring + slot * MmaShared<Config>::slot, x, x_row, x_k, live_tokens, k0,
                                                 K, thread);
  };

  float acc[C][R][T][4];
#pragma unroll
  for (int i = 0; i < C * R * T * 4; ++i) (&acc[0][0][0][0])[i] = 0.0f;

  if (Weight::group == 0 && count > 0) fetch_scales(0, 0);
#pragma unroll
  for (int d = 0; d < D; ++d) {
    if (d < count) fetch(d, d);
  }
#pragma unroll
  for (int d = 0; d < D - 1; ++d) {
    if (d < count) stage(d, d);
    copy_commit();
  }

#pragma unroll 1
  for (int base = 0; base < count; base += D) {
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const int i = base + d;
      if (i < count) {
        copy_wait<D - 2>();
        group_barrier<group_threads>(1 + warp_k);
        if (i + D - 1 < count) stage((d + D - 1) % D, i + D - 1);
        copy_commit();
        const uint32_t slot = ring + d * MmaShared<Config>::slot + matrix_row;
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          uint32_t b[steps / 2][T][4];
#pragma unroll
          for (int s = 0; s < steps / 2; ++s) {
#pragma unroll
            for (int t = 0; t < T; ++t) {
              load_matrices(b[s][t], (slot ^ ((part * (steps / 2) + s) * 64)) + t * 1024);
            }
          }
          float sum[T][4];
          if constexpr (!exact) {
            constexpr uint32_t one = 0x3f803f80u;
            const uint32_t ones[4] = {one, one, one, one};
#pragma unroll
            for (int t = 0; t < T; ++t) {
#pragma unroll
              for (int q = 0; q < 4; ++q) sum[t][q] = 0.0f;
#pragma unroll
              for (int s = 0; s < steps; ++s) {
                multiply_accumulate<Element>(sum[t], ones, b[s / 2][t][s % 2 * 2], b[s / 2][t][s % 2 * 2 + 1]);
              }
            }
          }
#pragma unroll
          for (int c = 0; c < C; ++c) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
              const auto& s = scales[Weight::group == 0 ? 0 : d][c][r];
              const auto offset = Weight::offsets(s, part);
              float product[T][4];
#pragma unroll
              for (int i = 0; i < T * 4; ++i) (&product[0][0])[i] = 0.0f;
#pragma unroll
              for (int step = 0; step < steps; ++step) {
                uint32_t a[4];
                Weight::template fragment<exact>(a, codes[d][c][r], part * steps + step, offset);
#pragma unroll
                for (int t = 0; t < T; ++t) {
                  multiply_accumulate<Element>(direct ? acc[c][r][t] : product[t], a, b[step / 2][t][step % 2 * 2],
                                               b[step / 2][t][step % 2 * 2 + 1]);
                }
              }
              if constexpr (!direct) {
                const float2 bias = Weight::bias(s, part);
                const float2 scale = Weight::group == 0 ? float2{1.0f, 1.0f} : unpack_pair(s.scale[part]);
#pragma unroll
                for (int t = 0; t < T; ++t) {
#pragma unroll
                  for (int q = 0; q < 4; ++q) {
                    float value = product[t][q];
                    if constexpr (!exact) value = __fmaf_rn(q < 2 ? -bias.x : -bias.y, sum[t][q], value);
                    acc[c][r][t][q] = __fmaf_rn(q < 2 ? scale.x : scale.y, value, acc[c][r][t][q]);
                  }
                }
              }
            }
          }
        }
        if (i + D < count) fetch(d, i + D);
      }
    }
  }
  copy_wait<0>();
  __syncthreads();

  using Tile = PartialTile<C, Config::tokens, Config::rows, Config::warps_k>;
  float* const partial = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float2 scale = {1.0f, 1.0f};
      if (Weight::group == 0 && count > 0) scale = unpack_pair(scales[0][c][r].scale[0]);
      const int row = (warp_n * R + r) * 16 + lane / 4;
#pragma unroll
      for (int t = 0; t < T; ++t) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          partial[Tile::place(warp_k, c, t * 8 + lane % 4 * 2 + q % 2, row + q / 2 * 8)] =
              acc[c][r][t][q] * (q < 2 ? scale.x : scale.y);
        }
      }
    }
  }
  finish<Config>(partial, reinterpret_cast<float*>(shared + MmaShared<Config>::main), M, N, m0, n0, rank, epilogue);
}

}  // namespace jitgen
