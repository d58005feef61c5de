// Convolution of groups with few outputs: vectors of pixels are read from the copy of an image, and nothing is packed.
#pragma once

#include "jitgen/convolution_images.hpp"

namespace jitgen {
namespace convolution {
namespace detail {

// Sums of `lines` runs of `vectors` vectors of pixels: products of elements at `elements` from each run on and of the
// filter's.
template <int lines, int vectors, class Compute>
void stencil(const typename Compute::Element* const* runs, const int64_t* elements,
             const typename Compute::Element* filter, int64_t depth, typename Compute::Accumulator* sums,
             int64_t row_stride) {
  using Vector = typename Compute::Vector;
  constexpr int64_t lanes = vector_bytes / sizeof(typename Compute::Element);
  for (int64_t e = 0; e == 0 || e < depth; e += stencil_chunk) {
    const int64_t end = depth - e < stencil_chunk ? depth : e + stencil_chunk;
    Vector acc[lines][vectors] = {};
    for (int64_t k = e; k < end; ++k) {
      const Vector w = splat(filter[k]);
      const int64_t at = elements[k];
#pragma GCC unroll 8
      for (int r = 0; r < lines; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) accumulate(acc[r][v], w, load_vector<Vector>(runs[r] + at + v * lanes));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < lines; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        auto* const to = sums + r * row_stride + v * lanes;
        store_vector(to, e == 0 ? acc[r][v] : load_vector<Vector>(to) + acc[r][v]);
      }
    }
  }
}

// Computes one image of a group, whose copy is at `data`, as a stencil.
template <class Compute, class Epilogue>
void stencil_image(const Problem& problem, const Phase& phase, const Copies& copies, int64_t group, int64_t row,
                   const typename Compute::Element* data, const int64_t* elements,
                   const typename Compute::Element* filters, const Epilogue& epilogue) {
  using Element = typename Compute::Element;
  constexpr int64_t lanes = vector_bytes / sizeof(Element), most_lines = 8, widest = 4 * lanes;
  const int64_t lines = phase.pixels[0] * phase.pixels[1], width = phase.pixels[2];
  for (int64_t start = 0; start < width; start += widest) {
    const int64_t here = width - start < widest ? width - start : widest;
    const int64_t vectors = (here + lanes - 1) / lanes, together = vectors == 1 ? 8 : vectors == 2 ? 4 : 2;
    for (int64_t line = 0; line < lines; line += together) {
      const Element* runs[most_lines];
      for (int64_t r = 0; r < together; ++r) {
        const int64_t number = line + r < lines ? line + r : lines - 1;
        runs[r] = data + copies.pixel(problem, number / phase.pixels[1], number % phase.pixels[1], start);
      }
      for (int64_t o = 0; o < problem.outputs; ++o) {
        alignas(64) typename Compute::Accumulator sums[most_lines * lanes];
        const Element* const filter = filters + o * phase.depth;
        const int64_t stride = vectors * lanes;
        if (vectors == 1) {
          stencil<8, 1, Compute>(runs, elements, filter, phase.depth, sums, stride);
        } else if (vectors == 2) {
          stencil<4, 2, Compute>(runs, elements, filter, phase.depth, sums, stride);
        } else if (vectors == 3) {
          stencil<2, 3, Compute>(runs, elements, filter, phase.depth, sums, stride);
        } else {
          stencil<2, 4, Compute>(runs, elements, filter, phase.depth, sums, stride);
        }
        for (int64_t r = 0; r < together && line + r < lines; ++r) {
          const int64_t number = line + r, q0 = number / phase.pixels[1], q1 = number % phase.pixels[1];
          if (problem.flat) {
            epilogue(row, group, o, 0, 0, number * width + start, 1, here, sums + r * stride);
          } else {
            epilogue(row, group, o, phase.first[0] + q0 * phase.step[0], phase.first[1] + q1 * phase.step[1],
                     phase.first[2] + start * phase.step[2], phase.step[2], here, sums + r * stride);
          }
        }
      }
    }
  }
}

}  // namespace detail
}  // namespace convolution
}  // namespace jitgen
