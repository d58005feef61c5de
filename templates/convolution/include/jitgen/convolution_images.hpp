// Copies of the images of a convolution, with their padding, in which an element has the same distance from every pixel
// that reads it.
#pragma once

#include "jitgen/convolution_phases.hpp"

namespace jitgen {
namespace convolution {

// Copies of images: [row][channel][index 0][index 1][index 2 modulo stride][index 2 / stride]. Images that need no
// padding, and whose pixels are neighbours already, are read where they are.
struct Copies {
  bool in_place = false;
  int64_t low[3], sizes[3];
  int64_t stride;  // of the innermost dimension
  int64_t run;     // elements that have one index modulo it
  int64_t steps[3];
  int64_t every[3];  // from an index that some pixel reads to the next one
  int64_t channel, image;

  static Copies of(const Problem& problem, const Phase* phases, int64_t count) {
    Copies copies;
    for (int d = 0; d < 3; ++d) {
      int64_t low = 0, high = -1;
      for (int64_t p = 0; p < count; ++p) {
        const Phase& phase = phases[p];
        if (phase.depth == 0 || phase.columns == 0) continue;
        const int64_t reach = (phase.kernel[d] - 1) * phase.dilation[d];
        const int64_t first = phase.offset[d] + (reach < 0 ? reach : 0);
        const int64_t last = phase.offset[d] + (reach > 0 ? reach : 0) + (phase.pixels[d] - 1) * problem.stride[d];
        if (high < low || first < low) low = first;
        if (high < low || last > high) high = last;
      }
      copies.every[d] = count == 1 && phases[0].kernel[d] == 1 ? problem.stride[d] : 1;
      copies.low[d] = low;
      copies.sizes[d] = high - low + 1;
    }
    copies.stride = problem.stride[2];
    copies.run = (copies.sizes[2] + copies.stride - 1) / copies.stride;
    copies.steps[2] = 1;
    copies.steps[1] = copies.run * copies.stride;
    copies.steps[0] = copies.steps[1] * copies.sizes[1];
    copies.channel = copies.steps[0] * copies.sizes[0];
    copies.image = copies.channel * problem.channels;
    return copies;
  }

  // Reads the images themselves if they can be read as copies are.
  inline void read_in_place(const Problem& problem) {
    if (problem.x[5] != 1 || stride != 1) return;
    for (int d = 0; d < 3; ++d) {
      if (low[d] < 0 || low[d] + sizes[d] > problem.image[d]) return;
    }
    for (const int64_t step : problem.x) {
      if (step < 0) return;
    }
    in_place = true;
    steps[0] = problem.x[3];
    steps[1] = problem.x[4];
    channel = problem.x[2];
    image = problem.x[0];
  }
  inline int64_t start() const { return low[0] * steps[0] + low[1] * steps[1] + low[2] * steps[2]; }

  // Where the first pixel reads element (k0, k1, k2) of a filter.
  inline int64_t element(const Phase& phase, int64_t k0, int64_t k1, int64_t k2) const {
    const int64_t inner = phase.offset[2] + k2 * phase.dilation[2] - low[2];
    return (phase.offset[0] + k0 * phase.dilation[0] - low[0]) * steps[0] +
           (phase.offset[1] + k1 * phase.dilation[1] - low[1]) * steps[1] + inner % stride * run + inner / stride;
  }
  inline int64_t pixel(const Problem& problem, int64_t q0, int64_t q1, int64_t q2) const {
    return q0 * problem.stride[0] * steps[0] + q1 * problem.stride[1] * steps[1] + q2;
  }

  // Copies channels [begin, end) of one image.
  template <class Element, class Storage>
  void fill(const Problem& problem, const Storage* x, int64_t begin, int64_t end, Element* to) const {
    const int64_t first = low[2] < 0 ? 0 : low[2];
    const int64_t behind = low[2] + sizes[2] < problem.image[2] ? low[2] + sizes[2] : problem.image[2];
    const int64_t step = problem.x[5];
    __builtin_memset(to + begin * channel, 0, (end - begin) * channel * sizeof(Element));
    for (int64_t i0 = 0; i0 < sizes[0]; i0 += every[0]) {
      const int64_t at0 = i0 + low[0];
      if (at0 < 0 || at0 >= problem.image[0]) continue;
      for (int64_t i1 = 0; i1 < sizes[1]; i1 += every[1]) {
        const int64_t at1 = i1 + low[1];
        if (at1 < 0 || at1 >= problem.image[1]) continue;
        const Storage* const row = x + at0 * problem.x[3] + at1 * problem.x[4];
        Element* const line = to + i0 * steps[0] + i1 * steps[1];
        if (step != 1 && problem.x[2] == 1) {  // channels are neighbours in memory
          for (int64_t c = begin; c < end; c += block_rows) {
            const int64_t count = end - c < block_rows ? end - c : block_rows;
            for (int64_t at = first; at < behind; ++at) {
              const Storage* const from = row + c + at * step;
              const int64_t inner = at - low[2];
              Element* const target = line + c * channel + inner % stride * run + inner / stride;
              for (int64_t j = 0; j < count; ++j) target[j * channel] = convert<Element>(from + j);
            }
          }
          continue;
        }
        for (int64_t c = begin; c < end; ++c) {
          const Storage* const from = row + c * problem.x[2];
          Element* const target = line + c * channel;
          if (stride == 1 && step == 1) {
#pragma omp simd
            for (int64_t at = first; at < behind; ++at) target[at - low[2]] = convert<Element>(from + at);
          } else {
            for (int64_t rest = 0; rest < (every[2] == 1 ? stride : 1); ++rest) {
              const int64_t start = first + detail::modulo(rest - (first - low[2]), stride);
              Element* const to_run = target + rest * run + (start - low[2]) / stride;
              const int64_t count = start < behind ? (behind - start + stride - 1) / stride : 0;
              for (int64_t j = 0; j < count; ++j) to_run[j] = convert<Element>(from + (start + j * stride) * step);
            }
          }
        }
      }
    }
  }

  template <class Element, class Storage>
  JITGEN_INLINE Element convert(const Storage* from) {
    return static_cast<Element>(jitgen::load(*from));
  }
};

namespace detail {

// The address of each product's element in the copy of an image, from that of the pixel on.
inline void element_table(const Problem& problem, const Phase& phase, const Copies& copies, int64_t* to) {
  for (int64_t c = 0; c < problem.channels; ++c) {
    for (int64_t k0 = 0; k0 < phase.kernel[0]; ++k0) {
      for (int64_t k1 = 0; k1 < phase.kernel[1]; ++k1) {
        for (int64_t k2 = 0; k2 < phase.kernel[2]; ++k2) {
          *to++ = c * copies.channel + copies.element(phase, k0, k1, k2);
        }
      }
    }
  }
}

}  // namespace detail

}  // namespace convolution
}  // namespace jitgen
