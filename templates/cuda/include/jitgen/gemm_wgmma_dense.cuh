// bfloat16 and float16 matmul on Hopper's wgmma, both operands from shared memory: y[m, n] = sum_k x[m, k] W[n, k].
//
// A copying warp keeps a ring of stages of 64 k's full by tensor copies; consumer warpgroups run wgmma on it, each on
// its own rows or columns of the tile. Blocks stay and walk tiles, so that a tile's first stages arrive during the
// epilogue of the one before. Blocks of a cluster take tiles one below the other and share the weight's tile, each
// bringing a part of it for all, which takes load off L2. (The plan is CUTLASS's cooperative warp-specialised kernel's.)
//
// How to call it, from an entry of Shape::threads threads, with Shape::bytes of dynamic shared memory:
//
//   struct Config {
//     using Element = jitgen::bfloat16;       // of x and the weights: bfloat16 or float16
//     static constexpr int down = 2;          // consumer warpgroups below each other, of 64 rows each
//     static constexpr int across = 1;        // and side by side
//     static constexpr int columns = 256;     // of a tile, per contraction; columns / across is one wgmma's n: 32, 64,
//                                             // 96, 128, 192, 256; times contractions at most 256
//     static constexpr int contractions = 1;  // weights that share x and have equal N
//     static constexpr int regions = 1;       // weights of different N, each with its own outputs
//     static constexpr int stages = 4;        // of 64 k's
//     static constexpr int multicast = 2;     // blocks of a cluster: 1, 2, 4
//     static constexpr bool transposed = false;  // weights lie as [K, N], n-stride 1
//     static constexpr bool trimmed = false;  // x's box has no more rows than x. May be left out
//     static constexpr int raster = 8;        // clusters of row tiles walked before the next column tile
//     static constexpr int resident = 1;      // blocks a multiprocessor is to hold at once
//   };
//   using Shape = jitgen::DenseShape<Config>;
//   extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
//   entry(const __grid_constant__ jitgen::TensorMap x, const __grid_constant__ jitgen::TensorMap w, ...) {
//     const jitgen::DenseRegion<Config::contractions> regions[] = {{{&w}, N}};
//     jitgen::gemm_wgmma_dense<Config>(x, M, K, regions, Epilogue{...});
//   }
//
// Tensor maps, outermost size first, 128-byte swizzle: x[M, K], box [64 * down, 64]; a weight [N, K], box [columns /
// multicast, 64]; a transposed one [K, N], box [64, 64]. So each matrix starts on 16 bytes, has stride 1 along its rows
// and a row stride that is a multiple of 16 bytes.
// Cluster: {multicast, 1, 1}. Grid: x only, a multiple of the cluster. Any such grid is right; best is as many blocks
// as are resident at once, or tiles times the cluster if those are fewer.
// The epilogue is called as run<8>(m, n, acc, live), or run<8>(region, m, n, acc, live) with several regions.
#pragma once

#include "jitgen/gemm_wgmma_ptx.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"

namespace jitgen {

template <int contractions>
struct DenseRegion {
  const TensorMap* weights[contractions];
  int columns;  // N
};

template <class Config>
struct DenseShape {
  static constexpr int warpgroups = Config::down * Config::across;
  static constexpr int consumers = warpgroups * 128;
  static constexpr int threads = consumers + 128;  // one more warpgroup copies
  static constexpr int rows = Config::down * 64;
  static constexpr int width = Config::columns / Config::across;  // of a warpgroup

  static constexpr int x_bytes = rows * 128;
  static constexpr int weight_bytes = Config::columns * 128;
  static constexpr int stage_bytes = x_bytes + weight_bytes * Config::contractions;

  // For the epilogue: a warp's [contractions][16 rows][chunk columns], rows 8 floats apart in banks.
  static constexpr int chunk = 32 / Config::contractions;
  static constexpr int pitch = chunk + 8;
  static constexpr int staging_bytes = consumers / 32 * Config::contractions * 16 * pitch * 4;

  static constexpr int staging_at = Config::stages * stage_bytes;
  static constexpr int barriers_at = staging_at + staging_bytes;
  static constexpr int bytes = barriers_at + Config::stages * 16;

  static_assert(width % chunk == 0 && width * Config::contractions <= 256, "accumulators of a thread");
  static_assert(Config::columns % (Config::multicast * (Config::transposed ? 64 : 8)) == 0, "shares of a weight's tile");
  static_assert(!Config::transposed || width % 64 == 0, "a transposed operand lies in runs of 64 columns");
};

template <class Config, class Epilogue>
struct DenseKernel {
  using Shape = DenseShape<Config>;
  using Region = DenseRegion<Config::contractions>;
  using Multiply = Wgmma<typename Config::Element, Shape::width>;
  using Ring = StageRing<Config::stages>;
  static constexpr int contractions = Config::contractions;
  static constexpr int accumulators = Shape::width / 2;

  const TensorMap& x;
  const Region (&regions)[Config::regions];
  const Epilogue& epilogue;
  const int rows, chunks, row_tiles;  // row tiles in clusters
  const int rank;                     // in the cluster
  uint8_t* const memory;
  const uint32_t base;  // of memory

  JITGEN_DEVICE uint32_t full(int stage) const { return base + Shape::barriers_at + stage * 16; }
  JITGEN_DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }
  JITGEN_DEVICE uint32_t x_at(int stage) const { return base + stage * Shape::stage_bytes; }
  JITGEN_DEVICE uint32_t weight_at(int stage, int contraction) const {
    return x_at(stage) + Shape::x_bytes + contraction * Shape::weight_bytes;
  }

  JITGEN_DEVICE TilePlace place(int item, int column_tiles) const {
    TilePlace tile = place_in<Config::raster, Config::columns>(item, row_tiles, column_tiles, regions);
    const int row = (Config::multicast > 1 ? tile.row * Config::multicast + rank : tile.row) * Shape::rows;
    return {tile.region, row, tile.column * Config::columns};
  }

  // By one thread.
  JITGEN_DEVICE void produce(const TilePlace& tile, Ring& ring) const {
    constexpr uint16_t all = (1 << Config::multicast) - 1;
    const Region region = region_of(regions, tile.region);
    const int copied = is_trimmed<Config> ? smaller(rows, Shape::rows) : Shape::rows;
    const int bytes = copied * 128 + Shape::weight_bytes * contractions;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, ring.next()) {
      const int stage = ring.stage;
      barrier_wait_in_place(empty(stage), ring.phase ^ 1);
      barrier_arrive_expect(full(stage), bytes);
      copy_box(x_at(stage), x, chunk * 64, tile.row, full(stage));
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        const TensorMap& map = *region.weights[c];
        if constexpr (Config::transposed) {
#pragma unroll
          for (int i = 0; i < Config::columns / 64 / Config::multicast; ++i) {
            const int share = i * Config::multicast + rank;  // 64 columns each
            const uint32_t to = weight_at(stage, c) + share * 8192;
            copy_shared(to, map, tile.column + share * 64, chunk * 64, full(stage), all);
          }
        } else {
          constexpr int share = Config::columns / Config::multicast;
          const uint32_t to = weight_at(stage, c) + rank * (share * 128);
          copy_shared(to, map, chunk * 64, tile.column + rank * share, full(stage), all);
        }
      }
    }
  }
  static JITGEN_DEVICE void copy_shared(
      uint32_t to, const TensorMap& map, int column, int row, uint32_t barrier, uint16_t mask) {
    if constexpr (Config::multicast > 1) {
      copy_box_multicast(to, map, column, row, barrier, mask);
    } else {
      copy_box(to, map, column, row, barrier);
    }
  }

  JITGEN_DEVICE void release(int stage) const {  // by each consumer warp, to every block that writes into the stage
    const int lane = threadIdx.x % 32;
    if constexpr (Config::multicast > 1) {
      if (lane < Config::multicast) barrier_arrive_at(empty(stage), lane);
    } else {
      if (lane == 0) barrier_arrive(empty(stage));
    }
  }

  JITGEN_DEVICE void consume(float (&acc)[contractions][accumulators], Ring& ring) const {
    const int warpgroup = threadIdx.x / 128;
    const int down = warpgroup % Config::down, across = warpgroup / Config::down;
#pragma unroll
    for (int c = 0; c < contractions; ++c) {
#pragma unroll
      for (int i = 0; i < accumulators; ++i) acc[c][i] = 0.0f;
    }
    int before = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int stage = ring.stage;
      barrier_wait_in_place(full(stage), ring.phase);
      const uint64_t a = descriptor_k_major(x_at(stage) + down * 8192);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
          const uint32_t at = weight_at(stage, c) + across * (Shape::width * 128);
          if constexpr (Config::transposed) {
            Multiply::template shared<1>(acc[c], a + step * 2, descriptor_transposed(at, 8192) + step * 128, 1);
          } else {
            Multiply::template shared<0>(acc[c], a + step * 2, descriptor_k_major(at) + step * 2, 1);
          }
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk > 0) release(before);
      before = stage;
      ring.next();
    }
    wgmma_wait<0>();
    if (chunks > 0) release(before);
  }

  JITGEN_DEVICE void finish(const TilePlace& tile, const float (&acc)[contractions][accumulators], int columns) const {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch, runs = chunk / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
    const int row = tile.row + warpgroup % Config::down * 64 + warp % 4 * 16;
    const int first = tile.column + warpgroup / Config::down * Shape::width;
    float* const staging = reinterpret_cast<float*>(memory + Shape::staging_at) + warp * contractions * 16 * pitch;
    if (row >= rows) return;
#pragma unroll 1
    for (int turn = 0; turn < Shape::width / chunk; ++turn) {
      if (first + turn * chunk >= columns) break;
      __syncwarp();
      spread<0>(turn, staging, acc);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 16 * runs; i += 32) {
        const int m = (i + lane) / runs, n = first + turn * chunk + lane % runs * 8;
        float sums[contractions][8];
#pragma unroll
        for (int c = 0; c < contractions; ++c) gather(sums[c], staging + (c * 16 + m) * pitch + lane % runs * 8);
        const int live = smaller(8, columns - n);
        if (row + m >= rows || live <= 0) continue;
        run_epilogue<(Config::regions > 1)>(epilogue, tile.region, row + m, n, sums, live);
      }
    }
  }
  // Accumulators have constant places only: every turn's stores, of which the one in turn happen.
  template <int turn>
  static JITGEN_DEVICE void spread(int wanted, float* staging, const float (&acc)[contractions][accumulators]) {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch;
    if constexpr (turn < Shape::width / chunk) {
      if (wanted == turn) {
        const int lane = threadIdx.x % 32;
        float* const corner = staging + lane / 4 * pitch + lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
#pragma unroll
          for (int i = 0; i < chunk / 8; ++i) {
            const float* const from = acc[c] + (turn * (chunk / 8) + i) * 4;
            float* const to = corner + c * 16 * pitch + i * 8;
            *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
            *reinterpret_cast<float2*>(to + 8 * pitch) = make_float2(from[2], from[3]);
          }
        }
      }
      spread<turn + 1>(wanted, staging, acc);
    }
  }

  JITGEN_DEVICE void work() const {
    const int column_tiles = column_tiles_of<Config::columns>(regions);
    const int items = row_tiles * column_tiles;
    const int step = gridDim.x / Config::multicast;
    Ring ring;
    if (threadIdx.x >= Shape::consumers) {
      registers_deal<Shape::warpgroups, Config::resident, true>();
      if (threadIdx.x == Shape::consumers) {
        for (int item = blockIdx.x / Config::multicast; item < items; item += step) {
          produce(place(item, column_tiles), ring);
        }
      }
      __syncwarp();
    } else {
      registers_deal<Shape::warpgroups, Config::resident, false>();
      for (int item = blockIdx.x / Config::multicast; item < items; item += step) {
        const TilePlace tile = place(item, column_tiles);
        float acc[contractions][accumulators];
        consume(acc, ring);
        finish(tile, acc, columns_of(regions, tile.region));
      }
      __syncwarp();
    }
    if constexpr (Config::multicast > 1) cluster_sync();  // no block ends while another may write to it
  }
};

template <class Config, class Epilogue>
JITGEN_DEVICE void gemm_wgmma_dense(
    const TensorMap& x, int rows, int depth, const DenseRegion<Config::contractions> (&regions)[Config::regions],
    const Epilogue& epilogue) {
  using Shape = DenseShape<Config>;
  extern __shared__ __align__(1024) uint8_t gemm_memory[];
  constexpr int band = Shape::rows * Config::multicast;
  const DenseKernel<Config, Epilogue> kernel{
      x, regions, epilogue, rows, (depth + 63) / 64, (rows + band - 1) / band,
      Config::multicast > 1 ? cluster_rank() : 0, gemm_memory, shared_address(gemm_memory)};
  if (threadIdx.x == 0) {
    prefetch_map(x);
    for (int stage = 0; stage < Config::stages; ++stage) {
      barrier_init(kernel.full(stage), 1);
      barrier_init(kernel.empty(stage), Shape::consumers / 32 * Config::multicast);
    }
    barrier_init_fence();
  }
  if constexpr (Config::multicast > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  // All blocks are resident, so those of the next kernel take nothing from them.
  next_kernel_may_start();
  previous_kernel_wait();
  kernel.work();
}

}  // namespace jitgen
