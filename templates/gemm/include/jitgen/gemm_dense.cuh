// y^T = W x^T with mma.sync for dense bfloat16, float16 and operands of one byte, sm_80 and up, any strides and
// alignments. Both operands go through a ring of `stages` tiles in shared memory. Copies are asynchronous where the
// alignment allows 4 bytes or more at a time, and plain loads otherwise (the multistage pipeline of CUTLASS's mainloops
// for sm_80). An operand with stride 1 along k is stored as rows of 128 bytes. One of 16 bits with stride 1 along its
// rows or columns is stored as 64 runs of these, and ldmatrix transposes it when fragments are loaded. It moves no
// single bytes, so that operands of one byte are transposed on their way into shared memory.
//
// A block computes 16 * row_tiles * warps_n rows of the weight and 8 * token_tiles * warps_m tokens. K is distributed
// among warps_k groups of warps, and among the blocks of a cluster. The epilogue is called by gemm_epilogue.cuh.
#pragma once

#include "jitgen/gemm_activation.cuh"
#include "jitgen/gemm_epilogue.cuh"
#include "jitgen/mma_bytes.cuh"

namespace jitgen {

// The dimension along which an operand [outer, k] is contiguous. Accesses are of `vector` elements.
enum class Along { k, outer, neither };

// A tile of `outer` by 128 bytes of elements of one operand. Its 16-byte units are swizzled, so that the eight units of
// an 8x8 matrix are in different banks.
template <class Element, Along along, int vector, int outer, int threads>
struct OperandTile {
  static constexpr int bytes = outer * 128;
  static constexpr int size = sizeof(Element), depth = 128 / size, unit = 16 / size;  // unit: elements of 16 bytes
  static constexpr bool in_runs = along == Along::outer && size == 2;                // stored along `outer`
  static_assert(outer % 8 == 0 && (along != Along::outer || outer % 64 == 0 || (64 % outer == 0)), "");

  const Element* from;
  int64_t outer_stride, k_stride;
  int live;  // rows or columns of the tile that exist

  static JITGEN_DEVICE uint32_t place(int at, int k) {  // byte offset of an element
    if constexpr (in_runs) {
      constexpr int units = outer / 8;
      const int turn = units >= 8 ? k & 7 : k / (units >= 8 ? 1 : 8 / units) & (units - 1);
      return k * (outer * 2) + ((at / 8 ^ turn) << 4) + at % 8 * 2;
    } else {
      return at * 128 + ((k / unit ^ at & 7) << 4) + k % unit * size;
    }
  }

  // The address of the row that lane `lane` loads of the matrix number (at8, k8), of 8 by 16 bytes.
  static JITGEN_DEVICE uint32_t matrix(int at8, int k8, int lane) {
    return in_runs ? place(at8 * 8, k8 * 8 + lane % 8) : place(at8 * 8 + lane % 8, k8 * unit);
  }
  static JITGEN_DEVICE void load(uint32_t (&fragment)[4], uint32_t address) {
    if constexpr (in_runs) {
      load_matrices_transposed(fragment, address);
    } else {
      load_matrices(fragment, address);
    }
  }

  // Copies elements k0 .. k0 + depth, with zeros from K on. Nothing is written beyond `live`: no result depends on it.
  JITGEN_DEVICE void stage(uint32_t tile, int k0, int K, int thread) const {
    constexpr int line = along == Along::outer ? outer : depth, lines = along == Along::outer ? depth : outer;
    constexpr int pieces = line / vector;
    if constexpr (along == Along::outer && size == 1 && vector >= 4) {
      // A thread takes four bytes of four k's. Those of a warp are eight neighbours of four such k's.
      constexpr int fours = outer / 4, total = fours * (depth / 4), across = fours < 8 ? fours : 8;
#pragma unroll 1
      for (int i = thread; i < total; i += threads) {
        const int inside = i % (across * 4), group = i / (across * 4);
        const int at = (group % (fours / across) * across + inside % across) * 4;
        const int k = (group / (fours / across) * 4 + inside / across) * 4;
        if (at >= live) continue;
        uint32_t of_k[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          of_k[j] = 0;
          if (k0 + k + j >= K) continue;
          const Element* const source = from + ((k0 + k + j) * k_stride + at);
          if (at + 4 <= live) {
            of_k[j] = *reinterpret_cast<const uint32_t*>(source);
          } else {
            for (int byte = 0; at + byte < live; ++byte) of_k[j] |= bits_of(source[byte]) << byte * 8;
          }
        }
        const uint32_t low[2] = {__byte_perm(of_k[0], of_k[1], 0x5140), __byte_perm(of_k[2], of_k[3], 0x5140)};
        const uint32_t high[2] = {__byte_perm(of_k[0], of_k[1], 0x7362), __byte_perm(of_k[2], of_k[3], 0x7362)};
        const uint32_t turned[4] = {__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632),
                                    __byte_perm(high[0], high[1], 0x5410), __byte_perm(high[0], high[1], 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + place(at + j, k)), "r"(turned[j]) : "memory");
        }
      }
    } else if constexpr (along != Along::neither && vector * size >= 4 && (along == Along::k || size == 2)) {
#pragma unroll
      for (int first = 0; first < lines * pieces; first += threads) {
        const int piece = first + thread;
        if (lines * pieces % threads != 0 && piece >= lines * pieces) break;
        const int number = piece / pieces, place_in = piece % pieces * vector;
        const int at = along == Along::outer ? place_in : number, k = along == Along::outer ? number : place_in;
        if (at >= live) continue;
        const uint32_t to = tile + place(at, k);
        const int left = along == Along::outer ? live - at : K - k0 - k;
        const int whole = left < vector ? (left > 0 ? left * size : 0) : vector * size;
        const int count = k0 + k < K ? whole : 0;
        const int64_t offset =
            along == Along::outer ? (k0 + k) * k_stride + at : at * outer_stride + (k0 + k);
        if (count == vector * size) {
          copy_async<vector * size>(to, from + offset);
        } else {
          copy_async<vector * size>(to, count ? from + offset : from, count);
        }
      }
    } else {
      // Loads of a batch are in flight together: the compiler moves none of them across a store to shared memory.
      constexpr int elements = lines * line, each = (elements + threads - 1) / threads, batch = each < 8 ? each : 8;
      const auto line_of = [&](int piece) { return along == Along::outer ? piece % line : piece / line; };
      const auto along_k = [&](int piece) { return along == Along::outer ? piece / line : piece % line; };
#pragma unroll 1
      for (int first = thread; first < elements; first += batch * threads) {
        uint32_t loaded[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int piece = first + i * threads, at = line_of(piece), k = along_k(piece);
          const bool inside = piece < elements && at < live && k0 + k < K;
          loaded[i] = inside ? bits_of(from[at * outer_stride + (k0 + k) * k_stride]) : 0;
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int piece = first + i * threads, at = line_of(piece), k = along_k(piece);
          if (piece >= elements || at >= live) continue;
          if constexpr (size == 2) {
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + place(at, k)), "h"(uint16_t(loaded[i])) : "memory");
          } else {
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(tile + place(at, k)), "r"(loaded[i]) : "memory");
          }
        }
      }
    }
  }
  static JITGEN_DEVICE uint32_t bits_of(Element element) {
    if constexpr (is_integer<Element>) {
      return uint8_t(element);
    } else {
      return element.bits;
    }
  }
};

// The same for x. A computed x is stored as rows of 64 k's.
template <class X, Along along, int outer, int threads, bool computed = X::computed>
struct ActivationTile : OperandTile<typename X::Element, along, X::vector, outer, threads> {
  JITGEN_DEVICE ActivationTile(const X& x, int first, int live)
      : OperandTile<typename X::Element, along, X::vector, outer, threads>{x.pointer + first * x.row_stride, x.row_stride,
                                                                          x.k_stride, live} {}
};
template <class X, Along along, int outer, int threads>
struct ActivationTile<X, along, outer, threads, true> : OperandTile<typename X::Element, Along::k, 8, outer, threads> {
  using Tile = OperandTile<typename X::Element, Along::k, 8, outer, threads>;
  const X& x;
  int first;
  JITGEN_DEVICE ActivationTile(const X& x, int first, int live) : Tile{nullptr, 0, 0, live}, x(x), first(first) {}
  JITGEN_DEVICE void stage(uint32_t tile, int k0, int K, int thread) const {
    constexpr int pieces = 64 / X::vector;
    constexpr int batch = outer * pieces >= 2 * threads ? 2 : 1;
    stage_elements<batch>(x, K, thread, outer * pieces, threads, [&](int i) -> StagedPlace {
      const int at = i / pieces, k = i % pieces * X::vector;
      return {tile + Tile::place(at, k), first + smaller(at, this->live - 1), k0 + k, at < this->live};
    });
  }
};

// What the mainloop is compiled for:
//
//   struct Config {
//     static constexpr int contractions = 1;               // weights that share x
//     static constexpr int warp_tokens, row_tiles = 2;     // a warp's share: tokens in eights, rows in units of 16
//     static constexpr int warps_m, warps_n, warps_k = 1;  // warps along the tokens and the rows, and groups of warps
//                                                          // that share K
//     static constexpr int cluster = 1;                    // blocks that share K
//     static constexpr int stages = 4;                     // tiles in shared memory
//     static constexpr int width = 8;                      // columns of one epilogue call
//     static constexpr jitgen::Along x_along, w_along;     // the dimension along which x and the weights are contiguous
//     static constexpr int w_vector = 8;                   // elements of a weight that one access moves
//   };
template <class Config>
struct DenseBlock : Config {
  static constexpr int token_tiles = Config::warp_tokens * Config::warps_m, tokens = 8 * token_tiles;
  static constexpr int rows = 16 * Config::row_tiles * Config::warps_n;
  static constexpr int threads = 32 * Config::warps_m * Config::warps_n * Config::warps_k;
};

template <class Config>
struct DenseShared {
  using Block = DenseBlock<Config>;
  using Partial = PartialTile<Config::contractions, Block::tokens, Block::rows, Config::warps_k>;
  static constexpr int part = (Block::tokens + Config::contractions * Block::rows) * 128;  // bytes of 64 k's
  static constexpr int stage = Config::warps_k * part;
  static constexpr int main = Config::stages * stage > Partial::floats * 4 ? Config::stages * stage : Partial::floats * 4;
  static constexpr int bytes = main + inbox_floats<Block>() * 4;
};

template <class Element>
struct DenseWeight {
  const Element* pointer;
  int64_t row_stride, k_stride;
};

// As mma_gemm of gemm_mma.cuh, with dense weights.
template <class Config, class X, class Weight, class Epilogue>
JITGEN_DEVICE void dense_gemm(unsigned char* shared, const X& x, int M, int N, int K,
                              const DenseWeight<Weight> (&weights)[Config::contractions], const Epilogue& epilogue,
                              int m_block, int n_block) {
  using Element = ProductElement<typename X::Element, Weight>;
  using Sum = typename SumType<Element>::type;
  using Block = DenseBlock<Config>;
  using Shared = DenseShared<Config>;
  constexpr int C = Config::contractions, T = Config::warp_tokens, R = Config::row_tiles, S = Config::stages;
  constexpr int warps_k = Config::warps_k;
  using Tokens = ActivationTile<X, Config::x_along, Block::tokens, Block::threads>;
  using W = OperandTile<Weight, Config::w_along, Config::w_vector, Block::rows, Block::threads>;

  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp_k = warp / (Config::warps_m * Config::warps_n), warp_m = warp / Config::warps_n % Config::warps_m;
  const int warp_n = warp % Config::warps_n;
  const uint32_t rank = Config::cluster > 1 ? block_of_cluster() : 0;
  if constexpr (Config::cluster > 1) waits_begin<true>();
  if constexpr (Config::cluster > 1) cluster_arrive_relaxed();

  const int m0 = m_block * Block::tokens, n0 = n_block * Block::rows;
  const Tokens x_tile(x, m0, smaller(M - m0, Block::tokens));
  W w_tiles[C];
#pragma unroll
  for (int c = 0; c < C; ++c) {
    w_tiles[c] = {weights[c].pointer + n0 * weights[c].row_stride, weights[c].row_stride, weights[c].k_stride,
                  smaller(N - n0, Block::rows)};
  }
  constexpr int depth = W::depth;
  const int steps = (K + depth * warps_k - 1) / (depth * warps_k);
  const int per_block = (steps + Config::cluster - 1) / Config::cluster;
  const int first = int(rank) * per_block, count = smaller(int(rank + 1) * per_block, steps) - first;

  const uint32_t ring = shared_address(shared);
  constexpr int parts_at_once = !X::computed && X::vector > 1 && Config::w_vector > 1 ? warps_k : 1;
  auto stage = [&](int slot, int i) {
    const uint32_t to = ring + slot * Shared::stage;
#pragma unroll parts_at_once
    for (int part = 0; part < warps_k; ++part) {
      const int k0 = ((first + i) * warps_k + part) * depth;
      x_tile.stage(to + part * Shared::part, k0, K, threadIdx.x);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        w_tiles[c].stage(to + part * Shared::part + Tokens::bytes + c * W::bytes, k0, K, threadIdx.x);
      }
    }
  };

  Sum acc[C][R][T][4];
#pragma unroll
  for (int i = 0; i < C * R * T * 4; ++i) (&acc[0][0][0][0])[i] = Sum(0);

#pragma unroll 1
  for (int i = 0; i < S - 1; ++i) {
    if (i < count) stage(i, i);
    copy_commit();
  }
  int slot = 0, filled = S - 1;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    copy_wait<S - 2>();
    __syncthreads();
    if (i + S - 1 < count) stage(filled, i + S - 1);
    copy_commit();
    const uint32_t from = ring + slot * Shared::stage + warp_k * Shared::part;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[T][4];
#pragma unroll
      for (int t = 0; t < T; ++t) Tokens::load(b[t], from + Tokens::matrix(warp_m * T + t, half * 4 + lane / 8, lane));
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          Sum fresh[T][4] = {};
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            uint32_t a[4];
            W::load(a, from + Tokens::bytes + c * W::bytes +
                           W::matrix((warp_n * R + r) * 2 + lane / 8 % 2, half * 4 + s * 2 + lane / 16, lane));
#pragma unroll
            for (int t = 0; t < T; ++t) {
              Sum(&sum)[4] = promoted<Element> ? fresh[t] : acc[c][r][t];
              multiply_32_bytes<Element>(sum, a, b[t][s * 2], b[t][s * 2 + 1], sum);
            }
          }
          if constexpr (promoted<Element>) {
#pragma unroll
            for (int i = 0; i < T * 4; ++i) acc[c][r][i / 4][i % 4] += fresh[i / 4][i % 4];
          }
        }
      }
    }
    slot = slot + 1 == S ? 0 : slot + 1;
    filled = filled + 1 == S ? 0 : filled + 1;
  }
  copy_wait<0>();
  __syncthreads();

  using Tile = typename Shared::Partial;
  Sum* const partial = reinterpret_cast<Sum*>(shared);
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = (warp_n * R + r) * 16 + lane / 4;
#pragma unroll
      for (int t = 0; t < T; ++t) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int token = (warp_m * T + t) * 8 + lane % 4 * 2 + q % 2;
          partial[Tile::place(warp_k, c, token, row + q / 2 * 8)] = acc[c][r][t][q];
        }
      }
    }
  }
  finish<Block>(partial, reinterpret_cast<Sum*>(shared + Shared::main), M, N, m0, n0, rank, epilogue);
}

}  // namespace jitgen
