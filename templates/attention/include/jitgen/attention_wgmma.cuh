// Attention on Hopper's wgmma: for each row, sum_n exp(s[n] - max s) v[n], with s[n] a rule of q . k[n], in one walk over
// the keys. (FlashAttention-3, Shah et al., 2024: warp specialisation, products of one tile under the softmax of another.)
//
// A producer warpgroup fills two rings of stages, of tiles of keys and of values, and leaves a ticket beside each piece of
// work and each tile of keys: it alone computes which tiles a mask leaves. Each consumer warpgroup has 64 rows.
// It multiplies the query, in shared memory, with a tile of keys, computes weights in registers, which there are the left
// operand of their product with the tile's values. The products of the next keys are issued before those with this
// tile's values, so that they are computed while weights are; and warpgroups take turns in issuing products, so that one
// computes weights while another's products run. Blocks are persistent: the first tiles of a piece of work arrive while
// the results of the piece before are stored.
//
//   struct Config {
//     using Key = jitgen::bfloat16;           // of keys, and the query is rounded to it: bfloat16 or float16
//     using Value = jitgen::bfloat16;         // of values, and weights are rounded to it
//     static constexpr int warpgroups = 2;    // consumers
//     static constexpr int keys = 128;        // of a tile: n of a wgmma
//     static constexpr int depth = 128;       // of a key, rounded up to a multiple of 16
//     static constexpr int width = 128;       // of a value, rounded up to n of a wgmma
//     static constexpr int stages = 2;        // of each ring
//     static constexpr int staged = 32;       // columns of results that a warp stages in shared memory at once
//     static constexpr int most_splits = 1;   // blocks of a cluster, at most, that share the keys of each piece of work
//     static constexpr bool query_copied, key_copied, value_copied;  // by tensor maps, else element by element
//     static constexpr bool masked;           // whether a mask may hide a tile
//     static constexpr bool overlap = true;   // whether the next keys' products are issued first
//     static constexpr bool take_turns = true;  // whether warpgroups issue products in turns
//   };
//
// Cluster: with most_splits above 1 any number of blocks up to that, as the launch says; else one block. A cluster adds
// up what its blocks have, by rank, from their shared memories; then a warp stages all columns of results at once.
//
// `Operands` is generated (attention.cu.j2): where everything is, the rule of scores, and the results.
//
// Shared memory: rows of 128 bytes with the 128-byte swizzle. [chunk of 64 d][row] of the query and of a tile of keys,
// [chunk of 64 e][key] of a tile of values.
#pragma once

#include "jitgen/attention_scores.cuh"
#include "jitgen/attention_walk.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <class Config>
struct AttentionShape {
  static constexpr int consumers = Config::warpgroups * 128;
  static constexpr int threads = consumers + 128;  // the last warpgroup copies
  static constexpr int rows = Config::warpgroups * 64;
  static constexpr int depth_chunks = (Config::depth + 63) / 64, width_chunks = (Config::width + 63) / 64;

  static constexpr int query_bytes = rows * 128 * depth_chunks;
  static constexpr int key_bytes = Config::keys * 128 * depth_chunks;
  static constexpr int value_bytes = Config::keys * 128 * width_chunks;

  // The epilogue stages some columns of a warp's 16 rows; each row is padded by 8 floats (banks). Behind them are a row's
  // greatest score and its sum.
  static constexpr int chunk = Config::staged;
  static constexpr int pitch = chunk + 8;
  static constexpr int warp_floats = 16 * pitch + 32;
  static_assert(32 % (chunk / 8) == 0 && Config::width % chunk == 0, "a lane has the same columns of each row it stores");
  static_assert(Config::most_splits == 1 || chunk == Config::width, "a row of sums is staged as a whole");

  static constexpr int keys_at = query_bytes;
  static constexpr int values_at = keys_at + Config::stages * key_bytes;
  static constexpr int staging_at = values_at + Config::stages * value_bytes;
  static constexpr int barriers_at = staging_at + consumers / 32 * warp_floats * 4;
  static constexpr int tickets_at = barriers_at + (2 + 4 * Config::stages) * 8;
  static constexpr int bytes = tickets_at + 16 + (Config::stages + 1) / 2 * 16;

  // Registers of a thread that computes and of one that copies: multiples of 8, 512 for one thread of each warpgroup.
  static constexpr int copier_registers = Config::warpgroups == 3 ? 32 : Config::keys > 128 ? 24 : 40;
  static constexpr int registers = Config::warpgroups == 3 ? 160 : Config::keys > 128 ? 240 : 232;
  static constexpr bool deals_registers = Config::warpgroups > 1;
};

// Keeps the compiler from moving accesses of accumulators across: a wgmma writes them until it was waited for.
template <int n>
JITGEN_DEVICE void settle(float (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Writes `rows` rows of `columns` elements to [chunk][row] in shared memory, whose chunks have `pitch` rows, with zeros
// beyond `live_rows` and `live_columns`; element(row, column) gives them. Called by 128 threads.
template <class Element, class At>
JITGEN_DEVICE void copy_elements(
    uint8_t* to, int pitch, int rows, int columns, int live_rows, int live_columns, const At& element) {
  const int pieces = columns / 8;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < rows * pieces; i += 128) {
    const int row = i / pieces, piece = i % pieces;
    Vector<Element, 8> found;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      found[j] = row < live_rows && piece * 8 + j < live_columns ? element(row, piece * 8 + j) : Element{};
    }
    const int at = (piece / 8 * pitch + row) * 128 + ((piece % 8) ^ (row % 8)) * 16;
    store_vector(reinterpret_cast<Element*>(to + at), found);
  }
}

template <class Config, class Operands>
struct AttentionKernel {
  using Shape = AttentionShape<Config>;
  using Scores = Wgmma<typename Config::Key, Config::keys>;
  using Sums = Wgmma<typename Config::Value, Config::width>;
  using Task = typename Operands::Task;
  static constexpr int stages = Config::stages, n = Config::keys / 2;

  const Operands& operands;
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`
  const int rank;       // this block's, in a cluster that shares keys
  const int splits;     // blocks of that cluster; else 1

  struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    JITGEN_DEVICE void next() {
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  };

  JITGEN_DEVICE uint32_t query_full() const { return base + Shape::barriers_at; }
  JITGEN_DEVICE uint32_t query_empty() const { return query_full() + 8; }
  JITGEN_DEVICE uint32_t key_full(int stage) const { return query_full() + 16 + stage * 32; }
  JITGEN_DEVICE uint32_t key_empty(int stage) const { return key_full(stage) + 8; }
  JITGEN_DEVICE uint32_t value_full(int stage) const { return key_full(stage) + 16; }
  JITGEN_DEVICE uint32_t value_empty(int stage) const { return key_full(stage) + 24; }
  JITGEN_DEVICE int4* piece_ticket() const { return reinterpret_cast<int4*>(memory + Shape::tickets_at); }
  JITGEN_DEVICE volatile uint64_t* tile_ticket(int stage) const {
    return reinterpret_cast<volatile uint64_t*>(memory + Shape::tickets_at + 16) + stage;
  }
  JITGEN_DEVICE int keys_at(int stage) const { return Shape::keys_at + stage * Shape::key_bytes; }
  JITGEN_DEVICE int values_at(int stage) const { return Shape::values_at + stage * Shape::value_bytes; }

  JITGEN_DEVICE void initialise() const {
    barrier_init(query_full(), 1);
    barrier_init(query_empty(), Shape::consumers / 32);
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(key_full(stage), Config::key_copied ? 1 : 128);
      barrier_init(value_full(stage), Config::value_copied ? 1 : 128);
      barrier_init(key_empty(stage), Shape::consumers / 32);
      barrier_init(value_empty(stage), Shape::consumers / 32);
    }
    barrier_init_fence();
  }

  JITGEN_DEVICE PieceWalk pieces() const {
    const int tasks = operands.tasks();
    const int blocks = int((operands.packed_rows() + Shape::rows - 1) / Shape::rows);
    const int section = Config::masked ? tasks : 1;
    return {tasks, blocks, Operands::ranges, section, int(blockIdx.x) / splits, int(gridDim.x) / splits};
  }
  struct Range {
    int begin, end;
  };
  JITGEN_DEVICE Range range(int number) const {
    const int all = int((operands.keys + Config::keys - 1) / Config::keys);
    const int each = (all + Operands::ranges - 1) / Operands::ranges;
    const int begin = smaller(number * each, all), tiles = smaller(begin + each, all) - begin;
    return {begin + tiles * rank / splits, begin + tiles * (rank + 1) / splits};
  }
  using Tiles = typename TilesOf<Config::masked, Config::warpgroups>::type;

  // ------------------------------------------------------------------------------------------------------- copying

  JITGEN_DEVICE void produce() const {
    const int thread = threadIdx.x - Shape::consumers;
    // One warp asks for tensor copies. The others only meet the cluster: nothing else keeps them from falling behind a
    // barrier by a whole phase.
    const bool idle = Config::key_copied && Config::value_copied && thread >= 32;
    if (idle && (Config::most_splits == 1 || splits == 1)) return;
    Ring ring;
    uint32_t query_phase = 1;
    for (PieceWalk walk = pieces(); walk.more(); ++walk.round) {
      if (!walk.live()) continue;
      if (Config::most_splits > 1 && idle) {
        __syncwarp();
        cluster_sync();
        cluster_sync();
        continue;
      }
      const Piece piece = walk.piece();
      const Task task = operands.task(piece.task);
      const int row = piece.row_block * Shape::rows;
      const Range of_keys = range(piece.range);
      Tiles tiles(of_keys.begin, of_keys.end);
      const auto look = [&](int tile, bool exists, int warpgroup) {
        const int first = row + warpgroup * 64;
        if (first >= operands.packed_rows()) return 0u;
        const auto rows = operands.rows_of_block(task, first, 64);
        return exists ? operands.template look<Config::keys>(task, rows, tile) : 0u;
      };
      bool more = tiles.next(look);
      if (thread < 32) barrier_wait_in_place(query_empty(), query_phase);
      query_phase ^= 1;
      if (thread == 0) start({piece.task, piece.row_block, piece.range, more}, task, row);
      int before = -1;
      while (more) {
        const int tile = tiles.tile;
        uint64_t ticket = tiles.ticket;
        more = tiles.next(look);
        if (!more) ticket |= TileTicket::of_end;
        copy_keys(task, tile, ticket, ring, thread);
        if (before >= 0) copy_values(task, before, previous(ring), thread);
        before = tile;
        ring.next();
      }
      if (before >= 0) copy_values(task, before, previous(ring), thread);
      if (Config::most_splits > 1 && splits > 1) {
        __syncwarp();
        cluster_sync();
        cluster_sync();
      }
    }
    if (thread >= 32) return;
    barrier_wait_in_place(query_empty(), query_phase);
    if (thread == 0) {
      *piece_ticket() = {-1, 0, 0, 0};
      barrier_arrive(query_full());
    }
  }
  // Hands a piece to the consumers, with its query where that is copied.
  JITGEN_DEVICE void start(const int4& ticket, const Task& task, int row) const {
    *piece_ticket() = ticket;
    if constexpr (Config::query_copied) {
      if (ticket.w) {
        barrier_arrive_expect(query_full(), Shape::query_bytes);
#pragma unroll
        for (int c = 0; c < Shape::depth_chunks; ++c) {
          operands.copy_query(base + c * (Shape::rows * 128), task, c * 64, row, query_full());
        }
        return;
      }
    }
    barrier_arrive(query_full());
  }
  static JITGEN_DEVICE Ring previous(Ring ring) {
    if (--ring.stage < 0) ring.stage = stages - 1, ring.phase ^= 1;
    return ring;
  }
  JITGEN_DEVICE void copy_keys(const Task& task, int tile, uint64_t ticket, const Ring& ring, int thread) const {
    const int stage = ring.stage;
    barrier_wait_in_place(key_empty(stage), ring.phase ^ 1);
    if (thread == 0) *tile_ticket(stage) = ticket;
    if constexpr (Config::key_copied) {
      if (thread == 0) {
        barrier_arrive_expect(key_full(stage), Shape::key_bytes);
#pragma unroll
        for (int c = 0; c < Shape::depth_chunks; ++c) {
          const uint32_t to = base + keys_at(stage) + c * (Config::keys * 128);
          operands.copy_key(to, task, c * 64, tile * Config::keys, key_full(stage));
        }
      }
    } else {
      const int first = tile * Config::keys, live = smaller(Config::keys, int(operands.keys) - first);
      copy_elements<typename Config::Key>(
          memory + keys_at(stage), Config::keys, Config::keys, Config::depth, live, int(operands.depth),
          [&](int row, int d) { return operands.key(task, first + row, d); });
      proxy_fence();
      barrier_arrive(key_full(stage));
    }
  }
  JITGEN_DEVICE void copy_values(const Task& task, int tile, const Ring& ring, int thread) const {
    const int stage = ring.stage;
    barrier_wait_in_place(value_empty(stage), ring.phase ^ 1);
    if constexpr (Config::value_copied) {
      if (thread == 0) {
        barrier_arrive_expect(value_full(stage), Shape::value_bytes);
#pragma unroll
        for (int c = 0; c < Shape::width_chunks; ++c) {
          const uint32_t to = base + values_at(stage) + c * (Config::keys * 128);
          operands.copy_value(to, task, c * 64, tile * Config::keys, value_full(stage));
        }
      }
    } else {
      const int first = tile * Config::keys, live = smaller(Config::keys, int(operands.keys) - first);
      copy_elements<typename Config::Value>(
          memory + values_at(stage), Config::keys, Config::keys, Config::width, live, int(operands.width),
          [&](int row, int e) { return operands.value(task, first + row, e); });
      proxy_fence();
      barrier_arrive(value_full(stage));
    }
  }

  // ----------------------------------------------------------------------------------------------------- computing

  JITGEN_DEVICE void multiply_keys(float (&scores)[n], int stage) const {
    const uint32_t query = base + int(threadIdx.x / 128) * 8192, key = base + keys_at(stage);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Config::depth / 16; ++step) {
      const uint64_t a = descriptor_k_major(query + step / 4 * (Shape::rows * 128)) + step % 4 * 2;
      const uint64_t b = descriptor_k_major(key + step / 4 * (Config::keys * 128)) + step % 4 * 2;
      Scores::template shared<0>(scores, a, b, step > 0);
    }
    cute::warpgroup_commit_batch();
  }
  JITGEN_DEVICE void multiply_values(
      float (&sums)[Config::width / 2], const uint32_t (&weights)[Config::keys / 16][4], int stage) const {
    const uint64_t value = descriptor_transposed(base + values_at(stage), Config::keys * 128);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Config::keys / 16; ++step) {
      Sums::registers_transposed(sums, weights[step], value + step * 128, 1);
    }
    cute::warpgroup_commit_batch();
  }
  // All lanes have read what the producer may overwrite now: a ticket, and with wgmma a tile.
  JITGEN_DEVICE void release(uint32_t barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
  JITGEN_DEVICE void wait_for_turn() const {
    if constexpr (Config::take_turns && Config::warpgroups > 1) group_barrier<256>(1 + threadIdx.x / 128);
  }
  JITGEN_DEVICE void end_turn() const {
    if constexpr (Config::take_turns && Config::warpgroups > 1) {
      group_arrive<256>(1 + (threadIdx.x / 128 + 1) % Config::warpgroups);
    }
  }

  // What a thread knows of its two rows: lane / 4 and lane / 4 + 8 of its warp's 16. Weights are 2^(score * factor - base).
  struct Rows {
    float top[2], total[2], base[2];
  };

  // Scores become weights; `rows` and `scale`, what sums so far are multiplied with, follow.
  // Returns whether one of the warp's rows has another base.
  JITGEN_DEVICE bool weigh(float (&scores)[n], Rows& rows, float (&scale)[2], float factor) const {
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = rows.top[r];
#pragma unroll
      for (int i = 0; i < n / 4; ++i) most = fmaxf(most, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      rows.top[r] = most;
      moves |= move_base(rows.base[r], scale[r], most, factor);
      const float base = finite_base(rows.base[r]);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < n / 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& weight = scores[i * 4 + r * 2 + j];
          weight = exp2_normal(__fmaf_rn(weight, factor, -base));
          sum += weight;
        }
      }
      rows.total[r] = __fmaf_rn(rows.total[r], scale[r], sum);
    }
    return __any_sync(0xffffffffu, moves);
  }
  static JITGEN_DEVICE void pack(uint32_t (&weights)[Config::keys / 16][4], const float (&scores)[n]) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      weights[i / 4][i % 4] = packed_pair<typename Config::Value>(scores[i * 2], scores[i * 2 + 1]);
    }
  }

  JITGEN_DEVICE void consume() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
    if (Config::take_turns && warpgroup == Config::warpgroups - 1) end_turn();
    Ring ring;
    float scores[n];
#pragma unroll
    for (int i = 0; i < n; ++i) scores[i] = 0.0f;
    for (uint32_t query_phase = 0;; query_phase ^= 1) {
      barrier_wait_in_place(query_full(), query_phase);
      const int4 piece = *piece_ticket();
      if (piece.x < 0) return;
      const int row = piece.y * Shape::rows;
      const float fold = operands.fold(), factor = fold * log2_e;
      Rows rows;
      float sums[Config::width / 2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.top[r] = rows.base[r] = minus_infinity();
        rows.total[r] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < Config::width / 2; ++i) sums[i] = 0.0f;
      if (piece.w == 0) {
        release(query_empty());
      } else {
        const Task task = operands.task(piece.x);
        const auto of_rows = operands.rows_of_thread(task, row + warp * 16 + lane / 4);
        const auto rule = [&](const TileTicket& ticket) {
          const int column = ticket.tile * Config::keys + lane % 4 * 2;
          if (ticket.open) {
            operands.open_rule(scores, task, of_rows, column);
          } else {
            operands.masked_rule(scores, task, of_rows, column);
          }
        };
        if constexpr (!Config::query_copied) compute_query(task, row + warpgroup * 64, warpgroup);
        TileTicket ticket = next_ticket(ring, warpgroup);
        while (Config::masked && !ticket.seen && !ticket.ends) {
          wait_for_turn();
          end_turn();
          pass(ring);
          ticket = next_ticket(ring, warpgroup);
        }
        if (!Config::masked || ticket.seen) {
          uint32_t weights[Config::keys / 16][4];
          float scale[2];
          multiply_keys(scores, ring.stage);
          cute::warpgroup_wait<0>();
          settle(scores);
          release(key_empty(ring.stage));
          rule(ticket);
          weigh(scores, rows, scale, factor);
          pack(weights, scores);
          Ring of_values = ring;
          ring.next();
          if (!ticket.last) barrier_wait_in_place(key_full(ring.stage), ring.phase);
          while (!ticket.last) {
            ticket = ticket_of(ring, warpgroup);
            wait_for_turn();
            if constexpr (Config::overlap) {
              multiply_keys(scores, ring.stage);
              barrier_wait_in_place(value_full(of_values.stage), of_values.phase);
              multiply_values(sums, weights, of_values.stage);
              end_turn();
              cute::warpgroup_wait<1>();
            } else {
              barrier_wait_in_place(value_full(of_values.stage), of_values.phase);
              multiply_values(sums, weights, of_values.stage);
              multiply_keys(scores, ring.stage);
              end_turn();
              cute::warpgroup_wait<0>();
            }
            settle(scores);
            release(key_empty(ring.stage));
            rule(ticket);
            const bool moves = weigh(scores, rows, scale, factor);
            const int finished = of_values.stage;
            of_values = ring;
            ring.next();
            // The assembler moves a wait for products up to the last branch before it, which this one is: weights are
            // computed under the products with the values before.
            if (!ticket.last) barrier_wait_in_place(key_full(ring.stage), ring.phase);
            cute::warpgroup_wait<0>();
            settle(sums);
            release(value_empty(finished));
            pack(weights, scores);
            if (moves) {
#pragma unroll
              for (int i = 0; i < Config::width / 2; ++i) sums[i] *= scale[i / 2 % 2];
            }
          }
          barrier_wait_in_place(value_full(of_values.stage), of_values.phase);
          multiply_values(sums, weights, of_values.stage);
          cute::warpgroup_wait<0>();
          settle(sums);
          release(value_empty(of_values.stage));
          while (Config::masked && !ticket.ends) {
            ticket = next_ticket(ring, warpgroup);
            wait_for_turn();
            end_turn();
            pass(ring);
          }
        } else {
          pass(ring);
        }
        release(query_empty());
      }
      if (Config::most_splits > 1 && splits > 1) {
        leave(sums, rows, fold);
        __syncwarp();
        cluster_sync();
        finish_split(piece.x, piece.z, row);
        __syncwarp();
        cluster_sync();
      } else {
        finish(piece.x, piece.z, row, sums, rows, fold);
      }
    }
  }
  JITGEN_DEVICE TileTicket next_ticket(const Ring& ring, int warpgroup) const {
    barrier_wait_in_place(key_full(ring.stage), ring.phase);
    return ticket_of(ring, warpgroup);
  }
  // Without masks all warpgroups see the same.
  JITGEN_DEVICE TileTicket ticket_of(const Ring& ring, int warpgroup) const {
    return TileTicket(*tile_ticket(ring.stage), Config::masked ? warpgroup : 0);
  }
  // Leaves out a tile that only other warpgroups see, which take as many turns as this one.
  JITGEN_DEVICE void pass(Ring& ring) const {
    release(key_empty(ring.stage));
    barrier_wait_in_place(value_full(ring.stage), ring.phase);
    release(value_empty(ring.stage));
    ring.next();
  }
  // The warpgroup's own rows, which nothing else reads; it has read those before.
  JITGEN_DEVICE void compute_query(const Task& task, int first, int warpgroup) const {
    group_barrier<128>(4 + warpgroup);
    copy_elements<typename Config::Key>(
        memory + warpgroup * 8192, Shape::rows, 64, Config::depth, int(operands.packed_rows()) - first,
        int(operands.depth),
        [&](int m, int d) { return operands.template query<typename Config::Key>(task, first + m, d); });
    proxy_fence();
    group_barrier<128>(4 + warpgroup);
  }

  // ------------------------------------------------------------------------------------------------------- results

  JITGEN_DEVICE float* staging() const {
    return reinterpret_cast<float*>(memory + Shape::staging_at) + threadIdx.x / 32 * Shape::warp_floats;
  }
  // The greatest scores and the sums of this warp's rows, staged behind the columns; `scale` is what its products are
  // still to be multiplied with, so that weights are exp(score - top), as results know them.
  JITGEN_DEVICE void stage_rows(Rows& rows, float fold, float (&scale)[2]) const {
    const int lane = threadIdx.x % 32;
    float* const of_rows = staging() + 16 * Shape::pitch;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = rows.base[r] == minus_infinity() ? 1.0f : exp2_normal(rows.base[r] - rows.top[r] * (fold * log2_e));
      rows.total[r] += __shfl_xor_sync(0xffffffffu, rows.total[r], 1);
      rows.total[r] += __shfl_xor_sync(0xffffffffu, rows.total[r], 2);
      if (lane % 4 == 0) {
        of_rows[lane / 4 + r * 8] = rows.top[r] * fold;
        of_rows[16 + lane / 4 + r * 8] = rows.total[r] * scale[r];
      }
    }
  }
  JITGEN_DEVICE void finish(
      int number, int range, int first, const float (&sums)[Config::width / 2], Rows& rows, float fold) const {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch, runs = chunk / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Task task = operands.task(number);
    float *const staging = this->staging(), *const of_rows = staging + 16 * pitch;
    const int row = first + warp * 16, packed_rows = int(operands.packed_rows());
    if (row >= packed_rows) return;
    float scale[2];
    stage_rows(rows, fold, scale);
#pragma unroll 1
    for (int turn = 0; turn < Config::width / chunk; ++turn) {
      if (turn > 0) __syncwarp();
      spread<0>(turn, staging, sums, scale);
      __syncwarp();
      if (turn == 0 && lane < 16 && row + lane < packed_rows) {
        operands.row_results(task, range, row + lane, of_rows[lane], of_rows[16 + lane]);
      }
#pragma unroll 2
      for (int i = 0; i < 16 * runs; i += 32) {
        const int m = (i + lane) / runs, e = turn * chunk + lane % runs * 8;
        const int live = smaller(8, int(operands.width) - e);
        if (m >= 16 || row + m >= packed_rows || live <= 0) continue;
        float of_run[8];
        const float4* const from = reinterpret_cast<const float4*>(staging + m * pitch + lane % runs * 8);
        const float4 low = from[0], high = from[1];
        of_run[0] = low.x, of_run[1] = low.y, of_run[2] = low.z, of_run[3] = low.w;
        of_run[4] = high.x, of_run[5] = high.y, of_run[6] = high.z, of_run[7] = high.w;
        operands.results(task, range, row + m, e, of_run, of_rows[m], of_rows[16 + m], live);
      }
    }
  }

  // Where a cluster shares keys: each block stages what it has; block r adds up its share of the results, by rank.
  JITGEN_DEVICE void leave(const float (&sums)[Config::width / 2], Rows& rows, float fold) const {
    if constexpr (Config::most_splits > 1) {
      float scale[2];
      stage_rows(rows, fold, scale);
      spread<0>(0, staging(), sums, scale);
    }
  }
  JITGEN_DEVICE void finish_split(int number, int range, int first) const {
    if constexpr (Config::most_splits > 1) {
      constexpr int pitch = Shape::pitch, runs = Config::width / 8;
      const Task task = operands.task(number);
      const int all = smaller(int(operands.packed_rows()) - first, Shape::rows) * runs;
      const int last = all * (rank + 1) / splits;
#pragma unroll 1
      for (int i = all * rank / splits + threadIdx.x; i < last; i += Shape::consumers) {
        const int m = i / runs, e = i % runs * 8, live = smaller(8, int(operands.width) - e);
        const uint32_t staged = base + Shape::staging_at + m / 16 * (Shape::warp_floats * 4);
        const uint32_t of_row = staged + (16 * pitch + m % 16) * 4, from = staged + (m % 16 * pitch + e) * 4;
        float top = minus_infinity(), total = 0.0f, of_run[8];
        for (int r = 0; r < splits; ++r) top = fmaxf(top, load_remote_float(of_row, r));
#pragma unroll
        for (int j = 0; j < 8; ++j) of_run[j] = 0.0f;
        for (int r = 0; r < splits; ++r) {
          const float other = load_remote_float(of_row, r);
          const float scale = other == minus_infinity() ? 1.0f : exp2_normal((other - top) * log2_e);
          const float4 low = load_remote(from, r), high = load_remote(from + 16, r);
          total = __fmaf_rn(scale, load_remote_float(of_row + 64, r), total);
          const float more[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int j = 0; j < 8; ++j) of_run[j] = __fmaf_rn(scale, more[j], of_run[j]);
        }
        if (e == 0) operands.row_results(task, range, first + m, top, total);
        if (live > 0) operands.results(task, range, first + m, e, of_run, top, total, live);
      }
    }
  }
  // Registers can be indexed by constants only. So there is code for every turn, and only that of `wanted` is executed.
  template <int turn>
  static JITGEN_DEVICE void spread(
      int wanted, float* staging, const float (&sums)[Config::width / 2], const float (&scale)[2]) {
    constexpr int chunk = Shape::chunk, pitch = Shape::pitch;
    if constexpr (turn < Config::width / chunk) {
      if (wanted == turn) {
        const int lane = threadIdx.x % 32;
        float* const corner = staging + lane / 4 * pitch + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < chunk / 8; ++i) {
          const float* const from = sums + (turn * (chunk / 8) + i) * 4;
          *reinterpret_cast<float2*>(corner + i * 8) = make_float2(from[0] * scale[0], from[1] * scale[0]);
          *reinterpret_cast<float2*>(corner + i * 8 + 8 * pitch) = make_float2(from[2] * scale[1], from[3] * scale[1]);
        }
      }
      spread<turn + 1>(wanted, staging, sums, scale);
    }
  }
};

template <class Config, class Operands>
JITGEN_DEVICE void attention_wgmma(const Operands& operands) {
  using Shape = AttentionShape<Config>;
  extern __shared__ __align__(1024) uint8_t attention_memory[];
  constexpr bool clusters = Config::most_splits > 1;
  const AttentionKernel<Config, Operands> kernel{
      operands, attention_memory, shared_address(attention_memory), clusters ? cluster_rank() : 0,
      clusters ? cluster_blocks() : 1};
  if (threadIdx.x == 0) kernel.initialise();
  __syncthreads();
  // All blocks of this kernel are resident already, so blocks of the next one cannot delay them.
  next_kernel_may_start();
  previous_kernel_wait();
  if (threadIdx.x >= Shape::consumers) {
    if constexpr (Shape::deals_registers) cutlass::arch::warpgroup_reg_dealloc<Shape::copier_registers>();
    kernel.produce();
  } else {
    if constexpr (Shape::deals_registers) cutlass::arch::warpgroup_reg_alloc<Shape::registers>();
    kernel.consume();
  }
}

}  // namespace jitgen
