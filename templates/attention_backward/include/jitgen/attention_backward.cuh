// Gradients of attention on Hopper's wgmma. With S = Q K^T, probabilities P of scores that are a rule of S, dP = dO V^T,
// and dS, a rule of S and dP, they are dV = P^T dO, dK = dS^T Q and dQ = dS K (FlashAttention-2 and -3: Dao, 2023; Shah et
// al., 2024). One mainloop has two kernels, each of which computes S and dP:
//
//   dQ:      a block has rows a of Q and dO, and walks tiles of rows b of K and V.
//   dK, dV:  a block has rows a of K and V, and walks tiles of rows b of Q and dO, of all heads that share them.
//
// Both have products S[a, b] = sum_d X0[a, d] Z0[b, d] and dP[a, b] = sum_e X1[a, e] Z1[b, e] from shared memory, and then
// sums R0[a, d] = sum_b dS[a, b] Y0[b, d], with Y0 = Z0, and with dV also R1[a, e] = sum_b P[a, b] Y1[b, e], with Y1 = Z1.
// Their left operands are in the registers in which they were computed. Every sum is added up by one thread in one order,
// so the same call gives the same bits. Each consumer warpgroup has 64 rows of the block. A producer warp copies tiles into
// a ring and leaves a ticket beside each: it alone computes which tiles a mask leaves. Numbers of each row of a tile, such
// as its log-sum-exp, are staged as words beside it. Blocks are persistent.
//
//   struct Config {
//     using Element = jitgen::bfloat16;       // of all operands of products: bfloat16 or float16
//     static constexpr int warpgroups = 2;    // consumers
//     static constexpr int tile = 64;         // rows of a tile: n of a wgmma
//     static constexpr int stages = 3;
//     static constexpr int products = 2;      // or 1: S alone
//     static constexpr int depth0, depth1;    // D and E, rounded up to multiples of 16
//     static constexpr int columns0, columns1;  // of R0 and R1, rounded up to n of a wgmma; columns1 is 0 without R1
//     static constexpr int slot0, slot1;      // where Y0 and Y1 are: 0 for Z0, 1 for Z1, else 2 and 3
//     static constexpr int tile_words = 2;    // of each row of a tile
//     static constexpr int block_words = 0;   // of each row of a block
//     static constexpr int block_copied, tile_copied;  // bits of X0, X1, and of Z0, Z1, Y0, Y1: by tensor maps
//     static constexpr bool early;            // whether R1 is a sum of what is computed from S alone
//     static constexpr bool masked;           // whether a mask may hide a tile
//     static constexpr bool first_are_long;   // whether the first blocks see most tiles
//     static constexpr bool overlap;          // whether a tile's last product runs on under the next tile's first
//   };
//
// `Operands` is generated (attention_backward.cu.j2): where everything is, the rules, and the results.
//
// Shared memory: rows of 128 bytes with the 128-byte swizzle; [chunk of 64 d][row].
#pragma once

#include "jitgen/attention_backward_block.cuh"

namespace jitgen {

// Keeps the compiler from moving accesses of accumulators across: a wgmma writes them until it was waited for.
template <int n>
JITGEN_DEVICE void settle(float (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

template <class Config, class Operands>
struct BackwardKernel : BackwardBlock<Config, Operands> {
  using Block = BackwardBlock<Config, Operands>;
  using Shape = BackwardShape<Config>;
  using Task = typename Operands::Task;
  using Element = typename Config::Element;
  using Ring = typename Block::Ring;
  static constexpr int n = Config::tile / 2;
  static constexpr int steps = Config::tile / 16;
  static constexpr bool has_second = Config::columns1 > 0;
  using Products = Wgmma<Element, Config::tile>;
  using Block::operands;
  using Block::memory;
  using Block::base;
  using Block::block_full;
  using Block::block_empty;
  using Block::tile_full;
  using Block::tile_empty;
  using Block::tickets;
  using Block::tile_ticket;
  using Block::words;

  // The products of this warpgroup's items with a tile's: pair 0 gives scores, pair 1 the gradients of probabilities.
  template <int pair, int length>
  JITGEN_DEVICE void multiply(float (&products)[n], int stage) const {
    const uint32_t left = base + Shape::block_at(pair) + int(threadIdx.x / 128) * 8192;
    const uint32_t right = base + Shape::tile_at(stage, pair);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < length / 16; ++step) {
      const uint64_t a = descriptor_k_major(left + step / 4 * (Shape::block * 128)) + step % 4 * 2;
      const uint64_t b = descriptor_k_major(right + step / 4 * (Shape::tile * 128)) + step % 4 * 2;
      Products::template shared<0>(products, a, b, step > 0);
    }
    wgmma_commit();
  }
  // Adds the products of `left`, of this warpgroup's items and a tile's, with the tile's own.
  template <int slot, int length>
  JITGEN_DEVICE void accumulate(float (&sums)[length / 2], const uint32_t (&left)[steps][4], int stage) const {
    const uint64_t right = descriptor_transposed(base + Shape::tile_at(stage, slot), Shape::tile * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      Wgmma<Element, length>::template registers<1>(sums, left[step], right + step * 128, 1);
    }
    wgmma_commit();
  }
  static JITGEN_DEVICE void pack(uint32_t (&packed)[steps][4], const float (&numbers)[n]) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      packed[i / 4][i % 4] = packed_pair<Element>(numbers[i * 2], numbers[i * 2 + 1]);
    }
  }

  using BlockWords = uint32_t[2][Config::block_words + 1];

  // Calls change(its number, words of its row of the block, of its row of the tile, both rows) for each product of this
  // thread: rows lane / 4 and lane / 4 + 8 of the warp's 16, and two neighbours of every eight rows of the tile.
  template <class Change>
  JITGEN_DEVICE void change_products(
      const BlockWords& of_block, int stage, int block_row, int tile_first, const Change& change) const {
    const uint32_t* const staged = words(stage);
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < Config::tile / 8; ++i) {
      uint32_t of_tile[2][Config::tile_words + 1];
#pragma unroll
      for (int word = 0; word < Config::tile_words; ++word) {
        const uint2 both = *reinterpret_cast<const uint2*>(staged + word * Config::tile + i * 8 + column);
        of_tile[0][word] = both.x, of_tile[1][word] = both.y;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          change(i * 4 + r * 2 + j, of_block[r], of_tile[j], block_row + r * 8, tile_first + i * 8 + column + j);
        }
      }
    }
  }
  // S becomes what dS is computed from. P is packed if it is computed from S alone.
  template <bool masked>
  JITGEN_DEVICE void recompute(
      float (&scores)[n], uint32_t (&probabilities)[steps][4], const Task& task, const BlockWords& of_block, int stage,
      int block_row, int tile_first) const {
    float others[n];
    change_products(of_block, stage, block_row, tile_first, [&](int i, const auto& of_row, const auto& of_key, int a, int b) {
      scores[i] = operands.template first<masked>(scores[i], others[i], task, of_row, of_key, a, b);
    });
    if constexpr (has_second && Config::early) pack(probabilities, others);
  }
  // dP becomes dS.
  template <bool masked>
  JITGEN_DEVICE void differentiate(
      const float (&scores)[n], float (&gradients)[n], uint32_t (&probabilities)[steps][4], const Task& task,
      const BlockWords& of_block, int stage, int block_row, int tile_first) const {
    float others[n];
    change_products(of_block, stage, block_row, tile_first, [&](int i, const auto& of_row, const auto& of_key, int a, int b) {
      gradients[i] = operands.template second<masked>(scores[i], gradients[i], others[i], task, of_row, of_key, a, b);
    });
    if constexpr (has_second && !Config::early) pack(probabilities, others);
  }

  static JITGEN_DEVICE int item_of_thread() { return int(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4); }

  JITGEN_DEVICE void consume() const {
    const int warpgroup = threadIdx.x / 128;
    Ring ring;
    for (uint32_t phase = 0;; phase ^= 1) {
      barrier_wait_in_place(block_full(), phase, "block_full");
      if (tickets()->x < 0) return;
      float sums0[Config::columns0 / 2], sums1[has_second ? Config::columns1 / 2 : 1];
#pragma unroll
      for (int i = 0; i < Config::columns0 / 2; ++i) sums0[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < (has_second ? Config::columns1 / 2 : 1); ++i) sums1[i] = 0.0f;
      uint32_t dscores[steps][4];
      BlockWords of_block;
      Task task = operands.task(tickets()->x, 0);
      int head = -1, finished = -1;  // the stage that the products still running read
      const auto finish_products = [&] {
        wgmma_wait<0>();
        settle(sums0);
        if constexpr (has_second) settle(sums1);
        if (finished >= 0) warp_arrive(tile_empty(finished));
        finished = -1;
      };
      while (true) {
        const int stage = ring.stage;
        barrier_wait_in_place(tile_full(stage, 0), ring.phase, "tile_full");
        const BackwardTicket ticket = tile_ticket(stage);
        if (ticket.seen(warpgroup)) {
          uint32_t probabilities[steps][4];
          float scores[n], gradients[n];  // written by products: no register has them before
          multiply<0, Config::depth0>(scores, stage);
          barrier_wait_in_place(tile_full(stage, 1), ring.phase, "tile_full");
          if constexpr (Config::products > 1) multiply<1, Config::depth1>(gradients, stage);
          if (ticket.head != head) {
            head = ticket.head;
            if (head > 0) task = operands.task(tickets()->x, head);
            if constexpr (Config::block_words > 0) {
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                uint32_t row_words[Config::block_words];
                operands.block_words(row_words, task, smaller(tickets()->y + item_of_thread() + r * 8, this->block_items() - 1));
#pragma unroll
                for (int word = 0; word < Config::block_words; ++word) of_block[r][word] = row_words[word];
              }
            }
          }
          const int tile_first = ticket.tile * Config::tile, item = tickets()->y + item_of_thread();
          wgmma_wait<(Config::products > 1 ? 1 : 0)>();
          settle(scores);
          settle(sums0);
          if constexpr (Config::overlap) {
            if (finished >= 0) warp_arrive(tile_empty(finished));
            finished = stage;
          }
          const bool open = ticket.open(warpgroup);
          if (open) {
            recompute<false>(scores, probabilities, task, of_block, stage, item, tile_first);
          } else {
            recompute<true>(scores, probabilities, task, of_block, stage, item, tile_first);
          }
          if constexpr (has_second && Config::early) {
            accumulate<Config::slot1, Config::columns1>(sums1, probabilities, stage);
            wgmma_wait<1>();
          } else {
            wgmma_wait<0>();
          }
          if constexpr (Config::products > 1) settle(gradients);
          if (open) {
            differentiate<false>(scores, gradients, probabilities, task, of_block, stage, item, tile_first);
          } else {
            differentiate<true>(scores, gradients, probabilities, task, of_block, stage, item, tile_first);
          }
          pack(dscores, gradients);
          if constexpr (has_second && !Config::early) accumulate<Config::slot1, Config::columns1>(sums1, probabilities, stage);
          accumulate<Config::slot0, Config::columns0>(sums0, dscores, stage);
          if constexpr (!Config::overlap) {
            finished = stage;
            finish_products();
          }
        } else {
          if constexpr (Config::overlap) finish_products();
          barrier_wait_in_place(tile_full(stage, 1), ring.phase, "tile_full");
          warp_arrive(tile_empty(stage));
        }
        ring.next();
        if (ticket.ends()) break;
      }
      if constexpr (Config::overlap) finish_products();
      const Task of_results = operands.task(tickets()->x, 0);
      const int row = tickets()->y + int(threadIdx.x / 32) * 16;
      warp_arrive(block_empty());
      finish<0, Config::columns0>(of_results, row, sums0);
      if constexpr (has_second) finish<1, Config::columns1>(of_results, row, sums1);
    }
  }
  // A warp stages some columns of its 16 rows at a time, so that a lane has eight neighbours of a row.
  template <int number, int length>
  JITGEN_DEVICE void finish(const Task& task, int row, const float (&sums)[length / 2]) const {
    constexpr int staged = length < Shape::staged ? length : Shape::staged, runs = staged / 8;
    const int lane = threadIdx.x % 32, all = operands.template result_columns<number>();
    float* const rows = reinterpret_cast<float*>(memory + Shape::staging_at) + threadIdx.x / 32 * (16 * Shape::pitch);
    float* const corner = rows + lane / 4 * Shape::pitch + lane % 4 * 2;
#pragma unroll
    for (int chunk = 0; chunk < length / staged; ++chunk) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < runs; ++i) {
        const float* const from = sums + (chunk * runs + i) * 4;
        *reinterpret_cast<float2*>(corner + i * 8) = make_float2(from[0], from[1]);
        *reinterpret_cast<float2*>(corner + i * 8 + 8 * Shape::pitch) = make_float2(from[2], from[3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = lane; i < 16 * runs; i += 32) {
        const int m = i / runs, column = chunk * staged + i % runs * 8, live = smaller(8, all - column);
        const float4* const from = reinterpret_cast<const float4*>(rows + m * Shape::pitch + i % runs * 8);
        const float4 low = from[0], high = from[1];
        const float run[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (row + m < this->block_items() && live > 0) {
          operands.template results<number>(task, row + m, column, run, live);
        }
      }
    }
  }
};

template <class Config, class Operands>
JITGEN_DEVICE void attention_backward(const Operands& operands) {
  using Shape = BackwardShape<Config>;
  extern __shared__ __align__(1024) uint8_t attention_memory[];
  const BackwardKernel<Config, Operands> kernel{operands, attention_memory, shared_address(attention_memory)};
  if (threadIdx.x == 0) kernel.initialise();
  __syncthreads();
  next_kernel_may_start();
  previous_kernel_wait();
  if (threadIdx.x >= Shape::consumers) {
    registers_deal<Config::warpgroups, 1, true, Shape::copier_registers>();
    kernel.produce();
  } else {
    registers_deal<Config::warpgroups, 1, false, Shape::copier_registers>();
    kernel.consume();
  }
}

}  // namespace jitgen
