// Attention on Hopper's wgmma: for each row, sum_n exp(s[n] - max s) v[n], with s[n] a rule of q . k[n], in one walk over
// the keys. (FlashAttention-3, Shah et al., 2024: warp specialisation, products of one tile under the softmax of another.)
//
// A producer warpgroup fills two rings of stages, of tiles of keys and of values, and leaves a ticket beside each piece of
// work and each tile of keys: it alone computes which tiles a mask leaves. Each consumer warpgroup has 64 rows.
// It multiplies the query, in shared memory, with a tile of keys, and computes probabilities in registers, which are the
// left operand of their product with the tile's values. The products of the next keys are issued before those with this
// tile's values, so that they run while probabilities are computed; and warpgroups take turns in issuing products, so that
// one computes probabilities while another's products run. Blocks are persistent: the first tiles of a piece of work arrive
// while the results of the piece before are stored.
//
//   struct Config {
//     using Key = jitgen::bfloat16;           // of keys, and the query is rounded to it: bfloat16 or float16
//     using Value = jitgen::bfloat16;         // of values, and probabilities are rounded to it
//     static constexpr int warpgroups = 2;    // consumers
//     static constexpr int blocks = 1;        // of a multiprocessor
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
// up what its blocks have, by rank, from their shared memories, where the query and the tiles were before.
//
// `Operands` is generated (attention.cu.j2): where everything is, the rule of scores, and the results.
//
// Shared memory: rows of 128 bytes with the 128-byte swizzle. [chunk of 64 d][row] of the query and of a tile of keys,
// [chunk of 64 e][key] of a tile of values.
#pragma once

#include "jitgen/attention_wgmma_results.cuh"

namespace jitgen {

// All of a block's threads; the warpgroups that compute.
template <class Config, class Operands>
struct AttentionKernel : AttentionResults<Config, Operands> {
  using Block = AttentionBlock<Config, Operands>;
  using Shape = AttentionShape<Config>;
  using Task = typename Operands::Task;
  using Value = typename Config::Value;
  using Scores = Wgmma<typename Config::Key, Config::keys>;
  using Sums = Wgmma<Value, Config::width>;
  static constexpr int n = Config::keys / 2;
  using Ring = typename Block::Ring;
  using Rows = typename Block::Rows;
  using Block::operands;
  using Block::memory;
  using Block::base;
  using Block::splits;
  using Block::query_full;
  using Block::query_empty;
  using Block::key_full;
  using Block::key_empty;
  using Block::value_full;
  using Block::value_empty;
  using Block::piece_ticket;
  using Block::tile_ticket;
  using Block::keys_at;
  using Block::values_at;
  using AttentionResults<Config, Operands>::finish;
  using AttentionResults<Config, Operands>::finish_split;
  using AttentionResults<Config, Operands>::leave;

  JITGEN_DEVICE void multiply_keys(float (&scores)[n], int stage) const {
    const uint32_t query = base + int(threadIdx.x / 128) * 8192, key = base + keys_at(stage);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::depth / 16; ++step) {
      const uint64_t a = descriptor_k_major(query + step / 4 * (Shape::rows * 128)) + step % 4 * 2;
      const uint64_t b = descriptor_k_major(key + step / 4 * (Config::keys * 128)) + step % 4 * 2;
      Scores::template shared<0>(scores, a, b, step > 0);
    }
    wgmma_commit();
  }
  JITGEN_DEVICE void multiply_values(
      float (&sums)[Config::width / 2], const uint32_t (&probabilities)[Config::keys / 16][4], int stage) const {
    const uint64_t value = descriptor_transposed(base + values_at(stage), Config::keys * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::keys / 16; ++step) {
      Sums::template registers<1>(sums, probabilities[step], value + step * 128, 1);
    }
    wgmma_commit();
  }
  JITGEN_DEVICE void wait_for_turn() const {
    if constexpr (Config::take_turns && Config::warpgroups > 1) group_barrier<256>(1 + threadIdx.x / 128, "turn of a warpgroup");
  }
  JITGEN_DEVICE void end_turn() const {
    if constexpr (Config::take_turns && Config::warpgroups > 1) {
      group_arrive<256>(1 + (threadIdx.x / 128 + 1) % Config::warpgroups);
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
      barrier_wait_in_place(query_full(), query_phase, "query_full");
      const int4 piece = *piece_ticket();
      if (piece.x < 0) return;
      const int row = piece.y * Shape::rows;
      const float fold = operands.fold(), factor = fold * log2_e;
      Rows rows;
      float sums[Config::width / 2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.row_max[r] = rows.base[r] = minus_infinity();
        rows.row_sum[r] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < Config::width / 2; ++i) sums[i] = 0.0f;
      if (piece.w == 0) {
        warp_arrive(query_empty());
      } else {
        const Task task = operands.task(piece.x);
        const auto of_rows = operands.rows_of_thread(task, row + warp * 16 + lane / 4);
        const auto rule = [&](const TileTicket& ticket) {
          const int column = ticket.tile * Config::keys + lane % 4 * 2;
          if (ticket.open) {
            operands.template rule<true>(scores, task, of_rows, column);
          } else {
            operands.template rule<false>(scores, task, of_rows, column);
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
          uint32_t probabilities[Config::keys / 16][4];
          float scale[2];
          multiply_keys(scores, ring.stage);
          wgmma_wait<0>();
          settle(scores);
          warp_arrive(key_empty(ring.stage));
          rule(ticket);
          online_softmax(scores, rows, scale, factor);
          pack<Value>(probabilities, scores);
          Ring of_values = ring;
          ring.next();
          if (!ticket.last) barrier_wait_in_place(key_full(ring.stage), ring.phase, "key_full");
          while (!ticket.last) {
            ticket = ticket_of(ring, warpgroup);
            wait_for_turn();
            if constexpr (Config::overlap) {
              multiply_keys(scores, ring.stage);
              barrier_wait_in_place(value_full(of_values.stage), of_values.phase, "value_full");
              multiply_values(sums, probabilities, of_values.stage);
              end_turn();
              wgmma_wait<1>();
            } else {
              barrier_wait_in_place(value_full(of_values.stage), of_values.phase, "value_full");
              multiply_values(sums, probabilities, of_values.stage);
              multiply_keys(scores, ring.stage);
              end_turn();
              wgmma_wait<0>();
            }
            settle(scores);
            warp_arrive(key_empty(ring.stage));
            rule(ticket);
            const bool moves = online_softmax(scores, rows, scale, factor);
            const int finished = of_values.stage;
            of_values = ring;
            ring.next();
            // The assembler moves a wait for products up to the last branch before it, which this one is:
            // probabilities are computed under the products with the values before.
            if (!ticket.last) barrier_wait_in_place(key_full(ring.stage), ring.phase, "key_full");
            wgmma_wait<0>();
            settle(sums);
            warp_arrive(value_empty(finished));
            pack<Value>(probabilities, scores);
            if (moves) {
#pragma unroll
              for (int i = 0; i < Config::width / 2; ++i) sums[i] *= scale[i / 2 % 2];
            }
          }
          barrier_wait_in_place(value_full(of_values.stage), of_values.phase, "value_full");
          multiply_values(sums, probabilities, of_values.stage);
          wgmma_wait<0>();
          settle(sums);
          warp_arrive(value_empty(of_values.stage));
          while (Config::masked && !ticket.ends) {
            ticket = next_ticket(ring, warpgroup);
            wait_for_turn();
            end_turn();
            pass(ring);
          }
        } else {
          pass(ring);
        }
        warp_arrive(query_empty());
      }
      if (Config::most_splits > 1 && splits > 1) {
        group_barrier<Shape::consumers>(7, "the query and tiles of a block");
        leave(sums, rows, fold);
        __syncwarp();
        cluster_sync("sums of the cluster's blocks");
        finish_split(piece.x, piece.z, row);
        __syncwarp();
        cluster_sync("sums of the cluster's blocks");
      } else {
        finish(operands.task(piece.x), piece.z, row, sums, rows, fold);
      }
    }
  }
  JITGEN_DEVICE TileTicket next_ticket(const Ring& ring, int warpgroup) const {
    barrier_wait_in_place(key_full(ring.stage), ring.phase, "key_full");
    return ticket_of(ring, warpgroup);
  }
  // Without masks all warpgroups see the same.
  JITGEN_DEVICE TileTicket ticket_of(const Ring& ring, int warpgroup) const {
    return TileTicket(*tile_ticket(ring.stage), Config::masked ? warpgroup : 0);
  }
  // Leaves out a tile that only other warpgroups see, which take as many turns as this one.
  JITGEN_DEVICE void pass(Ring& ring) const {
    warp_arrive(key_empty(ring.stage));
    barrier_wait_in_place(value_full(ring.stage), ring.phase, "value_full");
    warp_arrive(value_empty(ring.stage));
    ring.next();
  }
  // The warpgroup's own rows, which nothing else reads; it has read those before.
  JITGEN_DEVICE void compute_query(const Task& task, int first, int warpgroup) const {
    group_barrier<128>(4 + warpgroup, "staging of a warpgroup");
    copy_runs<64, Config::depth, Operands::query_is_vector ? 4 : 1>(
        memory + warpgroup * 8192, Shape::rows, int(operands.packed_rows()) - first, int(operands.depth),
        [&](int m, int d) { return operands.query_run(task, first + m, d); });
    proxy_fence();
    group_barrier<128>(4 + warpgroup, "staging of a warpgroup");
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
  waits_begin<clusters>();
  if (threadIdx.x == 0) kernel.initialise();
  if (threadIdx.x == Shape::consumers) operands.prefetch_maps();
  __syncthreads();
  // All blocks of this kernel are resident already, so blocks of the next one cannot delay them.
  next_kernel_may_start();
  previous_kernel_wait();
  if (threadIdx.x >= Shape::consumers) {
    registers_deal<Config::warpgroups, Config::blocks, true, Shape::copier_registers>();
    kernel.produce();
  } else {
    registers_deal<Config::warpgroups, Config::blocks, false, Shape::copier_registers>();
    kernel.consume();
  }
}

}  // namespace jitgen
