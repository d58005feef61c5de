// Convolution on the host: y[n, g, o, p] = epilogue(sum over c, k of x[n, g, c, i] * w[g, o, c, k]), where in each of
// three dimensions i = (p * stride + k * dilation + offset) / spread; elements that are not there count as zero.
//
// An image is copied once with its padding, and its innermost dimension divided by its index modulo the stride, so that
// neighbouring pixels read neighbouring elements. An element's address is then a sum: of what depends on the pixel, and
// of what depends on (c, k). A panel of 16 pixels for some (c, k) is packed by these sums, and multiplied by the packed
// filters as in a matrix product (gemm_tile.hpp); the windows are never in memory as a whole. Where a group has few
// outputs, such as in a depthwise convolution, nothing is packed: vectors of pixels are read from the copy where they
// are, and a thread computes one image of a group at a time.
//
// A spread (of a transposed convolution, or the gradient of a strided one) divides the pixels into phases by their
// index modulo the spread. Each phase is a convolution without a spread by some of the filter's elements.
//
// Sums have the same order for every number of threads.
#pragma once

#include "jitgen/convolution_products.hpp"
#include "jitgen/convolution_stencil.hpp"

namespace jitgen {
namespace convolution {

// The whole convolution, on `threads` threads.
template <class Compute, class Storage, class Epilogue>
void convolve(const Problem& problem, const Storage* x, const Storage* w, const Epilogue& epilogue, int32_t threads) {
  using Element = typename Compute::Element;
  using Accumulator = typename Compute::Accumulator;
  constexpr int64_t page = 4096;
  if (problem.rows * problem.groups * problem.outputs * problem.pixels[0] * problem.pixels[1] * problem.pixels[2] == 0) {
    return;
  }
  const int64_t count = problem.spread[0] * problem.spread[1] * problem.spread[2];
  int64_t depth = 0, padded = 0;
  for (int64_t p = 0; p < count; ++p) {
    const Phase phase = detail::phase_of(problem, p);
    depth += phase.depth;
    padded += phase.padded;
  }
  const bool stencil = problem.outputs <= stencil_outputs && problem.rows * problem.groups >= threads;
  const bool apart = stencil || problem.groups >= threads;  // each thread computes groups, or images, of its own
  const int64_t teams = apart ? threads : 1;
  // Memory of all: phases and their tables; of each team: copies and filters; of each thread: sums and a panel.
  const int64_t phases_bytes = round_up(count * sizeof(Phase), page);
  const int64_t tables_bytes = round_up(depth * sizeof(int64_t), page);
  char* const shared = static_cast<char*>(needed_memory(page, phases_bytes + tables_bytes));
  if (shared == nullptr) return;
  Phase* const phases = reinterpret_cast<Phase*>(shared);
  int64_t* const tables = reinterpret_cast<int64_t*>(shared + phases_bytes);
  for (int64_t p = 0; p < count; ++p) phases[p] = detail::phase_of(problem, p);
  Copies copies = Copies::of(problem, phases, count);
  if constexpr (same<Storage, Element>) {
    if (!stencil) copies.read_in_place(problem);
  }
  for (int64_t p = 0, at = 0; p < count; at += phases[p++].depth) {
    if (phases[p].depth != 0) detail::element_table(problem, phases[p], copies, tables + at);
  }
  int64_t extent = 1;
  const int64_t counts[] = {problem.rows, problem.groups, problem.channels,
                            problem.image[0], problem.image[1], problem.image[2]};
  for (int d = 0; d < 6; ++d) extent += (counts[d] - 1) * problem.x[d];
  const int64_t image_bytes = copies.in_place ? 0 : copies.image * sizeof(Element);
  int64_t together = image_bytes != 0 ? copied_bytes / image_bytes : problem.rows;
  together = stencil || together < 1 ? 1 : together < problem.rows ? together : problem.rows;
  const int64_t copies_bytes = round_up(together * image_bytes + slack * sizeof(Element), page);
  const int64_t filters_bytes = round_up(problem.outputs * padded * sizeof(Element), page);
  const int64_t sums_bytes =
      stencil ? 0 : round_up(problem.outputs * (group_blocks + 1) * block_rows * sizeof(Accumulator), page);
  const int64_t panel_bytes =
      stencil ? 0 : round_up((group_blocks * gemm::chunk_elements * block_rows + slack) * sizeof(Element), page);
  const int64_t team_bytes = copies_bytes + filters_bytes, own_bytes = sums_bytes + panel_bytes;
  char* const memory = static_cast<char*>(needed_memory(page, teams * team_bytes + threads * own_bytes));
  if (memory == nullptr) {
    __builtin_free(shared);
    return;
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = threads > 1 ? omp_get_thread_num() : 0;
    const int64_t present = threads > 1 ? omp_get_num_threads() : 1;  // may be fewer than asked for
    const detail::Team team = apart ? detail::Team{0, 1} : detail::Team{thread, present};
    char* const own = memory + (apart ? thread * team_bytes : 0);
    Element* const images = reinterpret_cast<Element*>(own);
    Element* const filters = reinterpret_cast<Element*>(own + copies_bytes);
    char* const buffers = memory + teams * team_bytes + thread * own_bytes;
    Accumulator* const sums = reinterpret_cast<Accumulator*>(buffers);
    Element* const panel = reinterpret_cast<Element*>(buffers + sums_bytes);
    const int64_t units = stencil ? problem.groups * problem.rows : problem.groups;
    const Range mine = apart ? share(units, 1, thread, present) : Range{0, units};
    int64_t packed_group = -1;
    for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
      const int64_t group = stencil ? unit / problem.rows : unit;
      if (group != packed_group) {
        packed_group = group;
        for (int64_t p = 0, at = 0; p < count; ++p) {
          const Phase& phase = phases[p];
          const detail::Filters<Storage> rows(problem, phase, w + group * problem.w[0]);
          Element* const to = filters + problem.outputs * at;
          at += phase.padded;
          if (phase.depth == 0) continue;
          if (!stencil) {
            gemm::detail::pack(rows, detail::packed_of<Compute>(to, problem.outputs, phase.padded), 0, phase.depth,
                               team.thread, team.threads);
            continue;
          }
          Storage buffer[256];
          for (int64_t o = 0; o < problem.outputs; ++o) {
            for (int64_t k = 0; k < phase.depth; k += 256) {
              const int64_t here = phase.depth - k < 256 ? phase.depth - k : 256;
              rows.fill(o, k, here, buffer);
              for (int64_t j = 0; j < here; ++j) to[o * phase.depth + k + j] = Copies::convert<Element>(buffer + j);
            }
          }
        }
      }
      const Storage* const group_x = x + group * problem.x[1];
      if (stencil) {
        const int64_t row = unit % problem.rows;
        copies.fill(problem, group_x + row * problem.x[0], 0, problem.channels, images);
        for (int64_t p = 0, at = 0, table = 0; p < count; ++p) {
          if (phases[p].columns != 0) {
            detail::stencil_image<Compute>(problem, phases[p], copies, group, row, images, tables + table,
                                           filters + problem.outputs * at, epilogue);
          }
          at += phases[p].padded;
          table += phases[p].depth;
        }
        continue;
      }
      for (int64_t first = 0; first < problem.rows; first += together) {
        const Range range = {first, problem.rows - first < together ? problem.rows : first + together};
        const int64_t copied_channels = copies.in_place ? 0 : (range.end - range.begin) * problem.channels;
        const Range copied = share(copied_channels, 1, team.thread, team.threads);
        for (int64_t number = copied.begin; number < copied.end;) {
          const int64_t row = number / problem.channels, channel = number % problem.channels;
          const int64_t rest = copied.end - number;
          const int64_t end = channel + rest < problem.channels ? channel + rest : problem.channels;
          copies.fill(problem, group_x + (first + row) * problem.x[0], channel, end, images + row * copies.image);
          number += end - channel;
        }
        const Element* data = images;
        int64_t behind = INT64_MAX;
        if constexpr (same<Storage, Element>) {
          if (copies.in_place) {
            data = group_x + first * problem.x[0] + copies.start();
            behind = extent - (data - x);
          }
        }
        team.wait();
        for (int64_t p = 0, at = 0, table = 0; p < count; ++p) {
          const Phase& phase = phases[p];
          const auto packed = detail::packed_of<Compute>(filters + problem.outputs * at, problem.outputs, phase.padded);
          const int64_t columns = (range.end - range.begin) * phase.columns;
          const int64_t blocks = (columns + block_rows - 1) / block_rows;
          const gemm::detail::Grid grid = gemm::detail::grid_of(blocks, packed.tiles, team.threads);
          if (team.thread < grid.across * grid.down) {
            const Range own_blocks = share(blocks, 1, team.thread % grid.across, grid.across);
            const Range tiles = share(packed.tiles, 1, team.thread / grid.across, grid.down);
            if (tiles.begin < tiles.end && own_blocks.begin < own_blocks.end) {
              detail::multiply_blocks<Compute>(problem, phase, copies, group, range, data, behind, tables + table,
                                               packed, tiles, own_blocks, sums, panel, epilogue);
            }
          }
          at += phase.padded;
          table += phase.depth;
        }
        team.wait();
      }
    }
  }
  __builtin_free(memory);
  __builtin_free(shared);
}

}  // namespace convolution
}  // namespace jitgen
