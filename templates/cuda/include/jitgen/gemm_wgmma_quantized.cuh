// Quantised weights times many tokens on Hopper's wgmma: y[m, n] = sum_k x[m, k] W[n, k], the weight being operand A.
//
// A warpgroup takes 64 rows of the weight (output columns) at a time as wgmma's A from registers: the codes of the "mma"
// layout are already its fragments, so they are dequantised in registers and never stored as floats. x is operand B, in
// shared memory, brought by tensor copies. One warpgroup does nothing but copy; the consumers dequantise one k16
// step while the tensor cores work on the step before. (Weights as A from registers: Marlin and Machete.)
//
// How to call it, from an entry of Shape::threads threads, with Shape::bytes of dynamic shared memory:
//
//   struct Config {                          // measured choices: see the table in families/gemm's schedule
//     static constexpr int tokens = 128;     // of a tile: 16, 32, 64, 96, 128, 192, 256; one wgmma's n
//     static constexpr int warpgroups = 2;   // consumers
//     static constexpr int blocks = 2;       // of 64 weight rows per warpgroup; blocks * tokens <= 256
//     static constexpr int contractions = 1; // weights that share x and have equal N; divides blocks
//     static constexpr int regions = 1;      // weights of different N, each with its own outputs
//     static constexpr int stages = 8;       // of span chunks of 64 k's
//     static constexpr int span = 1;         // 1, if left out, or 2: less work per k, for codes of 4 bits
//     static constexpr int steps = 1;        // of 16 k's in a group of wgmmas: 1, 2; 2 takes more registers
//     static constexpr int split = 1;        // blocks of a cluster that share out k: 1 to 8
//     static constexpr int multicast = 1;    // blocks of a cluster that share x's tile: 1, 2, 4; not with split
//     static constexpr int raster = 16;      // row tiles walked before the next column tile
//     static constexpr int resident = 1;     // blocks a multiprocessor is to hold at once
//   };
//   using Shape = jitgen::QuantizedShape<Config, Weight>;                          // Weight: a QuantWeight
//   extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
//   entry(const __grid_constant__ jitgen::TensorMap x, const __grid_constant__ jitgen::TensorMap codes, ...) {
//     const jitgen::QuantizedRegion<Weight, Config::contractions> regions[] = {{{Weight{...}}, {&codes}, N}, ...};
//     jitgen::gemm_wgmma_quantized<Config, Weight>(x, M, K, regions, Epilogue{...});
//   }
//
// Tensor maps, outermost size first: x[M, K], box [tokens / multicast, 64], 128-byte swizzle; codes as 32-bit words,
// [tiles of 16 rows, chunks of 64 k's * 32 * bits], box [Shape::columns / 16, 32 * bits * span], no swizzle. So x has k-stride 1,
// starts on 16 bytes and its row stride is a multiple of 16 bytes. Scales and zero-points start on 16 bytes.
// Cluster: {max(split, multicast), 1, 1}. Grid: x only, a multiple of the cluster: at most Shape::items(...) * cluster,
// and for a persistent grid at most the blocks that are resident at once. Any such grid is right.
// The epilogue is called as run<8>(m, n, acc, live), or run<8>(region, m, n, acc, live) with several regions.
#pragma once

#include "jitgen/gemm_wgmma_decode.cuh"
#include "jitgen/gemm_wgmma_ptx.cuh"
#include "jitgen/gemm_wgmma_walk.cuh"

namespace jitgen {

template <class Weight, int contractions>
struct QuantizedRegion {
  Weight weights[contractions];
  const TensorMap* codes[contractions];
  int columns;  // N
};

template <class Config, class = void>
constexpr int span_of = 1;
template <class Config>
constexpr int span_of<Config, decltype(void(Config::span))> = Config::span;

template <class Config, class Weight>
struct QuantizedShape {
  static constexpr int consumers = Config::warpgroups * 128;
  static constexpr int threads = consumers + 128;  // one more warpgroup copies
  static constexpr int tiles = Config::warpgroups * Config::blocks * 4;  // of 16 weight rows, of all contractions
  static constexpr int columns = tiles * 16 / Config::contractions;      // of the output
  static constexpr int cluster = Config::split > Config::multicast ? Config::split : Config::multicast;

  // Of one stage.
  static constexpr int span = span_of<Config>;
  static constexpr int tile_bytes = 128 * Weight::bits * span;  // of codes
  static constexpr int x_bytes = Config::tokens * 128 * span;
  static constexpr int code_bytes = tiles * tile_bytes;
  static constexpr bool group_scales = Weight::group != 0;
  // k's of a stage that are of one group whatever the group size: all, 64 or 32.
  static constexpr int part = Weight::group % (64 * span) == 0 ? 64 * span : Weight::group % 64 == 0 ? 64 : 32;
  static constexpr int parts = 64 * span / part;
  static constexpr int scale_bytes = group_scales ? tiles * parts * 16 * int(sizeof(typename Weight::Scale)) : 0;
  static constexpr int zero_bytes = Weight::zero_points ? tiles * parts * 16 : 0;
  static constexpr int side_bytes = scale_bytes + zero_bytes;

  // That the layout has: K padded to whole groups, then to whole chunks.
  static JITGEN_DEVICE int groups(int depth) {
    constexpr int group = Weight::group == 0 ? 64 : Weight::group;
    const int padded = (depth + group - 1) / group * group;
    return Weight::group == 0 ? 1 : Weight::groups((padded + 63) / 64);
  }

  // For the epilogue: a warpgroup's [contractions][chunk][64 columns], rows 4 floats apart in banks.
  static constexpr int chunk = Config::tokens == 16 ? 16 : 32 / Config::contractions;  // tokens
  static constexpr int pitch = 68;
  static constexpr int staging_bytes = Config::split > 1 ? 0 : consumers / 128 * Config::contractions * chunk * pitch * 4;

  static constexpr int codes_at = Config::stages * x_bytes;
  static constexpr int side_at = codes_at + Config::stages * code_bytes;
  static constexpr int staging_at = side_at + Config::stages * side_bytes;
  static constexpr int barriers_at = staging_at + staging_bytes;
  static constexpr int bytes = barriers_at + Config::stages * 16;

  // With split k the partial sums, [contractions][tokens][columns], take the place of the stages.
  static constexpr int sum_pitch = columns + 4;
  static_assert(Config::split == 1 || Config::contractions * Config::tokens * sum_pitch * 4 <= staging_at,
                "partial sums fit where the stages were");
  static_assert(Config::blocks % Config::contractions == 0 && tiles <= 32, "a lane copies a tile");
  static_assert(Config::split == 1 || Config::multicast == 1, "a cluster has one purpose");
  static_assert(32 * Weight::bits * span <= 256, "a tensor copy's box");
  static_assert(Config::tokens % (8 * Config::multicast) == 0 && Config::tokens % chunk == 0, "tokens of a tile");
};

template <class Config, class Weight, class Epilogue>
struct QuantizedKernel {
  using Shape = QuantizedShape<Config, Weight>;
  using Element = typename Weight::Element;
  using Region = QuantizedRegion<Weight, Config::contractions>;
  using Multiply = Wgmma<Element, Config::tokens>;
  using Ring = StageRing<Config::stages>;
  static constexpr int blocks = Config::blocks;
  static constexpr int contractions = Config::contractions;
  static constexpr int contraction_blocks = blocks / contractions;
  static constexpr int contraction_tiles = Shape::tiles / contractions;
  static constexpr int parts = Shape::parts;
  static constexpr int span = Shape::span;
  static constexpr int band = Shape::columns * Config::multicast;  // columns of a cluster that shares x

  const TensorMap& x;
  const Region (&regions)[Config::regions];
  const Epilogue& epilogue;
  const int rows, chunks, row_tiles;  // chunks as long as a stage
  const int groups;   // of a row of the weight
  const int rank;     // in the cluster
  uint8_t* const memory;
  const uint32_t base;  // of memory

  JITGEN_DEVICE uint32_t full(int stage) const { return base + Shape::barriers_at + stage * 16; }
  JITGEN_DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }

  JITGEN_DEVICE TilePlace place(int item, int column_tiles) const {
    TilePlace tile = place_in<Config::raster, band>(item, row_tiles, column_tiles, regions);
    const int column = Config::multicast > 1 ? tile.column * Config::multicast + rank : tile.column;
    return {tile.region, tile.row * Config::tokens, column * Shape::columns};
  }
  JITGEN_DEVICE int first_chunk() const { return Config::split > 1 ? chunks * rank / Config::split : 0; }
  JITGEN_DEVICE int last_chunk() const { return Config::split > 1 ? chunks * (rank + 1) / Config::split : chunks; }

  // ------------------------------------------------------------------------------------------------------- producer

  // By two warps: one thread of the first starts the copies of x and the codes, the second copies scales and zero-points.
  JITGEN_DEVICE void produce(TilePlace tile, Ring& ring) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Region region = region_of(regions, tile.region);
    if (warp == 0 && lane == 0) {
      const uint64_t policy = row_tiles == 1 ? evict_first : keep_normal;
#pragma unroll 1
      for (int chunk = first_chunk(); chunk < last_chunk(); ++chunk, ring.next()) {
        const int stage = ring.stage;
        barrier_wait(empty(stage), ring.phase ^ 1);
        barrier_arrive_expect(full(stage), Shape::x_bytes + Shape::code_bytes);
#pragma unroll
        for (int i = 0; i < span; ++i) {
          const uint32_t to = base + stage * Shape::x_bytes + i * (Config::tokens * 128);
          const int column = (chunk * span + i) * 64;
          if constexpr (Config::multicast > 1) {
            constexpr int share = Config::tokens / Config::multicast, all = (1 << Config::multicast) - 1;
            copy_box_multicast(to + rank * share * 128, x, column, tile.row + rank * share, full(stage), all);
          } else {
            copy_box(to, x, column, tile.row, full(stage));
          }
        }
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
          constexpr int words = Shape::tile_bytes / 4;
          const uint32_t to = base + Shape::codes_at + stage * Shape::code_bytes + c * (Shape::code_bytes / contractions);
          copy_box(to, *region.codes[c], chunk * words, tile.column / 16, full(stage), policy);
        }
      }
    } else if (Shape::side_bytes > 0 && warp == 1) {
      const int first_tile = tile.column / 16;
      const int live = smaller(contraction_tiles, (region.columns + 15) / 16 - first_tile);
#pragma unroll 1
      for (int chunk = first_chunk(); chunk < last_chunk(); ++chunk, ring.next()) {
        const int stage = ring.stage;
        barrier_wait(empty(stage), ring.phase ^ 1);
        copy_side(region, first_tile, live, chunk, base + Shape::side_at + stage * Shape::side_bytes);
        barrier_arrive_on_copies(full(stage));
      }
    }
    __syncwarp();
  }

  static JITGEN_DEVICE Weight weight_of(const Region& region, int contraction) {
    Weight weight = region.weights[0];
#pragma unroll
    for (int c = 1; c < contractions; ++c) {
      if (contraction == c) weight = region.weights[c];
    }
    return weight;
  }

  // A chunk's scales and zero-points, in pieces of 16 bytes: [part][tile][16 rows] each.
  JITGEN_DEVICE void copy_side(const Region& region, int first_tile, int live, int chunk, uint32_t to) const {
    using Scale = typename Weight::Scale;
    constexpr int pieces = int(sizeof(Scale));  // of a tile's scales
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int k = chunk * (64 * span) + part * Shape::part;
      const int group = Weight::group == 0 ? 0 : smaller(k / (Weight::group ? Weight::group : 1), groups - 1);
      if constexpr (Shape::group_scales) {
#pragma unroll
        for (int i = 0; i < Shape::tiles * pieces; i += 32) {
          const int tile = (i + lane) / pieces, piece = lane % pieces;
          const int in_contraction = tile % contraction_tiles;
          if (tile < Shape::tiles && in_contraction < live) {
            const Weight weight = weight_of(region, tile / contraction_tiles);
            const int64_t at = (int64_t(first_tile + in_contraction) * groups + group) * 16;
            copy_async<16>(to + (part * Shape::tiles * pieces + i + lane) * 16,
                           reinterpret_cast<const uint8_t*>(weight.scales + at) + piece * 16, 16);
          }
        }
      }
      if constexpr (Weight::zero_points) {
        const int in_contraction = lane % contraction_tiles;
        if (lane < Shape::tiles && in_contraction < live) {
          const Weight weight = weight_of(region, lane / contraction_tiles);
          const int64_t at = (int64_t(first_tile + in_contraction) * groups + group) * 16;
          copy_async<16>(to + Shape::scale_bytes + (part * Shape::tiles + lane) * 16, weight.zeros + at, 16);
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------- consumers

  struct Fetched {  // what a lane reads of one stage
    typename Weight::Codes codes[blocks][span];
    typename Weight::Scales scales[blocks][parts];  // the first of each
  };
  struct Held {  // and has made ready
    typename Weight::Codes codes[blocks][span];
    Decode<Weight> decode[blocks][parts];
    JITGEN_DEVICE void take(const Fetched& fetched) {
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
#pragma unroll
        for (int i = 0; i < span; ++i) codes[b][i] = fetched.codes[b][i];
#pragma unroll
        for (int part = 0; part < parts; ++part) decode[b][part].set(fetched.scales[b][part]);
      }
    }
  };

  static JITGEN_DEVICE int tile_of(int warpgroup, int block) {  // the warpgroup's first, of the block's 64 rows
    return block / contraction_blocks * contraction_tiles +
           (warpgroup * contraction_blocks + block % contraction_blocks) * 4;
  }

  // A lane's place in a stage, of block 0; kept, as the compiler would work it out again for each stage.
  struct Lane {
    uint32_t codes, side;
    JITGEN_DEVICE Lane() {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const int tile = tile_of(warp / 4, 0) + warp % 4;
      codes = Shape::codes_at + tile * Shape::tile_bytes + lane * 16;
      side = Shape::side_at + (tile * 16 + lane / 4 * 2);
      asm("" : "+r"(codes), "+r"(side));
    }
  };

  JITGEN_DEVICE void fetch(Fetched& fetched, const Lane& lane, int stage) const {
    using Pair = typename Weight::ScalePair;
    constexpr int width = sizeof(typename Weight::Scale);
    const uint8_t* const codes = memory + lane.codes + stage * Shape::code_bytes;
    // Scales are `width` times as far from the area's start as zero-points.
    const uint8_t* const zeros = memory + lane.side + stage * Shape::side_bytes;
    const uint8_t* const scales = zeros + (lane.side - Shape::side_at) * (width - 1);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int tile = tile_of(0, b) - tile_of(0, 0);
#pragma unroll
      for (int i = 0; i < span * Weight::loads; ++i) {
        const uint8_t* const from = codes + tile * Shape::tile_bytes + i * 512;
        fetched.codes[b][i / Weight::loads].words[i % Weight::loads] = *reinterpret_cast<const uint4*>(from);
      }
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        const int at = (part * Shape::tiles + tile) * 16;
        if constexpr (Weight::zero_points) {
          fetched.scales[b][part].zero[0] = *reinterpret_cast<const uint16_t*>(zeros + Shape::scale_bytes + at);
        }
        if constexpr (Shape::group_scales) {
          fetched.scales[b][part].scale[0] = *reinterpret_cast<const Pair*>(scales + at * width);
        }
      }
    }
  }

  using Fragments = uint32_t[Config::steps][blocks][4];

  static JITGEN_DEVICE void dequantise(Fragments& fragments, const Held& held, int group) {
#pragma unroll
    for (int s = 0; s < Config::steps; ++s) {
      const int step = group * Config::steps + s;
      const int part = step * 16 / Shape::part;
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        held.decode[b][part].fragment(fragments[s][b], held.codes[b][step / 4], step % 4);
      }
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

  JITGEN_DEVICE void consume(float (&acc)[blocks][Config::tokens / 2], Ring& ring) const {
    const int first = first_chunk(), last = last_chunk();
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
#pragma unroll
      for (int i = 0; i < Config::tokens / 2; ++i) acc[b][i] = 0.0f;
    }
    if (first == last) return;
    constexpr int groups = 4 * span / Config::steps;  // of wgmmas, of a stage
    const Lane lane;
    Fetched fetched;
    Held held;
    Fragments fragments[2];
    barrier_wait(full(ring.stage), ring.phase);
    fetch(fetched, lane, ring.stage);
    held.take(fetched);
    dequantise(fragments[0], held, 0);
    int before = 0;
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      const int stage = ring.stage;
      const uint64_t tokens = descriptor_k_major(base + stage * Shape::x_bytes);
      ring.next();
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < Config::steps; ++s) {
#pragma unroll
          for (int b = 0; b < blocks; ++b) {
            const int step = group * Config::steps + s;
            const uint64_t at = tokens + step / 4 * (Config::tokens * 128 / 16) + step % 4 * 2;
            Multiply::registers(acc[b], fragments[group & 1][s][b], at, 1);
          }
        }
        wgmma_commit();
        if (group == groups - 2 && chunk + 1 < last) {
          barrier_wait(full(ring.stage), ring.phase);
          fetch(fetched, lane, ring.stage);
        }
        if (group == groups - 1) held.take(fetched);
        wgmma_wait<1>();  // the group before has read its fragments, which take the group after
        if (group == 0 && chunk > first) release(before);
        dequantise(fragments[(group + 1) & 1], held, (group + 1) % groups);
      }
      before = stage;
    }
    wgmma_wait<0>();
    release(before);
  }

  // -------------------------------------------------------------------------------------------------------- epilogue

  JITGEN_DEVICE void run(const TilePlace& tile, int m, int n, const float (&acc)[contractions][8], int columns) const {
    const int live = smaller(8, columns - n);
    if (m >= rows || live <= 0) return;
    run_epilogue<(Config::regions > 1)>(epilogue, tile.region, m, n, acc, live);
  }

  // With one scale per row the sums take it, in float.
  JITGEN_DEVICE void scale_rows(float (&acc)[blocks][Config::tokens / 2], const TilePlace& tile, const Region& region) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int t = tile.column / 16 + tile_of(warp / 4, b) % contraction_tiles + warp % 4;
      float2 scale = {0.0f, 0.0f};
      if (t * 16 < region.columns) {
        const auto from = region.weights[b / contraction_blocks].scales + int64_t(t) * 16 + lane / 4 * 2;
        scale = unpack_pair(__ldg(reinterpret_cast<const typename Weight::ScalePair*>(from)));
        scale.x *= Decode<Weight>::shrunk;
        scale.y *= Decode<Weight>::shrunk;
      }
#pragma unroll
      for (int i = 0; i < Config::tokens / 2; ++i) acc[b][i] *= i % 4 < 2 ? scale.x : scale.y;
    }
  }

  // The sums of tokens first .. first + count to [token][column] at `to`, this lane's part of one block's 64 columns.
  template <int first, int count, int pitch>
  static JITGEN_DEVICE void spread(float* to, const float (&acc)[Config::tokens / 2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float* const corner = to + lane % 4 * 2 * pitch + warp * 16 + lane / 4;
    constexpr float grown = Shape::group_scales ? Decode<Weight>::shrunk : 1.0f;
#pragma unroll
    for (int i = 0; i < count / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) corner[(i * 8 + j % 2) * pitch + j / 2 * 8] = acc[(first / 8 + i) * 4 + j] * grown;
    }
  }

  JITGEN_DEVICE void finish(const TilePlace& tile, const float (&acc)[blocks][Config::tokens / 2], int columns) const {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch, area = chunk * pitch;
    const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
    float* const staging = reinterpret_cast<float*>(memory + Shape::staging_at) + warpgroup * contractions * area;
#pragma unroll 1
    for (int turn = 0; turn < contraction_blocks * (Config::tokens / chunk); ++turn) {
      const int row = tile.row + turn % (Config::tokens / chunk) * chunk;
      if (row >= rows) continue;
      group_barrier<128>(1 + warpgroup);
      unrolled<0>(turn, staging, acc);
      group_barrier<128>(1 + warpgroup);
      const int block = turn / (Config::tokens / chunk);
      const int column = tile.column + (warpgroup * contraction_blocks + block) * 64 + thread % 8 * 8;
#pragma unroll
      for (int i = 0; i < chunk / 16; ++i) {
        const int token = i * 16 + thread / 8;
        float sums[contractions][8];
#pragma unroll
        for (int c = 0; c < contractions; ++c) gather(sums[c], staging + c * area + token * pitch + thread % 8 * 8);
        run(tile, row + token, column, sums, columns);
      }
    }
  }
  // Accumulators have constant places only: every turn's stores, of which the one in turn happen.
  template <int turn>
  static JITGEN_DEVICE void unrolled(int wanted, float* staging, const float (&acc)[blocks][Config::tokens / 2]) {
    constexpr int turns = Config::tokens / Shape::chunk;
    if constexpr (turn < contraction_blocks * turns) {
      if (wanted == turn) {
#pragma unroll
        for (int c = 0; c < contractions; ++c) {
          spread<turn % turns * Shape::chunk, Shape::chunk, Shape::pitch>(
              staging + c * Shape::chunk * Shape::pitch, acc[c * contraction_blocks + turn / turns]);
        }
      }
      unrolled<turn + 1>(wanted, staging, acc);
    }
  }

  // Split k: each block leaves its sums in its shared memory; block r adds up its share of them, in rank order.
  JITGEN_DEVICE void leave(const float (&acc)[blocks][Config::tokens / 2]) const {
    constexpr int pitch = Shape::sum_pitch;
    group_barrier<Shape::consumers>(1);  // nobody reads the stages any more
    float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int column = tile_of(threadIdx.x / 128, b) % contraction_tiles * 16;
      spread<0, Config::tokens, pitch>(sums + b / contraction_blocks * Config::tokens * pitch + column, acc[b]);
    }
  }
  JITGEN_DEVICE void finish_split(const TilePlace& tile, int columns) const {
    constexpr int pitch = Shape::sum_pitch, width = Shape::columns / 8;
    const int runs = smaller(rows - tile.row, Config::tokens) * width;  // of 8 columns
    const int last = runs * (rank + 1) / Config::split;
#pragma unroll 1
    for (int i = runs * rank / Config::split + threadIdx.x; i < last; i += Shape::consumers) {
      const int token = i / width, column = i % width * 8;
      float sums[contractions][8];
#pragma unroll
      for (int c = 0; c < contractions; ++c) {
        const uint32_t at = base + ((c * Config::tokens + token) * pitch + column) * 4;
        float4 low[Config::split], high[Config::split];
#pragma unroll
        for (int r = 0; r < Config::split; ++r) {
          low[r] = load_remote(at, r);
          high[r] = load_remote(at + 16, r);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[c][j] = 0.0f;
#pragma unroll
        for (int r = 0; r < Config::split; ++r) {
          sums[c][0] += low[r].x, sums[c][1] += low[r].y, sums[c][2] += low[r].z, sums[c][3] += low[r].w;
          sums[c][4] += high[r].x, sums[c][5] += high[r].y, sums[c][6] += high[r].z, sums[c][7] += high[r].w;
        }
      }
      run(tile, tile.row + token, tile.column + column, sums, columns);
    }
  }

  // ------------------------------------------------------------------------------------------------------------ all

  JITGEN_DEVICE void work() const {
    const int column_tiles = column_tiles_of<band>(regions);
    const int items = row_tiles * column_tiles;
    const int step = gridDim.x / Shape::cluster;
    Ring ring;
    if (threadIdx.x >= Shape::consumers) {
      registers_deal<Config::warpgroups, Config::resident, true>();
      for (int item = blockIdx.x / Shape::cluster; item < items; item += step) {
        produce(place(item, column_tiles), ring);
        if constexpr (Config::split > 1) {
          __syncwarp();
          cluster_sync();
          cluster_sync();
        }
      }
      __syncwarp();
    } else {
      registers_deal<Config::warpgroups, Config::resident, false>();
      for (int item = blockIdx.x / Shape::cluster; item < items; item += step) {
        const TilePlace tile = place(item, column_tiles);
        float acc[blocks][Config::tokens / 2];
        consume(acc, ring);
        const Region region = region_of(regions, tile.region);
        if constexpr (!Shape::group_scales) scale_rows(acc, tile, region);
        if constexpr (Config::split > 1) {
          leave(acc);
          cluster_sync();
          finish_split(tile, region.columns);
          proxy_fence();
          __syncwarp();
          cluster_sync();
        } else {
          finish(tile, acc, region.columns);
        }
      }
      __syncwarp();
    }
    if constexpr (Config::multicast > 1) cluster_sync();  // no block ends while another may write to it
  }
};

template <class Config, class Weight, class Epilogue>
JITGEN_DEVICE void gemm_wgmma_quantized(
    const TensorMap& x, int rows, int depth, const QuantizedRegion<Weight, Config::contractions> (&regions)[Config::regions],
    const Epilogue& epilogue) {
  using Shape = QuantizedShape<Config, Weight>;
  extern __shared__ __align__(1024) uint8_t gemm_memory[];
  const QuantizedKernel<Config, Weight, Epilogue> kernel{
      x, regions, epilogue, rows, (depth + 64 * Shape::span - 1) / (64 * Shape::span), (rows + Config::tokens - 1) / Config::tokens,
      Shape::groups(depth), Shape::cluster > 1 ? cluster_rank() : 0, gemm_memory, shared_address(gemm_memory)};
  if (threadIdx.x == 0) {
    prefetch_map(x);
    for (int c = 0; c < Config::contractions; ++c) prefetch_map(*regions[0].codes[c]);
    for (int stage = 0; stage < Config::stages; ++stage) {
      barrier_init(kernel.full(stage), 1 + (Shape::side_bytes > 0 ? 32 : 0));
      barrier_init(kernel.empty(stage), Config::warpgroups * 4 * Config::multicast);
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
