// Attention of few rows to many keys, a decoder's step, on mma.sync: for each row, sum_n exp(s[n] - max s) v[n], with s[n]
// a rule of q . k[n]. Its time is that of reading keys and values once.
//
// A warp takes 16 keys of a tile, and reads them and their values from memory into registers, 16 bytes a lane, as operands
// of products: nothing passes through shared memory. Keys are the rows of the first product and rows of the query its
// columns, of which there may be as few as 8; so are the elements of a value in the second one, whose right operand are
// the transposed probabilities. The dimension that a product sums over, and the rows of its result, may be in any order,
// so that each lane's 16 bytes are neighbours in memory. The next tile's keys are asked for as soon as this tile's have been
// multiplied, the next values after these: the registers of a multiprocessor hold all that is on its way.
//
// The warps of a block take a tile's keys, and the blocks of a cluster, and ranges of other blocks, share the tiles that
// masks leave. What warps have is added up in their order; then each block of a cluster gets its share of the columns of
// all blocks, in its shared memory, and adds it up by rank.
//
//   struct Config {
//     using Key = jitgen::bfloat16;           // of keys, and the query is rounded to it: bfloat16 or float16
//     using Value = jitgen::bfloat16;         // of values, and probabilities are rounded to it
//     static constexpr int warps = 8;         // of a block
//     static constexpr int row_tiles = 1;     // rows of a block, in eights
//     static constexpr int ahead = 2;         // tiles of a warp in registers
//     static constexpr int depth = 128;       // of a key, rounded up to a multiple of 32
//     static constexpr int width = 128;       // of a value, rounded up to a multiple of 64
//     static constexpr int most_splits = 8;   // blocks of a cluster, at most
//     static constexpr bool whole;            // whether depth and width are what they are rounded to
//     static constexpr bool masked;           // whether a mask may hide a tile
//   };
//
// `Operands` is generated (attention.cu.j2): where everything is, the rule of scores, and the results. Lane 4g+t has the
// scores of keys g and g + 8 and of rows 2t and 2t + 1.
#pragma once

#include "jitgen/attention_decode_results.cuh"
#include "jitgen/attention_walk.cuh"
#include "jitgen/types.cuh"

namespace jitgen {

// The tiles of keys that there are for a block of rows: all, or those that a mask in memory shows (attention_shown.cuh).
struct AllKeys {
  template <int tile_keys, class Operands>
  static JITGEN_DEVICE TileRange tiles(
      const Operands& operands, const typename Operands::Task&, const typename Operands::Block&) {
    return {0, int((operands.keys + tile_keys - 1) / tile_keys)};
  }
};

template <class Config, class Operands, class Extent = AllKeys>
struct DecodeKernel : DecodeResults<Config, Operands> {
  using Results = DecodeResults<Config, Operands>;
  using Shape = DecodeShape<Config>;
  using Task = typename Operands::Task;
  using Rows = typename Results::Rows;
  using Sums = typename Results::Sums;
  using Tiles = Select<Config::masked, MaskedTiles<1>, AllTiles<1>>;
  using Results::finish;
  using Results::leave;
  using Results::operands;
  using Results::own_rows;
  using Results::rank;
  using Results::row_tiles;
  using Results::splits;
  using Results::value_runs;
  static constexpr int key_runs = Config::depth / 32;

  struct Query {
    uint4 runs[row_tiles][key_runs];
  };
  struct Keys {
    typename Operands::KeyRow rows[2];
    typename Operands::KeyRun runs[2][key_runs];
  };
  struct Values {
    typename Operands::ValueRow rows[4];
    typename Operands::ValueRun runs[4][value_runs];
  };

  // ------------------------------------------------------------------------------------------------------- reading

  JITGEN_DEVICE int key_limit() const { return int(operands.keys) - 1; }
  JITGEN_DEVICE void read_query(Query& query, const Task& task, int first) const {
    const int lane = threadIdx.x % 32, rows = int(operands.packed_rows());
#pragma unroll
    for (int tile = 0; tile < row_tiles; ++tile) {
      const int row = first + tile * 8 + lane / 4;
#pragma unroll
      for (int run = 0; run < key_runs; ++run) {
        const int d = run * 32 + lane % 4 * 8;
        const bool live = row < rows && (Config::whole || d < int(operands.depth));
        query.runs[tile][run] = live ? operands.query_run(task, row, d) : uint4{0u, 0u, 0u, 0u};
      }
    }
  }
  JITGEN_DEVICE void read_keys(Keys& keys, const Task& task, int first) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      keys.rows[half] = operands.key_row(task, smaller(first + half * 8 + lane / 4, key_limit()));
#pragma unroll
      for (int run = 0; run < key_runs; ++run) {
        const int d = run * 32 + lane % 4 * 8;
        keys.runs[half][run] = Config::whole || d < int(operands.depth) ? operands.key_run(keys.rows[half], d)
                                                                        : typename Operands::KeyRun{};
      }
    }
  }
  JITGEN_DEVICE void read_values(Values& values, const Task& task, int first) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + lane % 4 * 2 + i % 2 + i / 2 * 8;
      values.rows[i] = operands.value_row(task, smaller(key, key_limit()));
#pragma unroll
      for (int run = 0; run < value_runs; ++run) {
        const int e = run * 64 + lane / 4 * 8;
        values.runs[i][run] = Config::whole || e < int(operands.width) ? operands.value_run(values.rows[i], e)
                                                                       : typename Operands::ValueRun{};
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------- computing

  // scores[key, row] = sum_d key[d] query[d]: of each run of 32 d a lane has 8 neighbours, for two products.
  JITGEN_DEVICE void multiply_keys(float (&scores)[row_tiles * 4], const Keys& keys, const Query& query) const {
    float sums[row_tiles][4] = {};
#pragma unroll
    for (int run = 0; run < key_runs; ++run) {
      const uint4 low = operands.key_words(keys.rows[0], keys.runs[0][run]);
      const uint4 high = operands.key_words(keys.rows[1], keys.runs[1][run]);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int tile = 0; tile < row_tiles; ++tile) {
        const uint4 of_rows = query.runs[tile][run];
        multiply_add<typename Config::Key>(sums[tile], first, of_rows.x, of_rows.y, sums[tile]);
        multiply_add<typename Config::Key>(sums[tile], second, of_rows.z, of_rows.w, sums[tile]);
      }
    }
#pragma unroll
    for (int i = 0; i < row_tiles * 4; ++i) scores[i] = sums[i / 4][i % 4];
  }
  // sums[e, row] += sum_key value[e] probability: element e of two neighbouring keys makes one word.
  JITGEN_DEVICE void multiply_values(Sums& sums, const Values& values, const uint32_t (&probabilities)[row_tiles][2]) const {
#pragma unroll
    for (int run = 0; run < value_runs; ++run) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 run_words = operands.value_words(values.rows[i], values.runs[i][run]);
        words[i][0] = run_words.x, words[i][1] = run_words.y, words[i][2] = run_words.z, words[i][3] = run_words.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t of_elements[4] = {
            __byte_perm(words[0][j], words[1][j], 0x5410), __byte_perm(words[0][j], words[1][j], 0x7632),
            __byte_perm(words[2][j], words[3][j], 0x5410), __byte_perm(words[2][j], words[3][j], 0x7632)};
#pragma unroll
        for (int tile = 0; tile < row_tiles; ++tile) {
          multiply_add<typename Config::Value>(
              sums[run][j][tile], of_elements, probabilities[tile][0], probabilities[tile][1], sums[run][j][tile]);
        }
      }
    }
  }
  // One step of the online softmax: scores become probabilities, transposed, which are the right operand of the product
  // with values. Returns whether the base of one of the warp's rows has moved; then sums are to be multiplied with `scale`.
  JITGEN_DEVICE bool online_softmax(
      uint32_t (&probabilities)[row_tiles][2], float (&scores)[row_tiles * 4], Rows& rows, float (&scale)[own_rows],
      float factor) const {
    bool moves = false;
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
      float &low = scores[r / 2 * 4 + r % 2], &high = scores[r / 2 * 4 + r % 2 + 2];
      float row_max = fmaxf(rows.row_max[r], fmaxf(low, high));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, step));
      rows.row_max[r] = row_max;
      moves |= move_base(rows.base[r], scale[r], row_max, factor);
      const float from = finite_base(rows.base[r]);
      low = exp2_normal(__fmaf_rn(low, factor, -from));
      high = exp2_normal(__fmaf_rn(high, factor, -from));
      rows.row_sum[r] = __fmaf_rn(rows.row_sum[r], scale[r], low + high);
    }
#pragma unroll
    for (int tile = 0; tile < row_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const pair = scores + tile * 4 + half * 2;
        probabilities[tile][half] = transposed_matrix(packed_pair<typename Config::Value>(pair[0], pair[1]));
      }
    }
    return __any_sync(0xffffffffu, moves);
  }

  // Tiles on their way, of which this is one: a warp computes with one while `Config::ahead` others arrive.
  struct Stage {
    Keys keys;
    Values values;
    int first;  // of this warp's keys
    bool live, open;
  };
  template <class Visibility>
  JITGEN_DEVICE void take(Stage& stage, Tiles& tiles, const Visibility& visibility) const {
    stage.live = tiles.next(visibility);
    stage.first = tiles.tile * Shape::keys + int(threadIdx.x / 32) * 16;
    stage.open = tiles.open;
  }
  JITGEN_DEVICE void walk(Sums& sums, Rows& rows, const Task& task, int first, int share, float factor) const {
    const auto of_block = operands.rows_of_block(task, first, Shape::rows);
    const auto visibility = [&](int tile, bool exists, int) {
      return exists ? operands.template visibility<Shape::keys>(task, of_block, tile) : 0u;
    };
    const TileRange all = Extent::template tiles<Shape::keys>(operands, task, of_block);
    const TileRange mine = share_of<Config::masked>(all, share, Operands::ranges * splits, visibility);
    Tiles tiles(mine.begin, mine.end);
    Stage stages[Config::ahead];
#pragma unroll
    for (Stage& stage : stages) {
      take(stage, tiles, visibility);
      if (!stage.live) continue;
      read_keys(stage.keys, task, stage.first);
      read_values(stage.values, task, stage.first);
    }
    if (!stages[0].live) return;
    const int lane = threadIdx.x % 32;
    const auto of_rows = operands.rows_of_thread(task, first + lane % 4 * 2);
    Query query;
    read_query(query, task, first);
    while (true) {
#pragma unroll
      for (Stage& stage : stages) {
        if (!stage.live) return;
        float scores[row_tiles * 4], scale[own_rows];
        uint32_t probabilities[row_tiles][2];
        multiply_keys(scores, stage.keys, query);
        const int column = stage.first + lane / 4;
        const bool open = stage.open;
        take(stage, tiles, visibility);
        if (stage.live) read_keys(stage.keys, task, stage.first);
        if (open) {
          operands.template rule<true>(scores, task, of_rows, column);
        } else {
          operands.template rule<false>(scores, task, of_rows, column);
        }
        if (online_softmax(probabilities, scores, rows, scale, factor)) {
#pragma unroll
          for (int i = 0; i < value_runs * row_tiles * 16; ++i) {
            const int tile = i / 4 % row_tiles;
            sums[i / (row_tiles * 16)][i / (row_tiles * 4) % 4][tile][i % 4] *= scale[tile * 2 + i % 2];
          }
        }
        multiply_values(sums, stage.values, probabilities);
        if (stage.live) read_values(stage.values, task, stage.first);
      }
    }
  }

  JITGEN_DEVICE void run() const {
    const int number = int(blockIdx.x) / splits, range = number % Operands::ranges;
    const int blocks = int((operands.packed_rows() + Shape::rows - 1) / Shape::rows);
    const int task = number / Operands::ranges / blocks;
    const int first = number / Operands::ranges % blocks * Shape::rows;
    if (Config::most_splits > 1 && splits > 1) {
      waits_begin<true>();
      cluster_arrive_relaxed();
    }
    next_kernel_may_start();
    previous_kernel_wait();
    Rows rows;
    Sums sums;
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
      rows.row_max[r] = rows.base[r] = minus_infinity();
      rows.row_sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < value_runs * row_tiles * 16; ++i) {
      sums[i / (row_tiles * 16)][i / (row_tiles * 4) % 4][i / 4 % row_tiles][i % 4] = 0.0f;
    }
    const float fold = operands.fold();
    if (task < operands.tasks()) {
      walk(sums, rows, operands.task(task), first, range * splits + rank, fold * log2_e);
    }
    leave(sums, rows);
    __syncthreads();
    finish(task, range, first, fold);
  }
};

template <class Config, class Extent = AllKeys, class Operands>
JITGEN_DEVICE void attention_decode(const Operands& operands) {
  extern __shared__ __align__(16) uint8_t attention_memory[];
  constexpr bool clusters = Config::most_splits > 1;
  const DecodeKernel<Config, Operands, Extent> kernel{
      operands, reinterpret_cast<float*>(attention_memory), shared_address(attention_memory),
      clusters ? cluster_rank() : 0, clusters ? cluster_blocks() : 1};
  kernel.run();
}

}  // namespace jitgen
