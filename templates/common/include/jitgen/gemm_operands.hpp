// The operands of a matmul: packed rows of x, quantised weights, dense weights. A kind of weights is a struct with
//   panel<Compute>()    elements of memory that packing needs
//   depth<Compute>()    elements of a row of x for it, padding included
//   span<Compute>()     neighbours in k whose sum of x it needs, where the arithmetic has an offset
//   sum(task)           writes the sums of a group of its blocks with some tiles of x to the task's buffer
#pragma once

#include "jitgen/gemm_dense.hpp"
#include "jitgen/gemm_matrix_tile.hpp"
#include "jitgen/gemm_tile.hpp"
#include "jitgen/parallel.hpp"

namespace jitgen {
namespace gemm {

constexpr int64_t group_blocks = 8;        // blocks that are packed, and whose sums are collected, as one group
constexpr int64_t wide_group_blocks = 64;  // the same for few rows, `wide_rows` at most
constexpr int64_t wide_rows = 8;
constexpr int64_t chunk_elements = 256;    // elements along k: a tile's x of this length fits the first-level cache

// Packed rows of x: tile t has rows share(rows, 1, t, tiles), of `depth` elements each.
template <class Compute>
struct Packed {
  typename Compute::Element* data;
  int64_t rows;
  int64_t depth;
  int64_t tiles;
  int32_t* totals;  // offset * sum of x, where the arithmetic has one: row m's of span s is totals[s * rows + m]
  int64_t span;     // neighbours in k that a total is of
  // Where elements are halved: how many of each span of a tile, where its first row has its total, and what is left of
  // them. There are places for all elements.
  int32_t* rest_counts = nullptr;
  Rest<typename Compute::Element>* rests = nullptr;

  inline int64_t spans() const { return (depth * Compute::per_element + span - 1) / span; }
  inline Range tile(int64_t t) const { return share(rows, 1, t, tiles); }
};

// A group of blocks whose sums are wanted; those of row m are at sums + m * row_stride.
template <class Compute>
struct Task {
  const Packed<Compute>& x;
  Range tiles;
  int64_t block;  // the first of `blocks` blocks
  int64_t blocks;
  typename Compute::Accumulator* sums;
  int64_t row_stride;
  typename Compute::Element* panel;
};

// Elements of a row of x that are packed at a time, and how many neighbours in k they are.
constexpr int64_t fill_elements = 1024;
template <class Compute>
constexpr int64_t most_span = fill_elements * Compute::per_element;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The codes of the formats with kernels of their own (gemm_weights.hpp): 64 bytes for 8 or 4 k's of a block.
template <int bits, bool zeroed_>
struct TiledCodes {
  using Zero = uint8_t;
  static constexpr bool zeroed = zeroed_;
  static constexpr int64_t unit_bytes = 64;
  static constexpr int64_t per_unit = unit_bytes * 8 / bits / block_rows;
  template <class Compute>
  using DecoderOf = Decoder<Compute, bits, zeroed_>;
};

// Quantised weights in the layout "cpu" (jitgen/quant/layouts/cpu.py): 16 rows are interleaved, with `Codes::unit_bytes`
// bytes of codes for `Codes::per_unit` k's; each group has scales and zero-points of 16 rows. With `group` 0 each row has
// one scale. A row may have a factor besides, which multiplies its sums at the end.
template <class Codes, int64_t group, class Scale>
struct QuantisedBlocks {
  using Zero = typename Codes::Zero;
  const uint8_t* codes;
  const Scale* scales;
  const Zero* zeros;
  int64_t k;
  const float* factors = nullptr;

  static constexpr bool zeroed = Codes::zeroed;
  static constexpr int64_t unit_bytes = Codes::unit_bytes;
  static constexpr int64_t per_unit = Codes::per_unit;

  // Neighbours in k that matrix registers multiply with one panel: whole groups.
  static constexpr int64_t together = round_up(4 * chunk_elements, group != 0 ? group : 1);

  template <class Compute>
  static constexpr int64_t panel() {
    constexpr int64_t blocks = detail::reads_codes<Compute>(0) ? group_blocks : 4;
    return detail::whole_rows<Compute>(0) ? blocks * together / Compute::per_element * block_rows : 0;
  }
  template <class Compute>
  int64_t depth() const {
    return round_up(k, group != 0 ? group : 64) / Compute::per_element;
  }

  // Neighbours in k whose sums are integers; the rows of x are packed in pieces of `most_span` of them.
  template <class Compute>
  static constexpr int64_t span() {
    return group == 0 ? 1024 : most_span<Compute> % group == 0 ? group : group % 32 == 0 ? 32 : 16;
  }

  // The zero-points at `at`, of codes that tiles read as they are.
  inline const uint8_t* zeros_of_codes(int64_t at) const {
    if constexpr (zeroed) return zeros + at;
    return nullptr;
  }

  // Sums products with quantised rows of x, whose tiles read the codes as they are.
  template <class Compute>
  void sum_codes(const Task<Compute>& task) const {
    if constexpr (detail::whole_rows<Compute>(0)) {
      for (int64_t b = 0; b < task.blocks; b += group_blocks) sum_matrices(task, b);
      return;
    }
    constexpr int64_t span_units = span<Compute>() / per_unit, per_group = group / per_unit;
    using Tiles = detail::CodeTiles<Compute, span_units, Scale>;
    const int64_t elements = per_unit / Compute::per_element, units = depth<Compute>() / elements;
    const int64_t groups = group != 0 ? units / per_group : 1;
    const int64_t tiles = task.tiles.end - task.tiles.begin;
    const int64_t chunk = tiles == 1 ? units : round_up(1024 / per_unit, group != 0 ? per_group : span_units);
    const char* const first_codes = reinterpret_cast<const char*>(codes) + task.block * units * unit_bytes;
    for (int64_t unit = 0; unit < units; unit += chunk) {
      const int64_t here = units - unit < chunk ? units - unit : chunk;
      for (int64_t b = 0; b < task.blocks; ++b) {
        const char* const w = first_codes + (b * units + unit) * unit_bytes;
        const int64_t at = ((task.block + b) * groups + unit / (group != 0 ? per_group : units)) * block_rows;
        // All tiles read these codes in turn, and each prefetches its share of the next ones.
        const char* const next = b + 1 < task.blocks ? w + units * unit_bytes : first_codes + (unit + here) * unit_bytes;
        for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
          const Range rows = task.x.tile(t), share_of_next = share(here * unit_bytes, 1, t - task.tiles.begin, tiles);
          const int64_t fact = unit / span_units * task.x.rows + rows.begin;
          Tiles::of(rows.end - rows.begin)(
              w, task.x.data + rows.begin * task.x.depth + unit * elements * (rows.end - rows.begin), here, per_group,
              scales + at, zeros_of_codes(at),
              {task.x.totals + fact, task.x.rest_counts + fact, task.x.rests + fact * span_units * elements,
               task.x.rows},
              task.sums + rows.begin * task.row_stride + b * block_rows, task.row_stride, unit == 0,
              {tiles == 1 ? w + detail::ahead : next + share_of_next.begin, unit_bytes / tiles});
        }
      }
    }
  }

  // The same by matrix registers, for a group of blocks from `start` on, whose codes become bytes first.
  template <class Compute>
  void sum_matrices(const Task<Compute>& task, int64_t start) const {
    constexpr int64_t elements = per_unit / Compute::per_element, element_bytes = 4;
    constexpr int64_t together = round_up(4 * chunk_elements, group != 0 ? group : span<Compute>()) / per_unit;
    constexpr bool packed = Compute::steps > 1;
    const int64_t blocks = task.blocks - start < group_blocks ? task.blocks - start : group_blocks;
    const int64_t units = depth<Compute>() / elements, groups = group != 0 ? units * per_unit / group : 1;
    for (int64_t unit = 0; unit < units; unit += together) {
      const int64_t here = units - unit < together ? units - unit : together;
      const int64_t panel_elements = here * elements * block_rows;
      const auto codes_of = [&](int64_t b) { return codes + ((task.block + start + b) * units + unit) * unit_bytes; };
      for (int64_t b = 0; packed && b < blocks; ++b) {
        detail::codes_to_bytes<Compute>(codes_of(b), here, task.panel + b * panel_elements);
      }
      for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
        const Range rows = task.x.tile(t);
        const detail::MatrixRegisters<Compute> registers(rows);
        for (int64_t b = 0; b < blocks; b += 2) {
          const void* const w = packed ? static_cast<const void*>(task.panel + b * panel_elements) : codes_of(b);
          const int64_t first_group = group != 0 ? unit * per_unit / group : 0;
          const int64_t at = ((task.block + start + b) * groups + first_group) * block_rows;
          detail::code_matrices<span<Compute>() / Compute::per_element, zeroed>(
              rows.end - rows.begin, b + 1 < blocks, static_cast<const char*>(w),
              packed ? panel_elements * element_bytes : units * unit_bytes,
              reinterpret_cast<const char*>(task.x.data + rows.begin * task.x.depth + unit * elements),
              task.x.depth * element_bytes, here * elements, group / Compute::per_element, scales + at,
              zeros_of_codes(at), groups * block_rows,
              task.x.totals + unit * per_unit / span<Compute>() * task.x.rows + rows.begin, task.x.rows,
              task.sums + rows.begin * task.row_stride + (start + b) * block_rows, task.row_stride, unit == 0);
        }
      }
    }
  }

  template <class Compute>
  void sum(const Task<Compute>& task) const {
    if constexpr (detail::reads_codes<Compute>(0)) {
      sum_codes(task);
    } else if constexpr (detail::whole_rows<Compute>(0)) {
      sum_pairs(task);
    } else {
      sum_decoded_in_tiles(task);
    }
  }

  // Sums products of pairs by matrix registers: two blocks at a time are decoded to a panel, which all tiles then read.
  // A single tile reads it group by group, so that the next group is decoded while this one is multiplied.
  template <class Compute>
  void sum_pairs(const Task<Compute>& task) const {
    constexpr int64_t most = together / Compute::per_element;
    const int64_t elements = depth<Compute>(), per_group = group != 0 ? group_of<Compute>() : elements;
    if (elements == 0) return;  // the sums are zeros
    const bool alone = task.tiles.end - task.tiles.begin == 1;
    const int64_t chunk = alone && group != 0 ? per_group : most;
    const int64_t next_blocks = 2 * elements * Compute::per_element / per_unit * unit_bytes;  // bytes to the next two
    const detail::MatrixRegisters<Compute> registers(alone ? task.x.tile(task.tiles.begin) : Range{0, 0});
    for (int64_t b = 0; b < task.blocks; b += 2) {
      const bool pair = b + 1 < task.blocks;
      auto* panel = task.panel;
      for (int64_t e = 0; e < elements; e += chunk) {
        const int64_t here = elements - e < chunk ? elements - e : chunk;
        const int64_t at = ((task.block + b) * elements + e) / per_group * block_rows;
        const int64_t scales_stride = elements / per_group * block_rows;
        for (int half = 0; half < (pair ? 2 : 1); ++half) {
          decode<Compute>((task.block + b + half) * elements + e, here, at + half * scales_stride,
                          panel + half * here * block_rows, next_blocks);
        }
        for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
          const Range rows = task.x.tile(t);
          if (!alone) registers.configure(rows);
          detail::pair_matrices(rows.end - rows.begin, pair, reinterpret_cast<const char*>(panel),
                                here * block_rows * 4,
                                reinterpret_cast<const char*>(task.x.data + rows.begin * task.x.depth + e),
                                task.x.depth * 4, here, here < per_group ? here : per_group, scales + at,
                                scales_stride, task.sums + rows.begin * task.row_stride + b * block_rows,
                                task.row_stride, e == 0);
        }
        if (alone) panel = panel == task.panel ? panel + 2 * chunk * block_rows : task.panel;
      }
    }
    if (factors != nullptr) multiply_by_factors(task);
  }

  // Elements of a group; where a row has one scale, as many as the layout pads k to.
  template <class Compute>
  static constexpr int64_t group_of() {
    return (group != 0 ? group : 64) / Compute::per_element;
  }

  // Whether decoded numbers are scaled; pairs stay whole numbers, which are exact.
  template <class Compute>
  static constexpr bool scaled_here = Compute::per_element == 1;

  // Decodes `count` elements of a block, the first of which is number `from` of all blocks' elements. Its scales and
  // zero-points are at `at`. Codes that lie `ahead` bytes on are prefetched.
  template <class Compute>
  void decode(int64_t from, int64_t count, int64_t at, typename Compute::Element* to, int64_t ahead = 0) const {
    using Decoder = typename Codes::template DecoderOf<Compute>;
    using Decode = typename Decoder::template type<Compute::most_rows>;
    constexpr int elements = Decoder::elements;
    constexpr int vectors = Compute::vectors;
    const char* w = reinterpret_cast<const char*>(codes) + from / elements * Decode::bytes;
    Decode decode;
    const int64_t per_group = group != 0 ? group_of<Compute>() : count;
    for (int64_t done = 0; done < count; done += per_group, at += block_rows) {
      typename Compute::Vector scale[vectors];
      if constexpr (scaled_here<Compute>) {
        for (int v = 0; v < vectors; ++v) widen(scales + at + v * (block_rows / vectors), scale[v]);
      }
      decode.group(Codes::zeroed ? zeros + at : nullptr);
      for (int64_t unit = 0; unit < per_group / elements; ++unit) {
        if (ahead != 0) __builtin_prefetch(w + ahead, 0, 2);
        decode.open(w);
#pragma GCC unroll 32
        for (int step = 0; step < Decode::steps; ++step) {
          typename Compute::Weights weights[vectors];
          decode.take(step, weights);
          for (int v = 0; v < vectors; ++v) {
            if constexpr (scaled_here<Compute>) weights[v] *= scale[v];
            store_vector(to + Decode::element(step) * block_rows + v * (block_rows / vectors), weights[v]);
          }
        }
        w += Decode::bytes;
        to += elements * block_rows;
      }
    }
  }

  template <class Compute>
  void sum_decoded_in_tiles(const Task<Compute>& task) const {
    using Tiles = detail::Tiles<Compute, typename Codes::template DecoderOf<Compute>, Scale>;
    constexpr int64_t elements = per_unit / Compute::per_element;
    constexpr int64_t per_group = group != 0 ? group / per_unit : 64;
    const int64_t units = depth<Compute>() / elements;
    const int64_t groups = group != 0 ? units / per_group : 1;
    // A single tile reads the weights in order. Several tiles in turn read as much of them as the cache holds.
    const bool alone = task.tiles.end - task.tiles.begin == 1;
    // A row's one scale applies to sums of int8 products: those of 2^16 k's are an int32.
    constexpr int64_t most_units = same<typename Compute::Vector, Ints> && group == 0 ? 65536 / per_unit : 0;
    const int64_t chunk = !alone ? round_up(chunk_elements / elements, per_group)
                          : most_units != 0 && units > most_units ? most_units : units;
    for (int64_t unit = 0; unit < units; unit += chunk) {
      const int64_t here = units - unit < chunk ? units - unit : chunk;
      const int64_t first_group = group != 0 ? unit / per_group : 0;
      for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
        const Range rows = task.x.tile(t);
        const int64_t count = rows.end - rows.begin;
        const auto tile = Tiles::of(count);
        const auto* const x = task.x.data + rows.begin * task.x.depth + unit * elements * count;
        for (int64_t b = 0; b < task.blocks; ++b) {
          const int64_t block = task.block + b;
          const int64_t at = (block * groups + first_group) * block_rows;
          tile(reinterpret_cast<const char*>(codes) + (block * units + unit) * unit_bytes, x, here,
               group != 0 ? per_group : here, scales + at, zeroed ? zeros + at : nullptr,
               task.sums + rows.begin * task.row_stride + b * block_rows, task.row_stride, unit == 0);
        }
      }
    }
    if (factors != nullptr) multiply_by_factors(task);
  }

  // Multiplies the sums of a task by the factors of their rows.
  template <class Compute>
  void multiply_by_factors(const Task<Compute>& task) const {
    const Range rows = {task.x.tile(task.tiles.begin).begin, task.x.tile(task.tiles.end - 1).end};
    const float* const factor = factors + task.block * block_rows;
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      auto* const sums = task.sums + m * task.row_stride;
      for (int64_t n = 0; n < task.blocks * block_rows; ++n) sums[n] *= factor[n];
    }
  }
};

template <int bits, int64_t group, bool zeroed, class Scale>
using Quantised = QuantisedBlocks<TiledCodes<bits, zeroed>, group, Scale>;

// The dimension along which dense weights are contiguous.
enum class Along { k, n, neither };

// Weights as a tensor has them. Their strides are arbitrary, but for the one that `along` says is 1.
template <class Storage, Along along>
struct Dense {
  const Storage* data;
  int64_t n;
  int64_t k;
  int64_t stride_n;
  int64_t stride_k;

  template <class Compute>
  static constexpr int64_t panel() {
    return group_blocks * chunk_elements * block_rows;
  }
  template <class Compute>
  int64_t depth() const {
    constexpr int64_t unit = detail::whole_rows<Compute>(0) ? detail::matrix_step : ready_steps;
    return round_up(round_up(k, Compute::per_element) / Compute::per_element, unit);
  }
  template <class Compute>
  static constexpr int64_t span() {
    return most_span<Compute>;
  }

  template <class Compute>
  void sum(const Task<Compute>& task) const {
    sum_offset(task);
    if constexpr (detail::offset_of<Compute>(0) != 0) {
      const Packed<Compute>& x = task.x;
      const Range rows = {x.tile(task.tiles.begin).begin, x.tile(task.tiles.end - 1).end};
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        int32_t total = 0;
        for (int64_t s = 0; s < x.spans(); ++s) total += x.totals[s * x.rows + m];
        auto* const sums = task.sums + m * task.row_stride;
        for (int64_t n = 0; n < task.blocks * block_rows; ++n) sums[n] -= total;
      }
    }
  }

 private:
  // Sums the products of x and the weights with their offset.
  template <class Compute>
  void sum_offset(const Task<Compute>& task) const {
    const int64_t row = task.block * block_rows;
    const int64_t columns = n - row < task.blocks * block_rows ? n - row : task.blocks * block_rows;
    const Storage* const from = data + row * stride_n;
    constexpr bool adds_freely = detail::summed_as<Compute, 0>(0) == 0 && !detail::whole_rows<Compute>(0);
    if constexpr (along == Along::k) {
      if (adds_freely && task.x.rows == 1 && k > 0) {
        for (int64_t c = 0; c < columns; c += block_rows) {
          dot_block<Compute>(from + c * stride_n, stride_n, columns - c < block_rows ? columns - c : block_rows, k,
                             task.x.data, task.sums + c);
        }
        return;
      }
    }
    if constexpr (along == Along::n) {
      if (adds_freely && task.x.rows <= wide_rows && task.x.tiles == 1) {
        return add_block<Compute>(from, stride_k, columns, k, task.x.data, task.x.rows, task.sums, task.row_stride);
      }
    }
    for (int64_t b = 0; b < task.blocks; b += group_blocks) sum_packed(task, b);
  }

  // Computes the group of blocks from `start` on through panels.
  template <class Compute>
  void sum_packed(const Task<Compute>& task, int64_t start) const {
    const int64_t blocks = task.blocks - start < group_blocks ? task.blocks - start : group_blocks;
    const int64_t elements = depth<Compute>();
    for (int64_t e = 0; e < elements; e += chunk_elements) {
      const int64_t here = elements - e < chunk_elements ? elements - e : chunk_elements;
      const int64_t k0 = e * Compute::per_element;
      const int64_t count = k - k0 < here * Compute::per_element ? k - k0 : here * Compute::per_element;
      const int64_t first_row = (task.block + start) * block_rows;
      const int64_t there = (n - first_row) / block_rows;
      const int64_t whole = along != Along::n ? 0 : there < blocks ? there : blocks;
      if constexpr (along == Along::n) {
        pack_blocks<Compute>(data + first_row + k0 * stride_k, stride_k, whole, count, here, task.panel);
      }
      for (int64_t b = whole; b < blocks; ++b) {
        const int64_t row = first_row + b * block_rows;
        pack_block<Compute, along == Along::k>(data + row * stride_n + k0 * stride_k, stride_n, stride_k,
                            n - row < block_rows ? n - row : block_rows, count, here,
                            task.panel + b * here * block_rows);
      }
      for (int64_t t = task.tiles.begin; t < task.tiles.end; ++t) {
        const Range rows = task.x.tile(t);
        const int64_t count = rows.end - rows.begin;
        auto* const sums = task.sums + rows.begin * task.row_stride + start * block_rows;
        if constexpr (detail::whole_rows<Compute>(0)) {
          const detail::MatrixRegisters<Compute> registers(rows);
          constexpr int64_t bytes = sizeof(typename Compute::Element);
          for (int64_t b = 0; b < blocks; b += 2) {
            detail::matrix_sums<detail::dot_of<Compute>()>(
                count, b + 1 < blocks, reinterpret_cast<const char*>(task.panel + b * here * block_rows),
                here * block_rows * bytes,
                reinterpret_cast<const char*>(task.x.data + rows.begin * task.x.depth + e), task.x.depth * bytes,
                here / detail::matrix_step, sums + b * block_rows, task.row_stride * bytes, e != 0);
          }
        } else {
          const auto tile = detail::Tiles<Compute, Panel<Compute>, Unscaled>::of(count);
          for (int64_t b = 0; b < blocks; ++b) {
            tile(reinterpret_cast<const char*>(task.panel + b * here * block_rows),
                 task.x.data + rows.begin * task.x.depth + e * count, here / ready_steps, here / ready_steps, nullptr,
                 nullptr, sums + b * block_rows, task.row_stride, e == 0);
          }
        }
      }
    }
  }
};

}  // namespace gemm
}  // namespace jitgen
