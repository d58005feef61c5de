// The producer of the attention kernel on wgmma: it fills the rings with tiles of keys and values, and leaves tickets. See
// attention_wgmma.cuh.
#pragma once

#include "jitgen/attention_wgmma_block.cuh"
#include "jitgen/types.cuh"

namespace jitgen {

// The warpgroup that copies.
template <class Config, class Operands>
struct AttentionProducer : AttentionBlock<Config, Operands> {
  using Block = AttentionBlock<Config, Operands>;
  using Shape = AttentionShape<Config>;
  using Task = typename Operands::Task;
  using Tiles = Select<Config::masked, MaskedTiles<Config::warpgroups>, AllTiles<Config::warpgroups>>;
  static constexpr int stages = Config::stages;
  using Ring = typename Block::Ring;
  using Block::operands;
  using Block::memory;
  using Block::base;
  using Block::rank;
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
  using Block::pieces;
  using Block::range;

  JITGEN_DEVICE void produce() const {
    // Apart, since a producer has few registers.
    if (Config::most_splits > 1 && splits > 1) {
      produce_share<true>();
    } else {
      produce_share<false>();
    }
  }
  // `shares`: whether blocks of a cluster share the keys of a piece.
  template <bool shares>
  JITGEN_DEVICE void produce_share() const {
    const int thread = threadIdx.x - Shape::consumers;
    // One warp asks for tensor copies. The others only meet the cluster: nothing else keeps them from falling behind a
    // barrier by a whole phase.
    if (Config::key_copied && Config::value_copied && thread >= 32) {
      if (!shares) return;
      for (PieceWalk walk = pieces(splits); walk.more(); ++walk.round) {
        if (walk.live()) meet_twice();
      }
      return;
    }
    // Where masks may hide tiles, the blocks of a cluster take them in turn.
    const bool own = !Config::masked || !shares || thread % 32 % splits == rank;
    Ring ring;
    uint32_t query_phase = 1;
    for (PieceWalk walk = pieces(shares ? splits : 1); walk.more(); ++walk.round) {
      if (!walk.live()) continue;
      const Piece piece = walk.piece();
      const Task task = operands.task(piece.task);
      const int row = piece.row_block * Shape::rows;
      const TileRange of_keys = shares && !Config::masked ? share_of(range(piece.range)) : range(piece.range);
      Tiles tiles(of_keys.begin, of_keys.end);
      const auto visibility = [&](int tile, bool exists, int warpgroup) {
        const int first = row + warpgroup * 64;
        if (first >= operands.packed_rows()) return 0u;
        const auto rows = operands.rows_of_block(task, first, 64);
        return exists && own ? operands.template visibility<Config::keys>(task, rows, tile) : 0u;
      };
      bool more = tiles.next(visibility);
      if (thread < 32) barrier_wait_in_place(query_empty(), query_phase, "query_empty");
      query_phase ^= 1;
      if (thread == 0) start({piece.task, piece.row_block, piece.range, more}, task, row);
      int before = -1;
      while (more) {
        const int tile = tiles.tile;
        uint64_t ticket = tiles.ticket;
        more = tiles.next(visibility);
        if (!more) ticket |= TileTicket::of_end;
        copy_keys(task, tile, ticket, ring, thread);
        if (before >= 0) copy_values(task, before, previous(ring), thread);
        before = tile;
        ring.next();
      }
      if (before >= 0) copy_values(task, before, previous(ring), thread);
      if (shares) meet_twice();
    }
    if (thread >= 32) return;
    barrier_wait_in_place(query_empty(), query_phase, "query_empty");
    if (thread == 0) {
      *piece_ticket() = {-1, 0, 0, 0};
      barrier_arrive(query_full());
    }
  }
  JITGEN_DEVICE TileRange share_of(const TileRange& all) const {
    const int count = all.end - all.begin;
    return {all.begin + count * rank / splits, all.begin + count * (rank + 1) / splits};
  }
  // Where the consumers of the cluster exchange sums.
  JITGEN_DEVICE void meet_twice() const {
    __syncwarp();
    cluster_sync("sums of the cluster's blocks");
    cluster_sync("sums of the cluster's blocks");
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
    barrier_wait_in_place(key_empty(stage), ring.phase ^ 1, "key_empty");
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
    barrier_wait_in_place(value_empty(stage), ring.phase ^ 1, "value_empty");
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
};

}  // namespace jitgen
