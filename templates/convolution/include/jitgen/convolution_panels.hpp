// What a tile of a convolution multiplies: the rows of filters, and panels of 16 pixels.
#pragma once

#include "jitgen/convolution_phases.hpp"

namespace jitgen {
namespace convolution {
namespace detail {

// The filters of a group, as the rows of a matrix.
template <class Storage_>
struct Filters {
  using Storage = Storage_;
  const Storage* data;
  int64_t row;
  int64_t sizes[4], steps[4];  // the dimensions of a row, the innermost one last
  int64_t inner;               // the size of those that are one in memory
  int64_t outer;               // how many others there are

  Filters(const Problem& problem, const Phase& phase, const Storage* w)
      : data(w + phase.w_first), row(problem.w[1]),
        sizes{problem.channels, phase.kernel[0], phase.kernel[1], phase.kernel[2]},
        steps{problem.w[2], phase.w[0], phase.w[1], phase.w[2]}, inner(1), outer(4) {
    while (outer > 0 && (sizes[outer - 1] == 1 || inner == 1 || steps[outer - 1] == inner * last())) {
      if (sizes[outer - 1] != 1 && inner == 1) step_ = steps[outer - 1];
      inner *= sizes[outer - 1];
      --outer;
    }
  }

  void fill(int64_t m, int64_t k, int64_t count, Storage* to) const {
    const Storage* const from = data + m * row;
    while (count > 0) {
      int64_t number = k / inner, at = 0;
      const int64_t within = k % inner;
      for (int64_t d = outer - 1; d >= 0; --d) {
        at += number % sizes[d] * steps[d];
        number /= sizes[d];
      }
      const int64_t here = inner - within < count ? inner - within : count;
      const Storage* const run = from + at + within * step_;
      if (step_ == 1) {
        __builtin_memcpy(to, run, here * sizeof(Storage));
      } else {
        for (int64_t j = 0; j < here; ++j) to[j] = run[j * step_];
      }
      to += here;
      k += here;
      count -= here;
    }
  }

 private:
  int64_t step_ = 1;
  int64_t last() const { return step_; }
};

// The shuffles of an element's bytes are those of floats or doubles.
template <class Element, int64_t bytes = sizeof(Element)>
struct Shuffled {
  using type = Floats;
};
template <class Element>
struct Shuffled<Element, 8> {
  using type = Doubles;
};

// Packs a block of 16 pixels, whose addresses are `pixels`, for `count` products; zeros follow up to `padded` ones.
// `behind` elements may be read from `from` on, of which none is `furthest` or more behind a pixel.
template <class Element>
void pack_pixels(const Element* from, int64_t behind, int64_t furthest, const int64_t* pixels, const int64_t* elements,
                 int64_t count, int64_t padded, Element* to) {
  using Vector = typename Shuffled<Element>::type;
  constexpr int64_t lanes = vector_bytes / sizeof(Element);
  int64_t starts[block_rows + 1], runs = 0;
  for (int64_t j = 0; j < block_rows; ++j) {
    if (j == 0 || pixels[j] != pixels[j - 1] + 1) starts[runs++] = j;
  }
  starts[runs] = block_rows;
  // A run's last vector may exceed it; what follows in the panel is written after it.
  const auto copy = [&](const Element* run, Element* to_run) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < block_rows; v += lanes) store_vector(to_run + v, load_vector<Vector>(run + v));
  };
  const Element* const first = from + pixels[0];
  int64_t last = 0;
  for (int64_t j = 0; j < block_rows; ++j) last = pixels[j] > last ? pixels[j] : last;
  if (last + furthest + block_rows > behind) {  // whole vectors would exceed the images
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t j = 0; j < block_rows; ++j) {
        const int64_t at = pixels[j] + elements[k];
        to[k * block_rows + j] = at < behind ? from[at] : Element(0);
      }
    }
  } else if (runs == 1) {
    for (int64_t k = 0; k < count; ++k) copy(first + elements[k], to + k * block_rows);
  } else if (runs == 2) {
    const Element* const second = from + pixels[starts[1]];
    for (int64_t k = 0; k < count; ++k) {
      copy(first + elements[k], to + k * block_rows);
      copy(second + elements[k], to + k * block_rows + starts[1]);
    }
  } else {
    const bool is_across = runs > 5;
    for (int64_t k = 0; k < count;) {
      // Products that are neighbours for each pixel: squares are transposed.
      if (is_across && count - k >= lanes && elements[k + lanes - 1] - elements[k] == lanes - 1) {
#pragma GCC unroll 8
        for (int64_t v = 0; v < block_rows; v += lanes) {
          Vector square[lanes];
#pragma GCC unroll 16
          for (int64_t j = 0; j < lanes; ++j) square[j] = load_vector<Vector>(from + pixels[v + j] + elements[k]);
          transpose(square);
#pragma GCC unroll 16
          for (int64_t j = 0; j < lanes; ++j) store_vector(to + (k + j) * block_rows + v, square[j]);
        }
        k += lanes;
        continue;
      }
      for (int64_t r = 0; r < runs; ++r) {
        const Element* const run = from + pixels[starts[r]] + elements[k];
        Element* const to_run = to + k * block_rows + starts[r];
        store_vector(to_run, load_vector<Vector>(run));
        for (int64_t v = lanes; v < starts[r + 1] - starts[r]; v += lanes) {
          store_vector(to_run + v, load_vector<Vector>(run + v));
        }
      }
      ++k;
    }
  }
  __builtin_memset(to + count * block_rows, 0, (padded - count) * block_rows * sizeof(Element));
}

}  // namespace detail
}  // namespace convolution
}  // namespace jitgen
