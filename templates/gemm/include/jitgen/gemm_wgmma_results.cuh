// From the sums of a wgmma tile whose rows are columns of the result and whose columns are its rows, tokens, to runs of
// columns of a token: of quantised weights, and of dense ones that have changed places with x. A warpgroup stages 64
// columns of some tokens in shared memory.
#pragma once

#include "jitgen/gemm_wgmma_walk.cuh"
#include "jitgen/lanes.cuh"

namespace jitgen {

// Writes this lane's sums of tokens first .. first + count, each times `factor`, to [token][column] at `to`.
// `swapped`: the halves of each run of eight are swapped in the last 32 columns, so that 16-byte reads of neighbouring
// runs are in different banks.
template <int first, int count, int pitch, bool swapped, class Sum, int size>
JITGEN_DEVICE void spread_tokens(Sum* to, const Sum (&acc)[size], Sum factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Sum* const corner = to + lane % 4 * 2 * pitch + warp * 16 + (lane / 4 ^ (swapped ? warp / 2 * 4 : 0));
#pragma unroll
  for (int i = 0; i < count / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) corner[(i * 8 + j % 2) * pitch + j / 2 * 8] = acc[(first / 8 + i) * 4 + j] * factor;
  }
}

// Computes results as their sums lie in registers, those of two tokens of a column at a time, and stages the results,
// which are half as many bytes as the sums: runs of eight columns of a token, which are permuted so that no two meet in a
// bank. Two chunks of tokens take turns in `staging`, 256 bytes for each token of a chunk, so that a warpgroup waits once
// for each. What an epilogue reads for columns or rows is read once for a chunk.
//
// Called by a warpgroup, which has `blocks` blocks of 64 columns from `first` on, of `tokens` tokens from `row` on, of
// which those below `rows` exist. `sum_of(block, i)` is this thread's sum number i of a block. `memory` is where shared
// memory begins, `base` its address, and `barrier` one of the warpgroup's own.
template <int blocks, int tokens, int chunk, class Epilogue, class SumOf>
JITGEN_DEVICE void finish_in_pairs_of_tokens(
    const Epilogue& epilogue, const SumOf& sum_of, int row, int rows, int below, int first, int columns, uint8_t* memory,
    uint32_t base, uint32_t staging, int barrier) {
  using One = typename Epilogue::template Results<1>;
  using Eight = typename Epilogue::template Results<8>;
  static_assert(sizeof(One) == 2 && sizeof(Eight) == 16, "one result of 16 bits");
  constexpr int turns = tokens / chunk, eights = chunk / 8;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  group_barrier<128>(barrier, "staging of a warpgroup");  // what the tile before has staged has been read
  int other = chunk * 128;
#pragma unroll
  for (int turn = 0; turn < blocks * turns; ++turn) {
    const int from = row + turn % turns * chunk, column = first + turn / turns * 64;
    if (from >= rows) continue;  // for all warps alike: ptxas has no uniform registers in loops around other branches
    uint32_t words[eights / 2][4];
#pragma unroll
    for (int i = 0; i < eights * 2; ++i) {
      const int n = smaller(column + warp * 16 + lane / 4 + i % 2 * 8, columns - 1);
      union {
        One two[2];
        uint32_t word;
      } pair;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto sum = sum_of(turn / turns, (turn % turns * eights + i / 2) * 4 + i % 2 * 2 + j);
        decltype(sum) sums[1][1] = {{sum}};
        const int m = smaller(from + i / 2 * 8 + lane % 4 * 2 + j, rows - 1);
        pair.two[j] = epilogue.template results<1>(below + m, n, sums, 1);
      }
      words[i / 4][i % 4] = pair.word;
    }
#pragma unroll
    for (int i = 0; i < eights / 2; ++i) {
      const int token = i * 16 + lane / 16 * 8 + lane % 8, run = (warp * 2 + lane / 8 % 2) ^ token % 8;
      store_matrices_transposed(base + staging + token * 128 + run * 16, words[i]);
    }
    group_barrier<128>(barrier, "staging of a warpgroup");
    const int n = column + thread % 8 * 8;
    Words<Eight> found[chunk / 16];  // all are read before the first is stored: one latency for all of them
#pragma unroll
    for (int i = 0; i < chunk / 16; ++i) {
      const int token = i * 16 + thread / 8, run = thread % 8 ^ token % 8;
      const uint4 words = *reinterpret_cast<const uint4*>(memory + staging + token * 128 + run * 16);
      found[i].word[0] = words.x, found[i].word[1] = words.y, found[i].word[2] = words.z, found[i].word[3] = words.w;
    }
#pragma unroll
    for (int i = 0; i < chunk / 16; ++i) {
      const int m = from + i * 16 + thread / 8;
      if (m < rows && n < columns) epilogue.template store<8>(below + m, n, found[i].whole, smaller(8, columns - n));
    }
    staging += other, other = -other;
  }
}

}  // namespace jitgen
