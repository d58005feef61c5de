// Shared memory of the kernel of attention's gradients, its barriers, and its producer. See attention_backward.cuh.
#pragma once

#include "jitgen/attention_scores.cuh"
#include "jitgen/attention_walk.cuh"
#include "jitgen/wgmma_ptx.cuh"

namespace jitgen {

template <class Config>
struct BackwardShape {
  static constexpr int consumers = Config::warpgroups * 128;
  static constexpr int threads = consumers + 128;  // the last warpgroup copies
  static constexpr int block = Config::warpgroups * 64;
  static constexpr int tile = Config::tile;
  // Operands of a tile: Z0, Z1, and the right operands of sums that are neither. Chunks are of 64 columns.
  static constexpr int slots = 4;
  static constexpr int columns(int slot) {
    return slot == 0   ? Config::depth0
           : slot == 1 ? (Config::products > 1 ? Config::depth1 : 0)
           : slot == 2 ? (Config::slot0 == 2 ? Config::columns0 : 0)
                       : (Config::slot1 == 3 ? Config::columns1 : 0);
  }
  static constexpr int chunks(int slot) { return (columns(slot) + 63) / 64; }

  static constexpr int block_bytes(int pair) { return block * 128 * chunks(pair); }
  static constexpr int tile_bytes(int slot) { return tile * 128 * chunks(slot); }
  static constexpr int words_bytes = (Config::tile_words * tile * 4 + 1023) / 1024 * 1024;
  static constexpr int stage_bytes = tile_bytes(0) + tile_bytes(1) + tile_bytes(2) + tile_bytes(3);

  static constexpr int block_at(int pair) { return pair * block_bytes(0); }
  static constexpr int stages_at = block_bytes(0) + block_bytes(1);
  static constexpr int slot_at(int slot) { return slot == 0 ? 0 : slot_at(slot - 1) + tile_bytes(slot - 1); }
  static constexpr int tile_at(int stage, int slot) { return stages_at + stage * stage_bytes + slot_at(slot); }
  static constexpr int words_at(int stage) { return stages_at + Config::stages * stage_bytes + stage * words_bytes; }
  // A warp stages so many columns of its 16 rows of a result; each row is padded by 8 floats (banks).
  static constexpr int staged = 32, pitch = staged + 8;
  static constexpr int staging_at = words_at(Config::stages);
  static constexpr int barriers_at = staging_at + consumers / 32 * 16 * pitch * 4;
  static constexpr int tickets_at = barriers_at + (2 + 3 * Config::stages) * 8 + 16 - (2 + 3 * Config::stages) % 2 * 8;
  static constexpr int bytes = tickets_at + 16 * (1 + Config::stages);

  // Whether tensor maps describe an operand, or there is none.
  static constexpr bool block_copied(int pair) { return chunks(pair) == 0 || (Config::block_copied >> pair & 1); }
  static constexpr bool tile_copied(int slot) { return chunks(slot) == 0 || (Config::tile_copied >> slot & 1); }
  static constexpr bool copied = block_copied(0) && block_copied(1) && tile_copied(0) && tile_copied(1) &&
                                 tile_copied(2) && tile_copied(3);
  static constexpr int copied_block_bytes =
      (block_copied(0) ? block_bytes(0) : 0) + (block_copied(1) ? block_bytes(1) : 0);
  // Of what the tile's barriers wait for: barrier 0 for Z0, barrier 1 for all else.
  static constexpr int copied_tile_bytes(int barrier) {
    if (barrier == 0) return tile_copied(0) ? tile_bytes(0) : 0;
    return (tile_copied(1) ? tile_bytes(1) : 0) + (tile_copied(2) ? tile_bytes(2) : 0) +
           (tile_copied(3) ? tile_bytes(3) : 0);
  }
  // Threads that copy: one asks for tensor copies, and whole warps write words and elements.
  static constexpr int copiers = copied ? 32 : 128;

  // Registers of a thread that copies; those that compute share the rest.
  static constexpr int copier_registers = Config::warpgroups == 3 ? 32 : copied ? 24 : 40;
};

// Writes `rows` rows of `columns` elements to [chunk][row] in shared memory, with zeros beyond `live_rows` and
// `live_columns`; element(row, column) gives them. Called by `threads` threads, of which this is number `thread`.
template <class Element, class At>
JITGEN_DEVICE void write_elements(
    uint8_t* to, int rows, int columns, int live_rows, int live_columns, int thread, int threads, const At& element) {
  const int pieces = columns / 8;
#pragma unroll 1
  for (int i = thread; i < rows * pieces; i += threads) {
    const int row = i / pieces, piece = i % pieces;
    Vector<Element, 8> elements;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      elements[j] = row < live_rows && piece * 8 + j < live_columns ? element(row, piece * 8 + j) : Element{};
    }
    const int at = (piece / 8 * rows + row) * 128 + ((piece % 8) ^ (row % 8)) * 16;
    store_vector(reinterpret_cast<Element*>(to + at), elements);
  }
}

// What a block learns of a tile: its number, the head whose it is, and for each warpgroup whether it
// sees any score and whether no mask hides any; whether it is the last one of its piece.
struct BackwardTicket {
  int tile, head;
  uint32_t flags;
  static constexpr uint32_t of_end = 1u << 31;
  JITGEN_DEVICE bool seen(int warpgroup) const { return flags >> 2 * warpgroup & 1u; }
  JITGEN_DEVICE bool open(int warpgroup) const { return flags >> 2 * warpgroup & 2u; }
  JITGEN_DEVICE bool ends() const { return flags & of_end; }
};

// A block, as each of its threads sees it.
template <class Config, class Operands>
struct BackwardBlock {
  using Shape = BackwardShape<Config>;
  using Task = typename Operands::Task;
  static constexpr int stages = Config::stages;

  const Operands& operands;
  uint8_t* const memory;
  const uint32_t base;  // the address of `memory`

  struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    JITGEN_DEVICE void next() {
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  };

  JITGEN_DEVICE uint32_t block_full() const { return base + Shape::barriers_at; }
  JITGEN_DEVICE uint32_t block_empty() const { return block_full() + 8; }
  JITGEN_DEVICE uint32_t tile_full(int stage, int number) const { return block_full() + 16 + stage * 24 + number * 8; }
  JITGEN_DEVICE uint32_t tile_empty(int stage) const { return block_full() + 32 + stage * 24; }
  JITGEN_DEVICE volatile int4* tickets() const { return reinterpret_cast<volatile int4*>(memory + Shape::tickets_at); }
  JITGEN_DEVICE void leave_ticket(int number, int x, int y, int z) const {
    volatile int4* const ticket = tickets() + number;
    ticket->x = x, ticket->y = y, ticket->z = z;
  }
  JITGEN_DEVICE BackwardTicket tile_ticket(int stage) const {
    const volatile int4* const ticket = tickets() + 1 + stage;
    return {ticket->x, ticket->y, uint32_t(ticket->z)};
  }
  JITGEN_DEVICE uint32_t* words(int stage) const {
    return reinterpret_cast<uint32_t*>(memory + Shape::words_at(stage));
  }

  JITGEN_DEVICE void initialise() const {
    barrier_init(block_full(), Shape::copiers);
    barrier_init(block_empty(), Shape::consumers / 32 * warp_arrivals);
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(tile_full(stage, 0), Shape::copiers);
      barrier_init(tile_full(stage, 1), Shape::copiers);
      barrier_init(tile_empty(stage), Shape::consumers / 32 * warp_arrivals);
    }
    barrier_init_fence();
  }

  JITGEN_DEVICE int block_items() const { return int(operands.rows); }
  JITGEN_DEVICE int tile_items() const { return int(operands.keys); }
  JITGEN_DEVICE PieceWalk pieces() const {
    const int tasks = operands.tasks();
    const int blocks = (block_items() + Shape::block - 1) / Shape::block;
    return {tasks, blocks, 1, Config::masked ? tasks : 1, int(blockIdx.x), int(gridDim.x)};
  }
  // The longest pieces come first: under most masks the last rows of Q see most keys, and most rows see the first keys.
  static JITGEN_DEVICE int first_of(const Piece& piece, const PieceWalk& walk) {
    return (Config::first_are_long ? walk.row_blocks - 1 - piece.row_block : piece.row_block) * Shape::block;
  }

  // ------------------------------------------------------------------------------------------------------- the producer

  // Of a block's warpgroups: the ends of what their rows have.
  using Ends = typename Operands::BlockEnds;
  struct BlockEnds {
    Ends of_warpgroup[Config::warpgroups];
  };
  JITGEN_DEVICE BlockEnds ends_of_block(const Task& task, int first) const {
    BlockEnds ends;
#pragma unroll
    for (int w = 0; w < Config::warpgroups; ++w) {
      const int begin = smaller(first + w * 64, block_items() - 1);
      ends.of_warpgroup[w] = operands.block_ends(task, begin, smaller(begin + 64, block_items()));
    }
    return ends;
  }
  // Which pairs of rows of a tile the warpgroups see, as flags of a ticket.
  JITGEN_DEVICE uint32_t visibility(const Task& task, const BlockEnds& ends, int first, int tile) const {
    uint32_t flags = 0;
    const int begin = tile * Shape::tile, end = smaller(begin + Shape::tile, tile_items());
#pragma unroll
    for (int w = 0; w < Config::warpgroups; ++w) {
      if (first + w * 64 >= block_items()) continue;
      const bool whole = end == begin + Shape::tile && first + w * 64 + 64 <= block_items();
      const uint32_t bits = Config::masked ? operands.visibility(task, ends.of_warpgroup[w], begin, end) : 3u;
      flags |= (bits & (whole ? 3u : 1u)) << 2 * w;
    }
    return flags;
  }

  // Arrives for this thread; thread 0 expects the bytes of tensor copies too.
  static JITGEN_DEVICE void arrive(uint32_t barrier, int bytes) {
    if (threadIdx.x == Shape::consumers && bytes > 0) {
      barrier_arrive_expect(barrier, bytes);
    } else {
      barrier_arrive(barrier);
    }
  }
  // The warps of the last warpgroup, each of which learns of the same tiles.
  JITGEN_DEVICE void produce() const {
    const int lane = threadIdx.x % 32, thread = threadIdx.x - Shape::consumers;
    if (thread >= Shape::copiers) return;
    Ring ring;
    uint32_t block_phase = 1;
    for (PieceWalk walk = pieces(); walk.more(); ++walk.round) {
      if (!walk.live()) continue;
      const Piece piece = walk.piece();
      const int first = first_of(piece, walk);
      const int heads = operands.heads(), tiles = (tile_items() + Shape::tile - 1) / Shape::tile;
      barrier_wait_in_place(block_empty(), block_phase, "block_empty");
      block_phase ^= 1;
      copy_block<0>(piece.task, first);
      if constexpr (Config::products > 1) copy_block<1>(piece.task, first);
      if constexpr (!Shape::copied) proxy_fence();
      if (thread == 0) leave_ticket(0, piece.task, first, 0);
      arrive(block_full(), Shape::copied_block_bytes);
      // A tile is copied when the next one is known: the last one says that it is.
      int held = -1, held_head = 0;
      uint32_t held_flags = 0;
      for (int head = 0; head < heads; ++head) {
        const Task task = operands.task(piece.task, head);
        const BlockEnds ends = ends_of_block(task, first);
        for (int group = 0; group < tiles; group += 32) {
          const uint32_t mine = group + lane < tiles ? visibility(task, ends, first, group + lane) : 0u;
          uint32_t seen = __ballot_sync(0xffffffffu, (mine & 0x55555555u) != 0);
          while (seen != 0) {
            const int bit = __ffs(seen) - 1;
            seen &= seen - 1;
            if (held >= 0) copy_tile(piece.task, held_head, held, held_flags, ring);
            held = group + bit, held_head = head;
            held_flags = __shfl_sync(0xffffffffu, mine, bit);
          }
        }
      }
      if (held >= 0) {
        copy_tile(piece.task, held_head, held, held_flags | BackwardTicket::of_end, ring);
      } else {
        copy_nothing(ring);
      }
    }
    barrier_wait_in_place(block_empty(), block_phase, "block_empty");
    if (thread == 0) leave_ticket(0, -1, 0, 0);
    barrier_arrive(block_full());
  }
  template <int pair>
  JITGEN_DEVICE void copy_block(int number, int first) const {
    const Task task = operands.task(number, 0);
    if constexpr (Shape::block_copied(pair)) {
      if (threadIdx.x == Shape::consumers) {
#pragma unroll
        for (int c = 0; c < Shape::chunks(pair); ++c) {
          const uint32_t to = base + Shape::block_at(pair) + c * (Shape::block * 128);
          operands.template copy_block<pair>(to, task, c * 64, first, block_full());
        }
      }
    } else {
      write_elements<typename Config::Element>(
          memory + Shape::block_at(pair), Shape::block, Shape::chunks(pair) * 64, block_items() - first,
          operands.template columns<pair>(), threadIdx.x - Shape::consumers, Shape::copiers,
          [&](int row, int column) { return operands.template block_element<pair>(task, first + row, column); });
    }
  }
  template <int slot>
  JITGEN_DEVICE void copy_slot(const Task& task, int tile, int stage) const {
    const int first = tile * Shape::tile;
    if constexpr (Shape::chunks(slot) > 0 && Shape::tile_copied(slot)) {
      if (threadIdx.x == Shape::consumers) {
#pragma unroll
        for (int c = 0; c < Shape::chunks(slot); ++c) {
          const uint32_t to = base + Shape::tile_at(stage, slot) + c * (Shape::tile * 128);
          operands.template copy_tile<slot>(to, task, c * 64, first, tile_full(stage, slot > 0));
        }
      }
    } else if constexpr (Shape::chunks(slot) > 0) {
      write_elements<typename Config::Element>(
          memory + Shape::tile_at(stage, slot), Shape::tile, Shape::chunks(slot) * 64, tile_items() - first,
          operands.template columns<slot>(), threadIdx.x - Shape::consumers, Shape::copiers,
          [&](int row, int column) { return operands.template tile_element<slot>(task, first + row, column); });
    }
  }
  // Bytes may arrive before a barrier is told to expect them: its phase lasts until all threads have arrived.
  JITGEN_DEVICE void copy_tile(int number, int head, int tile, uint32_t flags, Ring& ring) const {
    const int thread = threadIdx.x - Shape::consumers, stage = ring.stage;
    const Task task = operands.task(number, head);
    barrier_wait_in_place(tile_empty(stage), ring.phase ^ 1, "tile_empty");
    copy_slot<0>(task, tile, stage);
    copy_slot<1>(task, tile, stage);
    copy_slot<2>(task, tile, stage);
    copy_slot<3>(task, tile, stage);
    if constexpr (!Shape::copied) proxy_fence();
    if (thread == 0) leave_ticket(1 + stage, tile, head, int(flags));
    arrive(tile_full(stage, 1), Shape::copied_tile_bytes(1));
    if constexpr (Config::tile_words > 0) {
      uint32_t* const to = words(stage);
#pragma unroll 1
      for (int i = thread; i < Shape::tile; i += Shape::copiers) {
        uint32_t row_words[Config::tile_words];
        operands.tile_words(row_words, task, smaller(tile * Shape::tile + i, tile_items() - 1));
#pragma unroll
        for (int word = 0; word < Config::tile_words; ++word) to[word * Shape::tile + i] = row_words[word];
      }
    }
    arrive(tile_full(stage, 0), Shape::copied_tile_bytes(0));
    ring.next();
  }
  // A ticket without a tile, for a piece that sees none.
  JITGEN_DEVICE void copy_nothing(Ring& ring) const {
    const int stage = ring.stage;
    barrier_wait_in_place(tile_empty(stage), ring.phase ^ 1, "tile_empty");
    if (threadIdx.x == Shape::consumers) leave_ticket(1 + stage, 0, 0, int(BackwardTicket::of_end));
    barrier_arrive(tile_full(stage, 0));
    barrier_arrive(tile_full(stage, 1));
    ring.next();
  }
};

}  // namespace jitgen
