// Quantised weights for many rows of x: a group of blocks is decoded once to a panel, which all tiles then read.
//
// A tile that decodes in registers does so again for each of its neighbours, which costs more than half of the
// arithmetic where tiles have six rows (AVX2). Panels are as those of dense weights. Floats are scaled while they are
// decoded. Pairs of bfloat16 stay whole numbers, which are exact, and the tiles apply the scales to sums of groups.
#pragma once

#include "jitgen/gemm.hpp"

namespace jitgen {
namespace gemm {

template <class Codes, int64_t group, class Scale>
struct DecodedBlocks : QuantisedBlocks<Codes, group, Scale> {
  using Base = QuantisedBlocks<Codes, group, Scale>;

  // Elements of k that a panel holds: whole groups, where groups are scaled by the tiles.
  static constexpr int64_t panel_k = group > chunk_elements ? group : chunk_elements;

  template <class Compute>
  static constexpr int64_t panel() {
    return detail::whole_rows<Compute>(0) ? Base::template panel<Compute>() : group_blocks * panel_k * block_rows;
  }

  template <class Compute>
  void sum(const Task<Compute>& task) const {
    if constexpr (detail::reads_codes<Compute>(0) || detail::whole_rows<Compute>(0)) {
      return Base::sum(task);
    } else {
      for (int64_t b = 0; b < task.blocks; b += group_blocks) sum_decoded(task, b);
    }
    if (this->factors != nullptr) this->multiply_by_factors(task);
  }

 private:
  // Computes the group of blocks from `start` on.
  template <class Compute>
  void sum_decoded(const Task<Compute>& task, int64_t start) const {
    constexpr bool scaled_here = Base::template scaled_here<Compute>;
    constexpr int64_t group_elements = Base::template group_of<Compute>();
    using Applied = Select<scaled_here, Unscaled, Scale>;
    using Tiles = detail::Tiles<Compute, Panel<Compute>, Applied>;
    constexpr int64_t chunk = panel_k / group_elements * group_elements;
    const int64_t blocks = task.blocks - start < group_blocks ? task.blocks - start : group_blocks;
    const int64_t elements = this->template depth<Compute>();
    const int64_t groups = group != 0 ? elements / group_elements : 1;
    for (int64_t e = 0; e < elements; e += chunk) {
      const int64_t here = elements - e < chunk ? elements - e : chunk;
      const int64_t first_group = group != 0 ? e / group_elements : 0;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t block = task.block + start + b;
        this->template decode<Compute>(block * elements + e, here, (block * groups + first_group) * block_rows,
                                       task.panel + b * here * block_rows);
      }
      for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
        const Range rows = task.x.tile(t);
        const int64_t count = rows.end - rows.begin;
        const auto tile = Tiles::of(count);
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t at = ((task.block + start + b) * groups + first_group) * block_rows;
          const int64_t per_group = group != 0 && !scaled_here ? group_elements : here;
          tile(reinterpret_cast<const char*>(task.panel + b * here * block_rows),
               task.x.data + rows.begin * task.x.depth + e * count, here / ready_steps, per_group / ready_steps,
               scales_at<Applied>(at), nullptr, task.sums + rows.begin * task.row_stride + (start + b) * block_rows,
               task.row_stride, e == 0);
        }
      }
    }
  }

  template <class Applied>
  const Applied* scales_at(int64_t at) const {
    if constexpr (same<Applied, Unscaled>) {
      return nullptr;
    } else {
      return this->scales + at;
    }
  }
};

template <int bits, int64_t group, bool zeroed, class Scale>
using Decoded = DecodedBlocks<TiledCodes<bits, zeroed>, group, Scale>;

}  // namespace gemm
}  // namespace jitgen
