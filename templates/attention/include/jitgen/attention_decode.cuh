// Attention of few rows to many keys, a decoder's step, on mma.sync: for each row, sum_n exp(s[n] - max s) v[n], with s[n]
// a rule of q . k[n]. Its time is that of reading keys and values once.
//
// A warp takes 16 keys of a tile, and reads them and their values from memory into registers, 16 bytes a lane, as operands
// of products: nothing passes through shared memory. Keys are the rows of the first product and rows of the query its
// columns, of which there may be as few as 8; so are the elements of a value in the second one, whose right operand are
// the transposed weights. The dimension that a product sums over, and the rows of its result, may be in any order, so
// that each lane's 16 bytes are neighbours in memory. The next tile's keys are asked for as soon as this tile's have been
// multiplied, the next values after these: the registers of a multiprocessor hold all that is on its way.
//
// The warps of a block take a tile's keys, and the blocks of a cluster, and ranges of other blocks, share the tiles that
// masks leave. What warps have is added up in their order; then each block of a cluster gets its share of the columns of
// all blocks, in its shared memory, and adds it up by rank.
//
//   struct Config {
//     using Key = jitgen::bfloat16;           // of keys, and the query is rounded to it: bfloat16 or float16
//     using Value = jitgen::bfloat16;         // of values, and weights are rounded to it
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

#include "jitgen/attention_scores.cuh"
#include "jitgen/attention_walk.cuh"

namespace jitgen {

template <class Config>
struct DecodeShape {
  static constexpr int threads = Config::warps * 32;
  static constexpr int keys = Config::warps * 16;  // of a tile
  static constexpr int rows = Config::row_tiles * 8;

  // What a warp has: sums, each row padded by 4 floats (banks), and each row's greatest score, base and sum of weights.
  static constexpr int pitch = Config::width + 4;
  static constexpr int warp_floats = rows * pitch + 3 * rows;
  // What a block gets from its cluster: its share of the runs of 8 columns, and the greatest scores and sums of all rows.
  static constexpr int runs = rows * (Config::width / 8);
  static constexpr int inbox_floats =
      Config::most_splits > 1 ? (runs + Config::most_splits) * 8 + Config::most_splits * rows * 2 : 0;
  static constexpr int bytes = (Config::warps * warp_floats + inbox_floats) * 4;
};

template <class Config, class Operands>
struct DecodeKernel {
  using Shape = DecodeShape<Config>;
  using Task = typename Operands::Task;
  using Tiles = typename TilesOf<Config::masked, 1>::type;
  static constexpr int row_tiles = Config::row_tiles, own_rows = 2 * row_tiles;  // rows of a lane
  static constexpr int key_runs = Config::depth / 32, value_runs = Config::width / 64;

  const Operands& operands;
  float* const memory;
  const uint32_t base;  // the address of `memory`
  const int rank;       // this block's, in a cluster that shares keys
  const int splits;     // blocks of that cluster; else 1

  struct Rows {
    float top[own_rows], total[own_rows], base[own_rows];  // of weights only those of this lane's keys
  };
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
  using Sums = float[value_runs][4][row_tiles][4];

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
  // sums[e, row] += sum_key value[e] weight: element e of two neighbouring keys makes one word.
  JITGEN_DEVICE void multiply_values(Sums& sums, const Values& values, const uint32_t (&weights)[row_tiles][2]) const {
#pragma unroll
    for (int run = 0; run < value_runs; ++run) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 found = operands.value_words(values.rows[i], values.runs[i][run]);
        words[i][0] = found.x, words[i][1] = found.y, words[i][2] = found.z, words[i][3] = found.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t of_elements[4] = {
            __byte_perm(words[0][j], words[1][j], 0x5410), __byte_perm(words[0][j], words[1][j], 0x7632),
            __byte_perm(words[2][j], words[3][j], 0x5410), __byte_perm(words[2][j], words[3][j], 0x7632)};
#pragma unroll
        for (int tile = 0; tile < row_tiles; ++tile) {
          multiply_add<typename Config::Value>(
              sums[run][j][tile], of_elements, weights[tile][0], weights[tile][1], sums[run][j][tile]);
        }
      }
    }
  }
  // Scores become weights, transposed: the right operand of the product with values. Returns whether one of the warp's
  // rows has another base; then sums are to be multiplied with `scale`.
  JITGEN_DEVICE bool weigh(
      uint32_t (&weights)[row_tiles][2], float (&scores)[row_tiles * 4], Rows& rows, float (&scale)[own_rows],
      float factor) const {
    bool moves = false;
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
      float &low = scores[r / 2 * 4 + r % 2], &high = scores[r / 2 * 4 + r % 2 + 2];
      float most = fmaxf(rows.top[r], fmaxf(low, high));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
      rows.top[r] = most;
      moves |= move_base(rows.base[r], scale[r], most, factor);
      const float from = finite_base(rows.base[r]);
      low = exp2_normal(__fmaf_rn(low, factor, -from));
      high = exp2_normal(__fmaf_rn(high, factor, -from));
      rows.total[r] = __fmaf_rn(rows.total[r], scale[r], low + high);
    }
#pragma unroll
    for (int tile = 0; tile < row_tiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const pair = scores + tile * 4 + half * 2;
        weights[tile][half] = transposed_matrix(packed_pair<typename Config::Value>(pair[0], pair[1]));
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
  template <class Look>
  JITGEN_DEVICE void take(Stage& stage, Tiles& tiles, const Look& look) const {
    stage.live = tiles.next(look);
    stage.first = tiles.tile * Shape::keys + int(threadIdx.x / 32) * 16;
    stage.open = tiles.open;
  }
  JITGEN_DEVICE void walk(Sums& sums, Rows& rows, const Task& task, int first, int share, float factor) const {
    const auto of_block = operands.rows_of_block(task, first, Shape::rows);
    const auto look = [&](int tile, bool exists, int) {
      return exists ? operands.template look<Shape::keys>(task, of_block, tile) : 0u;
    };
    const int all = int((operands.keys + Shape::keys - 1) / Shape::keys);
    const TileRange mine = share_of<Config::masked>(all, share, Operands::ranges * splits, look);
    Tiles tiles(mine.begin, mine.end);
    Stage stages[Config::ahead];
#pragma unroll
    for (Stage& stage : stages) {
      take(stage, tiles, look);
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
        uint32_t weights[row_tiles][2];
        multiply_keys(scores, stage.keys, query);
        const int column = stage.first + lane / 4;
        const bool open = stage.open;
        take(stage, tiles, look);
        if (stage.live) read_keys(stage.keys, task, stage.first);
        if (open) {
          operands.open_rule(scores, task, of_rows, column);
        } else {
          operands.masked_rule(scores, task, of_rows, column);
        }
        if (weigh(weights, scores, rows, scale, factor)) {
#pragma unroll
          for (int i = 0; i < value_runs * row_tiles * 16; ++i) {
            const int tile = i / 4 % row_tiles;
            sums[i / (row_tiles * 16)][i / (row_tiles * 4) % 4][tile][i % 4] *= scale[tile * 2 + i % 2];
          }
        }
        multiply_values(sums, stage.values, weights);
        if (stage.live) read_values(stage.values, task, stage.first);
      }
    }
  }

  JITGEN_DEVICE void run() const {
    const int number = int(blockIdx.x) / splits, range = number % Operands::ranges;
    const int blocks = int((operands.packed_rows() + Shape::rows - 1) / Shape::rows);
    const int task = number / Operands::ranges / blocks;
    const int first = number / Operands::ranges % blocks * Shape::rows;
    if (Config::most_splits > 1 && splits > 1) cluster_arrive_relaxed();
    next_kernel_may_start();
    previous_kernel_wait();
    Rows rows;
    Sums sums;
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
      rows.top[r] = rows.base[r] = minus_infinity();
      rows.total[r] = 0.0f;
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

  // ------------------------------------------------------------------------------------------------------- results

  JITGEN_DEVICE float* of_warp(int warp) const { return memory + warp * Shape::warp_floats; }
  // Of a row of a warp: the greatest score, the base and the sum of weights, `Shape::rows` floats apart.
  JITGEN_DEVICE float* of_row(int warp, int row) const { return of_warp(warp) + Shape::rows * Shape::pitch + row; }

  JITGEN_DEVICE void leave(const Sums& sums, Rows& rows) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < own_rows; ++r) {
      const int tile = r / 2, row = tile * 8 + lane % 4 * 2 + r % 2;
#pragma unroll
      for (int step = 4; step < 32; step *= 2) rows.total[r] += __shfl_xor_sync(0xffffffffu, rows.total[r], step);
      if (lane / 4 == 0) {
        float* const to = of_row(warp, row);
        to[0] = rows.top[r];
        to[Shape::rows] = rows.base[r];
        to[2 * Shape::rows] = rows.total[r];
      }
#pragma unroll
      for (int run = 0; run < value_runs; ++run) {
        float4* const to = reinterpret_cast<float4*>(of_warp(warp) + row * Shape::pitch + run * 64 + lane / 4 * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto& low = sums[run][half * 2][tile];
          const auto& high = sums[run][half * 2 + 1][tile];
          to[half] = float4{low[r % 2], low[r % 2 + 2], high[r % 2], high[r % 2 + 2]};
        }
      }
    }
  }
  struct Run {
    float sums[8], top, total;  // of weights 2^(score * factor - top * factor)
  };
  // What all warps of this block have of 8 neighbouring columns of a row.
  JITGEN_DEVICE Run joined(int row, int e, float factor) const {
    Run found;
    found.top = minus_infinity();
    found.total = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::warps; ++w) found.top = fmaxf(found.top, of_row(w, row)[0]);
    const float from = finite_base(__fmul_rn(found.top, factor));
#pragma unroll
    for (int j = 0; j < 8; ++j) found.sums[j] = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::warps; ++w) {
      const float* const rows = of_row(w, row);
      const float scale = exp2_normal(rows[Shape::rows] - from);
      found.total = __fmaf_rn(scale, rows[2 * Shape::rows], found.total);
      const float4* const at = reinterpret_cast<const float4*>(of_warp(w) + row * Shape::pitch + e);
      const float4 low = at[0], high = at[1];
      const float more[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) found.sums[j] = __fmaf_rn(scale, more[j], found.sums[j]);
    }
    return found;
  }
  JITGEN_DEVICE void store(const Task& task, int range, int row, int e, const Run& run, float fold) const {
    const int live = smaller(8, int(operands.width) - e);
    if (e == 0) operands.row_results(task, range, row, run.top * fold, run.total);
    if (live > 0) operands.results(task, range, row, e, run.sums, run.top * fold, run.total, live);
  }
  JITGEN_DEVICE void finish(int task_number, int range, int first, float fold) const {
    constexpr int of_columns = Config::width / 8;
    const float factor = fold * log2_e;
    const bool exists = task_number < operands.tasks();
    const int rows = exists ? smaller(int(operands.packed_rows()) - first, Shape::rows) : 0, all = rows * of_columns;
    if (Config::most_splits == 1 || splits == 1) {
      if (!exists) return;
      const Task task = operands.task(task_number);
#pragma unroll 1
      for (int i = threadIdx.x; i < all; i += Shape::threads) {
        const int m = i / of_columns, e = i % of_columns * 8;
        store(task, range, first + m, e, joined(m, e, factor), fold);
      }
      return;
    }
    // Block r of the cluster gets the runs r, r + splits, ...; from each block behind one another.
    const int each = (all + splits - 1) / splits;
    float* const inbox = memory + Config::warps * Shape::warp_floats;
    const uint32_t inbox_at = base + Config::warps * Shape::warp_floats * 4;
    const int rows_at = (Shape::runs + Config::most_splits) * 8;
    cluster_wait_acquire();  // all blocks have started
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += Shape::threads) {
      const Run run = joined(i / of_columns, i % of_columns * 8, factor);
      const uint32_t to = inbox_at + (rank * each + i / splits) * 32, owner = i % splits;
      store_to_block(to, owner, float4{run.sums[0], run.sums[1], run.sums[2], run.sums[3]});
      store_to_block(to + 16, owner, float4{run.sums[4], run.sums[5], run.sums[6], run.sums[7]});
      if (i % of_columns == 0) {
        const uint32_t of_rows = inbox_at + (rows_at + (rank * Shape::rows + i / of_columns) * 2) * 4;
        for (int other = 0; other < splits; ++other) {
          store_to_block(of_rows, uint32_t(other), run.top);
          store_to_block(of_rows + 4, uint32_t(other), run.total);
        }
      }
    }
    __syncwarp();
    cluster_arrive_release();
    cluster_wait_acquire();
    if (!exists) return;
    const Task task = operands.task(task_number);
#pragma unroll 1
    for (int i = rank + threadIdx.x * splits; i < all; i += Shape::threads * splits) {
      const int m = i / of_columns;
      Run run;
      run.top = minus_infinity();
      run.total = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) run.sums[j] = 0.0f;
      for (int r = 0; r < splits; ++r) run.top = fmaxf(run.top, inbox[rows_at + (r * Shape::rows + m) * 2]);
      const float from = finite_base(__fmul_rn(run.top, factor));
      for (int r = 0; r < splits; ++r) {
        const float* const of_rows = inbox + rows_at + (r * Shape::rows + m) * 2;
        const float scale = exp2_normal(__fmul_rn(of_rows[0], factor) - from);
        const float* const more = inbox + (r * each + i / splits) * 8;
        run.total = __fmaf_rn(scale, of_rows[1], run.total);
#pragma unroll
        for (int j = 0; j < 8; ++j) run.sums[j] = __fmaf_rn(scale, more[j], run.sums[j]);
      }
      store(task, range, first + m, i % of_columns * 8, run, fold);
    }
  }
};

template <class Config, class Operands>
JITGEN_DEVICE void attention_decode(const Operands& operands) {
  extern __shared__ __align__(16) uint8_t attention_memory[];
  constexpr bool clusters = Config::most_splits > 1;
  const DecodeKernel<Config, Operands> kernel{
      operands, reinterpret_cast<float*>(attention_memory), shared_address(attention_memory),
      clusters ? cluster_rank() : 0, clusters ? cluster_blocks() : 1};
  kernel.run();
}

}  // namespace jitgen
