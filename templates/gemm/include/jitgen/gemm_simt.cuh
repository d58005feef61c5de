// y = x W^T in full float32 or float64, by fused multiply-adds on the ordinary cores, or in integers that wrap around:
// dense weights of any strides, and quantised ones, whose values need not be rounded here. A block computes `tokens` by
// `rows`, and a thread 4 or 8 by 8 of these. Tiles of both operands, `depth` k's long, alternate between two buffers in
// shared memory, and the next one is loaded while this one is multiplied. The epilogue is called by gemm_epilogue.cuh.
#pragma once

#include "jitgen/gemm_activation.cuh"
#include "jitgen/gemm_epilogue.cuh"
#include "jitgen/gemm_quant.cuh"

namespace jitgen {

JITGEN_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
JITGEN_DEVICE double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
JITGEN_DEVICE int32_t multiply_add(int32_t a, int32_t b, int32_t c) {
  return int32_t(uint32_t(a) * uint32_t(b) + uint32_t(c));
}
JITGEN_DEVICE int64_t multiply_add(int64_t a, int64_t b, int64_t c) {
  return int64_t(uint64_t(a) * uint64_t(b) + uint64_t(c));
}

// A dense operand [outer, k]. With k_first its stride along k is 1, or neither stride is; else its stride along `outer`
// is 1. A load reads `vector` elements along that dimension, and the other stride is a multiple of as many. Elements are
// of type `Stored` in memory and become `Scalar` in shared memory.
template <class Stored, bool k_first, int vector, class Scalar_ = Stored>
struct SimtDense {
  using Scalar = Scalar_;
  const Stored* pointer;
  int64_t outer_stride, k_stride;

  template <int outer, int depth, int threads>
  struct Tile {
    static constexpr int pieces = (k_first ? depth : outer) / vector, total = pieces * (k_first ? outer : depth);
    static constexpr int count = (total + threads - 1) / threads;
    static constexpr bool converted = sizeof(Stored) != sizeof(Scalar);
    Vector<Stored, vector> values[count];

    static JITGEN_DEVICE int at(int i) { return k_first ? i / pieces : i % pieces * vector; }
    static JITGEN_DEVICE int k(int i) { return k_first ? i % pieces * vector : i / pieces; }
    JITGEN_DEVICE void load(const SimtDense& from, int first, int limit, int k0, int K) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int position = threadIdx.x + i * threads, row = first + at(position), column = k0 + k(position);
        const int left = k_first ? K - column : limit - row;
        const bool live = row < limit && column < K && (total % threads == 0 || position < total);
        const Stored* const source = from.pointer + (row * from.outer_stride + column * from.k_stride);
        if (live && left >= vector) {
          values[i] = load_vector<vector>(source);
        } else {
#pragma unroll
          for (int j = 0; j < vector; ++j) values[i][j] = live && j < left ? source[j] : Stored{};
        }
      }
    }
    template <int stride>
    JITGEN_DEVICE void store(Scalar* to) const {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int position = threadIdx.x + i * threads;
        if (total % threads != 0 && position >= total) continue;
        Scalar* const target = to + (k(position) * stride + at(position));
        if constexpr (k_first || converted) {
#pragma unroll
          for (int j = 0; j < vector; ++j) target[k_first ? j * stride : j] = Scalar(jitgen::load(values[i][j]));
        } else {
          store_vector(target, values[i]);
        }
      }
    }
  };
};

// An activation that a prologue computes.
template <class X>
struct SimtComputed {
  using Scalar = typename X::Element;
  X x;

  template <int outer, int depth, int threads>
  struct Tile {
    static constexpr int pieces = depth / X::vector, total = pieces * outer, count = (total + threads - 1) / threads;
    Vector<Scalar, X::vector> values[count];

    JITGEN_DEVICE void load(const SimtComputed& from, int first, int limit, int k0, int K) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int position = threadIdx.x + i * threads, row = first + position / pieces;
        const int k = k0 + position % pieces * X::vector;
        values[i] = {};
        if (position < total && row < limit && k < K) {
          values[i] = from.x.template at<X::vector>(row, k, smaller(K - k, X::vector));
        }
      }
    }
    template <int stride>
    JITGEN_DEVICE void store(Scalar* to) const {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int position = threadIdx.x + i * threads;
        if (total % threads != 0 && position >= total) continue;
#pragma unroll
        for (int j = 0; j < X::vector; ++j) {
          to[(position % pieces * X::vector + j) * stride + position / pieces] = values[i][j];
        }
      }
    }
  };
};

// A quantised weight in the "mma" layout. A thread decodes what a lane of mma.sync would have of 16 rows by 16 k's.
template <class Weight, class Scalar_ = float>
struct SimtQuant {
  using Scalar = Scalar_;
  Weight weight;

  template <int outer, int depth, int threads>
  struct Tile {
    static constexpr int total = outer / 16 * 32 * (depth / 16), count = (total + threads - 1) / threads;
    static_assert(outer % 16 == 0 && depth % 16 == 0, "");

    // Item `i` is of this row tile, k16 step and lane.
    static JITGEN_DEVICE int tile_of(int i) { return i / 32 / (depth / 16); }
    static JITGEN_DEVICE int step_of(int i) { return i / 32 % (depth / 16); }
    Scalar values[count][8];

    JITGEN_DEVICE void load(const SimtQuant& from, int first, int limit, int k0, int K) {
      const Weight& weight = from.weight;
      const int chunks = Weight::chunks(K), groups = Weight::groups(chunks);
      constexpr int words = Weight::bits == 4 ? 1 : 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int position = threadIdx.x + i * threads, tile = first / 16 + tile_of(position), lane = position % 32;
        const int k = k0 + step_of(position) * 16, step = k / 16;
        const bool live = position < total && tile * 16 < limit && k < K;
#pragma unroll
        for (int j = 0; j < 8; ++j) values[i][j] = Scalar(0);
        if (!live) continue;
        const uint32_t* from_codes = reinterpret_cast<const uint32_t*>(weight.codes) +
            ((int64_t(tile) * chunks * Weight::loads + step / (4 / words)) * 32 + lane) * 4 + step % (4 / words) * words;
        const int64_t at = (int64_t(tile) * groups + (Weight::group ? k / (Weight::group ? Weight::group : 1) : 0)) * 16 +
                           lane / 4 * 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {  // register j / 2 of the fragment, low or high half
          const int half = j / 2 % 2;
          int code;
          if constexpr (Weight::bits == 4) {
            const uint32_t word = from_codes[0];
            const int zero = Weight::zero_points ? weight.zeros[at + half] : 8;
            code = int(word >> (j / 2 * 4 + j % 2 * 16) & 15u) - zero;
          } else {
            code = int8_t(from_codes[j / 4] >> (half * 8 + j % 2 * 16) & 0xffu);
          }
          values[i][j] = Scalar(code) * Scalar(load_scale(weight.scales[at + half]));
        }
      }
    }
    template <int stride>
    JITGEN_DEVICE void store(Scalar* to) const {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int position = threadIdx.x + i * threads, lane = position % 32;
        if (position >= total) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int k = step_of(position) * 16 + lane % 4 * 2 + j % 2 + j / 4 * 8;
          to[k * stride + tile_of(position) * 16 + lane / 4 + j / 2 % 2 * 8] = values[i][j];
        }
      }
    }
    static JITGEN_DEVICE float load_scale(float scale) { return scale; }
    static JITGEN_DEVICE float load_scale(bfloat16 scale) { return jitgen::load(scale); }
  };
};

// What the mainloop is compiled for:
//
//   struct Config {
//     static constexpr int contractions = 1;           // weights that share x
//     static constexpr int tokens = 64, rows = 64;     // that a block computes
//     static constexpr int depth = 16;                 // k's at a time
//     static constexpr int token_run = 8, row_run = 8; // of these, a thread's
//     static constexpr int cluster = 1;                // blocks that share K
//     static constexpr int width = 8;                  // columns of one epilogue call
//   };
template <class Config>
struct SimtBlock : Config {
  static constexpr int token_tiles = Config::tokens / 8, warps_k = 1;
  static constexpr int threads = Config::tokens / Config::token_run * (Config::rows / Config::row_run);
};

// The i-th token, or row, of thread number `thread`. A thread has them in fours, so that neighbouring threads read
// neighbouring 16 bytes.
template <class Config>
JITGEN_DEVICE int token_of(int thread, int i) {
  constexpr int four = Config::token_run < 4 ? Config::token_run : 4;
  return i / four * (Config::tokens / Config::token_run * four) + thread * four + i % four;
}
template <class Config>
JITGEN_DEVICE int row_of(int thread, int i) {
  constexpr int four = Config::row_run < 4 ? Config::row_run : 4;
  return i / four * (Config::rows / Config::row_run * four) + thread * four + i % four;
}

// Loads a thread's numbers of one k, in accesses of up to four numbers.
template <int run, class Scalar, class Place>
JITGEN_DEVICE void read_run(Scalar (&to)[run], const Scalar* from, Place position) {
  constexpr int four = run < 4 ? run : 4;
#pragma unroll
  for (int i = 0; i < run; i += four) {
    const Vector<Scalar, four> values = load_vector<four>(from + position(i));
#pragma unroll
    for (int j = 0; j < four; ++j) to[i + j] = values[j];
  }
}

template <class Config, class Scalar>
struct SimtShared {
  using Partial = PartialTile<Config::contractions, Config::tokens, Config::rows, 1>;
  static constexpr int x_stride = Config::tokens + 4, w_stride = Config::rows + 4;
  static constexpr int stage = Config::depth * (x_stride + Config::contractions * w_stride);
  static constexpr int main = 2 * stage > Partial::floats ? 2 * stage : Partial::floats;  // in scalars
  static constexpr int bytes = (main + inbox_floats<SimtBlock<Config>>()) * int(sizeof(Scalar));
};

// The mainloop; its parameters are those of mma_gemm in gemm_mma.cuh.
template <class Config, class X, class Weight, class Epilogue>
JITGEN_DEVICE void simt_gemm(unsigned char* shared, const X& x, int M, int N, int K,
                             const Weight (&weights)[Config::contractions], const Epilogue& epilogue, int m_block,
                             int n_block) {
  using Scalar = typename X::Scalar;
  using Block = SimtBlock<Config>;
  using Shared = SimtShared<Config, Scalar>;
  constexpr int C = Config::contractions, A = Config::token_run, B = Config::row_run, depth = Config::depth;
  constexpr int across = Config::rows / B;
  const uint32_t rank = Config::cluster > 1 ? block_of_cluster() : 0;
  if constexpr (Config::cluster > 1) waits_begin<true>();
  if constexpr (Config::cluster > 1) cluster_arrive_relaxed();

  const int m0 = m_block * Config::tokens, n0 = n_block * Config::rows;
  const int steps = (K + depth - 1) / depth, per_block = (steps + Config::cluster - 1) / Config::cluster;
  const int first = int(rank) * per_block, last = smaller(first + per_block, steps);
  const int my_row = threadIdx.x % across, my_token = threadIdx.x / across;
  Scalar* const memory = reinterpret_cast<Scalar*>(shared);

  typename X::template Tile<Config::tokens, depth, Block::threads> x_tile;
  typename Weight::template Tile<Config::rows, depth, Block::threads> w_tiles[C];
  auto load = [&](int step) {
    x_tile.load(x, m0, M, step * depth, K);
#pragma unroll
    for (int c = 0; c < C; ++c) w_tiles[c].load(weights[c], n0, N, step * depth, K);
  };
  auto store = [&](Scalar* to) {
    x_tile.template store<Shared::x_stride>(to);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      w_tiles[c].template store<Shared::w_stride>(to + depth * (Shared::x_stride + c * Shared::w_stride));
    }
  };

  Scalar acc[C][A][B];
#pragma unroll
  for (int i = 0; i < C * A * B; ++i) (&acc[0][0][0])[i] = Scalar(0);
  if (first < last) {
    load(first);
    store(memory);
  }
  __syncthreads();
#pragma unroll 1
  for (int step = first; step < last; ++step) {
    const Scalar* const from = memory + (step - first) % 2 * Shared::stage;
    if (step + 1 < last) load(step + 1);
#pragma unroll 16
    for (int k = 0; k < depth; ++k) {
      Scalar a[A], b[B];
      read_run<A>(a, from + k * Shared::x_stride, [&](int i) { return token_of<Config>(my_token, i); });
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const Scalar* const row = from + depth * (Shared::x_stride + c * Shared::w_stride) + k * Shared::w_stride;
        read_run<B>(b, row, [&](int j) { return row_of<Config>(my_row, j); });
#pragma unroll
        for (int i = 0; i < A; ++i) {
#pragma unroll
          for (int j = 0; j < B; ++j) acc[c][i][j] = multiply_add(a[i], b[j], acc[c][i][j]);
        }
      }
    }
    if (step + 1 < last) store(memory + (step - first + 1) % 2 * Shared::stage);
    __syncthreads();
  }

  using Tile = typename Shared::Partial;
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int i = 0; i < A; ++i) {
#pragma unroll
      for (int j = 0; j < B; ++j) {
        memory[Tile::place(0, c, token_of<Config>(my_token, i), row_of<Config>(my_row, j))] = acc[c][i][j];
      }
    }
  }
  finish<Block>(memory, memory + Shared::main, M, N, m0, n0, rank, epilogue);
}

}  // namespace jitgen
