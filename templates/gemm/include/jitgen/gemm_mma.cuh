// y^T = W x^T with mma.sync, sm_80 and up. Weights, quantised (gemm_quant.cuh) or dense (gemm_rows.cuh), are operand A;
// they are loaded from global memory into registers, already as fragments (as Marlin does: Frantar et al., 2024).
// Tokens are the n of the products, eight at a time, and go through shared memory (gemm_activation.cuh).
//
// A block computes 16 * row_tiles * warps_n rows of the weight and up to 8 * token_tiles tokens. K is distributed among
// warps_k groups of warps, and among the blocks of a cluster. Each group has `depth` chunks of 64 k's of the weights in
// flight and two windows of x, and waits for no other group, so that a block of few tokens is little more than a stream
// of 16-byte loads. Each group of a quantised weight is summed in float32, and its sum is scaled in float32. Products of
// 8-bit floats are added up 128 at a time, and those of integers are exact in int32. The epilogue is called by gemm_epilogue.cuh.
#pragma once

#include "jitgen/gemm_activation.cuh"
#include "jitgen/gemm_epilogue.cuh"
#include "jitgen/mma_bytes.cuh"

namespace jitgen {

// What the mainloop is compiled for:
//
//   struct Config {
//     static constexpr int contractions = 1;       // weights that share x
//     static constexpr int tokens = 8;             // of a block, a power of two; from 8 on, products take eight at once
//     static constexpr int row_tiles = 2;          // pieces of 16 rows of each weight that a warp computes
//     static constexpr int warps_n, warps_k = 8;   // warps along the rows, and groups of warps that share K
//     static constexpr int cluster = 1;            // blocks that share K
//     static constexpr int depth = 4;              // chunks of 64 k's that a group of warps has in flight
//     static constexpr int window = 4;             // chunks of x that are staged at once, a multiple of depth
//     static constexpr int width = 1;              // columns of one epilogue call
//     static constexpr bool sums = false;          // whether the bias of the codes is removed through the sum of x, for
//                                                  // bfloat16 with 4-bit codes only
//   };
template <class Config>
struct MmaBlock : Config {
  static constexpr int token_tiles = (Config::tokens + 7) / 8, rows = 16 * Config::row_tiles * Config::warps_n;
  static constexpr int threads = 32 * Config::warps_n * Config::warps_k;
};

constexpr int ahead_bytes = 65536;  // of weights that a block fetches so at most, of several tokens

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Shared memory of a block, in bytes.
template <class Config>
struct MmaShared {
  using Block = MmaBlock<Config>;
  using Partial = PartialTile<Config::contractions, Block::token_tiles * 8, Block::rows, Config::warps_k>;
  static constexpr int slot = Config::tokens * 128;  // a chunk of x
  static constexpr int ring = 2 * Config::window * slot;
  static constexpr int main = larger(Config::warps_k * ring, Partial::floats * 4);
  static constexpr int bytes = main + inbox_floats<Block>() * 4;
};

// Stages the chunks `chunk`, `chunk` + stride .. of x, 64 k's each, of the rows from m0 on in consecutive slots. A slot
// has rows of 128 bytes, whose 16-byte units are swizzled, so that the same unit of eight rows is in eight banks. There
// are zeros beyond K. Rows from `rows` on are not written, since no result depends on them.
template <int threads, int tokens, int window, int stride, class X>
JITGEN_DEVICE void stage_window(uint32_t slot, const X& x, int m0, int rows, int chunk, int last_chunk, int K,
                                int thread) {
  constexpr int vector = X::vector, steps = 64 / vector, at_once = threads / steps;
  if constexpr (!X::computed && vector > 1 && at_once > 0) {
    const int k = thread % steps * vector, mine = thread / steps;
    constexpr int units = tokens < at_once ? at_once / tokens : 1;  // chunks staged at once, where a chunk has few rows
    const int row = mine % tokens, skipped = mine / tokens;
    const auto* const from = x.pointer + ((m0 + row) * x.row_stride + k);
    const uint32_t to = slot + (mine * 128 + k % 8 * 2);
#pragma unroll 1
    for (int c = skipped; c < window && chunk + c * stride < last_chunk; c += units) {
      const int k0 = (chunk + c * stride) * 64, live = K - k0 - k;
#pragma unroll
      for (int first = 0; first < tokens; first += at_once) {
        const int place = (c - skipped) * (tokens * 128) + first * 128;
        const uint32_t swizzled = (k / 8 ^ (first + row) & 7) << 4;
        if (first + row < rows) {
          if (live >= vector) {
            copy_async<vector * 2>(to + place + swizzled, from + (first * x.row_stride + k0));
          } else {
            copy_async<vector * 2>(to + place + swizzled, live > 0 ? from + (first * x.row_stride + k0) : x.pointer,
                                   live > 0 ? live * 2 : 0);
          }
        }
      }
    }
  } else {
    constexpr int total = window * tokens * steps, batch = total >= 4 * threads ? 4 : total >= 2 * threads ? 2 : 1;
    stage_elements<batch>(x, K, thread, total, threads, [&](int i) -> StagedPlace {
      const int row = i / steps % tokens, k = i % steps * vector, number = chunk + i / (steps * tokens) * stride;
      const uint32_t to = slot + i / steps * 128 + ((k / 8 ^ row & 7) << 4) + k % 8 * 2;
      return {to, m0 + smaller(row, rows - 1), number * 64 + k, row < rows && number < last_chunk};
    });
  }
}

// The mainloop, called by all threads of a block. `weights` has equal N and one format; X is explained in
// gemm_activation.cuh.
template <class Config, class X, class Weight, class Epilogue>
JITGEN_DEVICE void mma_gemm(unsigned char* shared, const X& x, int M, int N, int K,
                            const Weight (&weights)[Config::contractions], const Epilogue& epilogue, int m_block,
                            int n_block) {
  using Element = typename Weight::Element;
  using Product = typename SumType<Element>::type;  // what tensor cores sum
  using Sum = typename Weight::Sum;
  using Block = MmaBlock<Config>;
  using Shared = MmaShared<Config>;
  constexpr int C = Config::contractions, T = Block::token_tiles, R = Config::row_tiles, D = Config::depth;
  constexpr int warps_k = Config::warps_k, window = Config::window, group_threads = 32 * Config::warps_n;
  constexpr bool by_step = Weight::parts == 4;  // each step of 16 k's has scales of its own
  constexpr int parts = by_step ? 2 : Weight::parts, steps = 4 / parts;
  constexpr int own = Weight::tiles, reads = R / own;  // row tiles of one read of a lane, and its reads
  constexpr bool exact = !Config::sums;
  constexpr bool direct = (Weight::group == 0 || Weight::folded) && exact && !promoted<Element>;  // one accumulator
  static_assert(window % D == 0 && R % own == 0 && (exact || (is_bfloat16<Element> && Weight::bits < 8 && !by_step)), "");

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp_k = warp / Config::warps_n, warp_n = warp % Config::warps_n;
  const uint32_t rank = Config::cluster > 1 ? block_of_cluster() : 0;
  waits_begin<(Config::cluster > 1)>();
  if constexpr (Config::cluster > 1) cluster_arrive_relaxed();

  const int m0 = m_block * Config::tokens, n0 = n_block * Block::rows;
  const int live_tokens = smaller(M - m0, Config::tokens);
  const int chunks = Weight::chunks(K), last_tile = (N + 15) / 16 - 1;
  const int per_block = (chunks + Config::cluster - 1) / Config::cluster;
  const int first = int(rank) * per_block + warp_k, last = smaller(int(rank + 1) * per_block, chunks);
  const int count = last > first ? (last - first + warps_k - 1) / warps_k : 0;

  using Walk = typename Weight::template Walk<warps_k>;
  Walk walks[C][reads];
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < reads; ++r) {
      const int tile = (n_block * Config::warps_n + warp_n) * R + r * own;
      walks[c][r].start(weights[c], own == 1 ? smaller(tile, last_tile) : tile, chunks, first, lane);
    }
  }

  if constexpr (!Weight::constant) {
    // The kernel ahead may write the weights. Those that are read first are until then fetched into the L2 cache, but of
    // one token, where the many blocks of large weights took 3 to 18 % longer so (H100).
    if constexpr (Config::tokens > 1) {
      constexpr int most = ahead_bytes / (C * Block::rows * 2);
      const int ahead = smaller(most, smaller(D * warps_k, per_block) * 64);
#pragma unroll
      for (int c = 0; c < C; ++c) weights[c].fetch_ahead(n0, Block::rows, int(rank) * per_block * 64, ahead);
    }
    previous_kernel_wait();
  }

  typename Weight::Codes codes[D][C][reads];
  typename Weight::Scales scales[Weight::group == 0 ? 1 : D][C][reads];
  auto fetch = [&](int slot, int step) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int r = 0; r < reads; ++r) {
        codes[slot][c][r] = walks[c][r].load_codes(step);
        if constexpr (Weight::group != 0) scales[slot][c][r] = walks[c][r].load_scales(step);
      }
    }
  };
#pragma unroll
  for (int d = 0; d < D; ++d) {
    if (d < count) fetch(d, d);
  }
  if constexpr (Weight::group == 0) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int r = 0; r < reads; ++r) scales[0][c][r] = walks[c][r].load_scales(0);
    }
  }

  next_kernel_may_start();
  if constexpr (Weight::constant) previous_kernel_wait();  // x may be the result of a kernel that is still running
  const uint32_t ring = shared_address(shared) + warp_k * Shared::ring;
  auto stage = [&](int number) {
    stage_window<group_threads, Config::tokens, window, warps_k>(
        ring + number % 2 * (Shared::ring / 2), x, m0, live_tokens, first + number * window * warps_k, last, K,
        threadIdx.x % group_threads);
    copy_commit();
  };
  stage(0);
  const uint32_t row = Weight::token_of(lane) % Config::tokens;
  uint32_t at = ring + row * 128 + ((Weight::unit_of(lane) ^ row) << 4);

  using Total = Select<direct, Product, Sum>;
  Total acc[C][R][T][4];
#pragma unroll
  for (int i = 0; i < C * R * T * 4; ++i) (&acc[0][0][0][0])[i] = Total(0);

#pragma unroll 1
  for (int base = 0; base < count; base += D) {
    if (base % window == 0) {
      copy_wait<0>();
      group_barrier<group_threads>(1 + warp_k, "window of a group of warps");
      const int next = base / window + 1;
      if (next * window < count) stage(next);
      if (next > 1) at += next % 2 ? -window * Shared::slot : window * Shared::slot;
    }
    const uint32_t from = at + base % window * Shared::slot;
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (base + d >= count) break;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        uint32_t b[steps / 2][T][4];
#pragma unroll
        for (int s = 0; s < steps / 2; ++s) {
#pragma unroll
          for (int t = 0; t < T; ++t) {
            Weight::load_tokens(b[s][t], (from ^ ((part * (steps / 2) + s) * 64)) + (d * Shared::slot + t * 1024));
          }
        }
        Product zero[4] = {};
        Product sum[T][4];  // the sum of x over the part; where the bias is constant, times minus the bias
        if constexpr (!exact) {
          constexpr bool biased = Weight::planes && !Weight::zero_points;  // x is multiplied by minus the bias at once
          constexpr uint32_t one = 0x3f803f80u;
#pragma unroll
          for (int t = 0; t < T; ++t) {
#pragma unroll
            for (int s = 0; s < steps; ++s) {
              uint32_t ones[4] = {one, one, one, one};
              if constexpr (biased) {
#pragma unroll
                for (int i = 0; i < 4; ++i) ones[i] = Weight::minus_bias((part * steps + s) * 4 + i);
              }
              multiply_add<Element>(sum[t], ones, b[s / 2][t][s % 2 * 2], b[s / 2][t][s % 2 * 2 + 1], s ? sum[t] : zero);
            }
            if constexpr (!Weight::zero_points && !biased) {
#pragma unroll
              for (int q = 0; q < 2; ++q) sum[t][q] = sum[t][q + 2] = sum[t][q] * -Weight::common_bias;
            }
          }
        }
#pragma unroll
        for (int c = 0; c < C; ++c) {
#pragma unroll
          for (int r = 0; r < R; ++r) {
            const auto& s = scales[Weight::group == 0 ? 0 : d][c][r / own];
            auto offset = Weight::offsets(s, by_step ? part * steps : part);
            Product product[T][4];
            if constexpr (!exact && Weight::zero_points) {
              const float2 bias = Weight::bias(s, part);
#pragma unroll
              for (int i = 0; i < T * 4; ++i) product[i / 4][i % 4] = sum[i / 4][i % 4] * -(i % 4 < 2 ? bias.x : bias.y);
            }
#pragma unroll
            for (int step = 0; step < steps; ++step) {
              uint32_t a[4];
              if constexpr (by_step) offset = Weight::offsets(s, part * steps + step);
              Weight::template fragment<exact>(a, codes[d][c][r / own], part * steps + step, offset, r % own);
#pragma unroll
              for (int t = 0; t < T; ++t) {
                const uint32_t b0 = b[step / 2][t][step % 2 * 2], b1 = b[step / 2][t][step % 2 * 2 + 1];
                if constexpr (direct) {
                  multiply_32_bytes<Element>(acc[c][r][t], a, b0, b1, acc[c][r][t]);
                } else if ((step > 0 && !by_step) || (!exact && Weight::zero_points)) {
                  multiply_32_bytes<Element>(product[t], a, b0, b1, product[t]);
                } else if constexpr (exact) {
                  multiply_32_bytes<Element>(product[t], a, b0, b1, zero);
                } else {
                  multiply_add<Element>(product[t], a, b0, b1, sum[t]);
                }
              }
              if constexpr (by_step) {
                const float2 scale = unpack_pair(s.scale[part * steps + step]);
#pragma unroll
                for (int i = 0; i < T * 4; ++i) {
                  Total& total = acc[c][r][i / 4][i % 4];
                  total = __fmaf_rn(i % 4 < 2 ? scale.x : scale.y, float(product[i / 4][i % 4]), total);
                }
              }
            }
            if constexpr (!direct && !by_step) {
              const float2 scale = Weight::group == 0 ? float2{1.0f, 1.0f} : unpack_pair(s.scale[part]);
#pragma unroll
              for (int t = 0; t < T; ++t) {
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                  Total& total = acc[c][r][t][q];
                  total = __fmaf_rn(q < 2 ? scale.x : scale.y, float(product[t][q]), total);
                }
              }
            }
          }
        }
      }
      if (base + d + D < count) fetch(d, d + D);
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int r = 0; r < reads; ++r) walks[c][r].advance(D);
    }
  }
  __syncthreads();

  using Tile = typename Shared::Partial;
  Sum* const partial = reinterpret_cast<Sum*>(shared);
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float2 scale = {1.0f, 1.0f};
      if (Weight::group == 0) scale = unpack_pair(scales[0][c][r / own].scale[0]);
      scale.x *= Weight::shrunk;
      scale.y *= Weight::shrunk;
      if constexpr (Weight::factored) {
        const int row = n0 + (warp_n * R + r) * 16 + lane / 4;
        scale.x *= weights[c].factor(row, last_tile + 1);
        scale.y *= weights[c].factor(row + 8, last_tile + 1);
      }
#pragma unroll
      for (int t = 0; t < T; ++t) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int row = (warp_n * R + r / own * own) * 16 + Weight::row_of(lane, r % own, q / 2);
          Sum& sum = partial[Tile::place(warp_k, c, t * 8 + lane % 4 * 2 + q % 2, row)];
          if constexpr (is_floating<Sum>) {
            sum = float(acc[c][r][t][q]) * (q < 2 ? scale.x : scale.y);
          } else {
            sum = acc[c][r][t][q];
          }
        }
      }
    }
  }
  finish<Block>(partial, reinterpret_cast<Sum*>(shared + Shared::main), M, N, m0, n0, rank, epilogue);
}

}  // namespace jitgen
