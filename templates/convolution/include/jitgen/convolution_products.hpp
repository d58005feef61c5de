// Convolution by tiles of packed filters and packed pixels.
#pragma once

#include "jitgen/convolution_images.hpp"
#include "jitgen/convolution_panels.hpp"

namespace jitgen {
namespace convolution {
namespace detail {

// A run of pixels that the epilogue takes at once.
struct Segment {
  int64_t row, pixel[3], start, count;
};

struct Team {
  int64_t thread, threads;
  inline void wait() const {
    if (threads > 1) {
#pragma omp barrier
    }
  }
};

template <class Compute>
JITGEN_INLINE gemm::Packed<Compute> packed_of(typename Compute::Element* data, int64_t rows, int64_t depth) {
  return {data, rows, depth, (rows + Compute::tile_rows - 1) / Compute::tile_rows};
}

// Computes blocks of pixels of the images [first, last), whose copies are at `images`, by some tiles of the filters.
template <class Compute, class Epilogue>
void multiply_blocks(const Problem& problem, const Phase& phase, const Copies& copies, int64_t group, Range images,
                     const typename Compute::Element* data, int64_t behind, const int64_t* elements,
                     const gemm::Packed<Compute>& filters, Range tiles, Range blocks,
                     typename Compute::Accumulator* sums, typename Compute::Element* panel, const Epilogue& epilogue) {
  using Tiles = gemm::detail::Tiles<Compute, gemm::Panel<Compute>, gemm::Unscaled>;
  constexpr int64_t row_stride = (group_blocks + 1) * block_rows;
  const int64_t columns = (images.end - images.begin) * phase.columns;
  const Range rows = {filters.tile(tiles.begin).begin, filters.tile(tiles.end - 1).end};
  int64_t pixels[group_blocks * block_rows];
  Segment segments[group_blocks * block_rows];
  const bool flat = problem.flat;
  int64_t furthest = 0;
  for (int64_t k = 0; k < phase.depth && copies.in_place; ++k) {
    furthest = elements[k] > furthest ? elements[k] : furthest;
  }
  for (int64_t block = blocks.begin; block < blocks.end; block += group_blocks) {
    const int64_t count = blocks.end - block < group_blocks ? blocks.end - block : group_blocks;
    const int64_t first = block * block_rows;
    const int64_t live = columns - first < count * block_rows ? columns - first : count * block_rows;
    int64_t segment_count = 0;
    int64_t row = first / phase.columns, number = first % phase.columns;
    int64_t q2 = number % phase.pixels[2], q1 = number / phase.pixels[2] % phase.pixels[1];
    int64_t q0 = number / (phase.pixels[1] * phase.pixels[2]);
    for (int64_t j = 0; j < count * block_rows; ++j) {
      if (j >= live) {  // what follows the last pixel is read, and of no consequence
        pixels[j] = pixels[j - 1] + (j % block_rows != 0);
        if (j % block_rows == 0) pixels[j] = 0;
        continue;
      }
      pixels[j] = row * copies.image + copies.pixel(problem, q0, q1, q2);
      const bool starts = j == 0 || (flat ? q0 + q1 + q2 == 0 : q2 == 0);
      if (starts) {
        const int64_t linear = (q0 * phase.pixels[1] + q1) * phase.pixels[2] + q2;
        Segment& segment = segments[segment_count++];
        segment = {images.begin + row, {q0, q1, q2}, j, 0};
        if (flat) {
          segment.pixel[0] = segment.pixel[1] = 0;
          segment.pixel[2] = linear;
        } else {
          for (int d = 0; d < 3; ++d) segment.pixel[d] = phase.first[d] + segment.pixel[d] * phase.step[d];
        }
      }
      ++segments[segment_count - 1].count;
      if (++q2 == phase.pixels[2]) {
        q2 = 0;
        if (++q1 == phase.pixels[1]) {
          q1 = 0;
          if (++q0 == phase.pixels[0]) {
            q0 = 0;
            ++row;
          }
        }
      }
    }
    if (phase.depth == 0) __builtin_memset(sums, 0, filters.rows * row_stride * sizeof(*sums));
    for (int64_t e = 0; e < phase.padded; e += gemm::chunk_elements) {
      const int64_t here = phase.padded - e < gemm::chunk_elements ? phase.padded - e : gemm::chunk_elements;
      const int64_t there = phase.depth - e < here ? phase.depth - e : here;
      for (int64_t b = 0; b < count; ++b) {
        pack_pixels(data, behind, furthest, pixels + b * block_rows, elements + e, there, here,
                    panel + b * here * block_rows);
      }
      for (int64_t t = tiles.begin; t < tiles.end; ++t) {
        const Range own = filters.tile(t);
        const int64_t height = own.end - own.begin;
        const auto tile = Tiles::of(height);
        for (int64_t b = 0; b < count; ++b) {
          tile(reinterpret_cast<const char*>(panel + b * here * block_rows),
               filters.data + own.begin * filters.depth + e * height, here / gemm::ready_steps,
               here / gemm::ready_steps, nullptr, nullptr, sums + own.begin * row_stride + b * block_rows, row_stride,
               e == 0);
        }
      }
    }
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      for (int64_t s = 0; s < segment_count; ++s) {
        const Segment& segment = segments[s];
        epilogue(segment.row, group, m, segment.pixel[0], segment.pixel[1], segment.pixel[2],
                 flat ? 1 : phase.step[2], segment.count, sums + m * row_stride + segment.start);
      }
    }
  }
}

}  // namespace detail
}  // namespace convolution
}  // namespace jitgen
