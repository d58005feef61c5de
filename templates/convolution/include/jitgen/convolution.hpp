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

#include "jitgen/gemm.hpp"

namespace jitgen {
namespace convolution {

using gemm::block_rows;
using gemm::group_blocks;
using gemm::round_up;

constexpr int64_t copied_bytes = 4 << 20;  // of the images whose copies are made, and then read, together
constexpr int64_t stencil_outputs = 4;     // outputs of a group up to which it is computed as a stencil
constexpr int64_t stencil_chunk = 512;     // products that a stencil adds up before it adds them to the others
constexpr int64_t slack = 64;              // elements behind the last one that whole vectors may read or write

// A step that the compiler knows.
struct One {
  constexpr operator int64_t() const { return 1; }
};

struct Problem {
  int64_t rows, groups, outputs, channels;
  int64_t pixels[3], image[3], kernel[3], stride[3], dilation[3], offset[3], spread[3];
  int64_t x[6];  // strides along rows, groups, channels and the dimensions of an image
  int64_t w[6];  // strides along groups, outputs, channels and the dimensions of a filter
  bool flat;     // whether the epilogue takes the pixels of an image as one dimension
};

// A phase: pixels first[d] + q * step[d], for q below pixels[d].
struct Part {
  int64_t first[3], step[3], pixels[3], kernel[3], dilation[3], offset[3];
  int64_t w_first, w[3];
  int64_t depth;    // products of a sum
  int64_t padded;   // the same, padded to what a tile reads
  int64_t columns;  // pixels of an image
};

namespace detail {

JITGEN_INLINE int64_t divisor(int64_t a, int64_t b) {
  a = a < 0 ? -a : a;
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}
JITGEN_INLINE int64_t modulo(int64_t a, int64_t b) { return (a % b + b) % b; }

// Phase number `phase` of `problem`.
inline Part part_of(const Problem& problem, int64_t phase) {
  Part part;
  part.w_first = 0;
  part.depth = problem.channels;
  part.columns = 1;
  for (int d = 2; d >= 0; --d) {
    const int64_t spread = problem.spread[d], first = phase % spread, dilation = problem.dilation[d];
    phase /= spread;
    const int64_t each = spread / divisor(dilation, spread);
    const int64_t at = first * problem.stride[d] + problem.offset[d];
    int64_t begin = 0;
    while (begin < each && modulo(at + begin * dilation, spread) != 0) ++begin;
    const bool none = begin == each || begin >= problem.kernel[d];
    part.first[d] = first;
    part.step[d] = spread;
    part.pixels[d] = first < problem.pixels[d] ? (problem.pixels[d] - first + spread - 1) / spread : 0;
    part.kernel[d] = none ? 0 : (problem.kernel[d] - begin + each - 1) / each;
    part.dilation[d] = each * dilation / spread;
    part.offset[d] = none ? 0 : (at + begin * dilation) / spread;
    part.w_first += begin * problem.w[3 + d];
    part.w[d] = each * problem.w[3 + d];
    part.depth *= part.kernel[d];
    part.columns *= part.pixels[d];
  }
  part.padded = round_up(part.depth, gemm::ready_steps);
  return part;
}

}  // namespace detail

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

  static Copies of(const Problem& problem, const Part* parts, int64_t count) {
    Copies copies;
    for (int d = 0; d < 3; ++d) {
      int64_t low = 0, high = -1;
      for (int64_t p = 0; p < count; ++p) {
        const Part& part = parts[p];
        if (part.depth == 0 || part.columns == 0) continue;
        const int64_t reach = (part.kernel[d] - 1) * part.dilation[d];
        const int64_t first = part.offset[d] + (reach < 0 ? reach : 0);
        const int64_t last = part.offset[d] + (reach > 0 ? reach : 0) + (part.pixels[d] - 1) * problem.stride[d];
        if (high < low || first < low) low = first;
        if (high < low || last > high) high = last;
      }
      copies.every[d] = count == 1 && parts[0].kernel[d] == 1 ? problem.stride[d] : 1;
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
  inline int64_t element(const Part& part, int64_t k0, int64_t k1, int64_t k2) const {
    const int64_t inner = part.offset[2] + k2 * part.dilation[2] - low[2];
    return (part.offset[0] + k0 * part.dilation[0] - low[0]) * steps[0] +
           (part.offset[1] + k1 * part.dilation[1] - low[1]) * steps[1] + inner % stride * run + inner / stride;
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
            for (int64_t phase = 0; phase < (every[2] == 1 ? stride : 1); ++phase) {
              const int64_t start = first + detail::modulo(phase - (first - low[2]), stride);
              Element* const place = target + phase * run + (start - low[2]) / stride;
              const int64_t count = start < behind ? (behind - start + stride - 1) / stride : 0;
              for (int64_t j = 0; j < count; ++j) place[j] = convert<Element>(from + (start + j * stride) * step);
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
inline void element_table(const Problem& problem, const Part& part, const Copies& copies, int64_t* to) {
  for (int64_t c = 0; c < problem.channels; ++c) {
    for (int64_t k0 = 0; k0 < part.kernel[0]; ++k0) {
      for (int64_t k1 = 0; k1 < part.kernel[1]; ++k1) {
        for (int64_t k2 = 0; k2 < part.kernel[2]; ++k2) {
          *to++ = c * copies.channel + copies.element(part, k0, k1, k2);
        }
      }
    }
  }
}

// The filters of a group, as the rows of a matrix.
template <class Storage_>
struct Filters {
  using Storage = Storage_;
  const Storage* data;
  int64_t row;
  int64_t sizes[4], steps[4];  // the dimensions of a row, the innermost one last
  int64_t inner;               // the size of those that are one in memory
  int64_t outer;               // how many others there are

  Filters(const Problem& problem, const Part& part, const Storage* w)
      : data(w + part.w_first), row(problem.w[1]), sizes{problem.channels, part.kernel[0], part.kernel[1], part.kernel[2]},
        steps{problem.w[2], part.w[0], part.w[1], part.w[2]}, inner(1), outer(4) {
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
  const auto copy = [&](const Element* run, Element* place) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < block_rows; v += lanes) store_vector(place + v, load_vector<Vector>(run + v));
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
        Element* const place = to + k * block_rows + starts[r];
        store_vector(place, load_vector<Vector>(run));
        for (int64_t v = lanes; v < starts[r + 1] - starts[r]; v += lanes) {
          store_vector(place + v, load_vector<Vector>(run + v));
        }
      }
      ++k;
    }
  }
  __builtin_memset(to + count * block_rows, 0, (padded - count) * block_rows * sizeof(Element));
}

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
void multiply_blocks(const Problem& problem, const Part& part, const Copies& copies, int64_t group, Range images,
                     const typename Compute::Element* data, int64_t behind, const int64_t* elements,
                     const gemm::Packed<Compute>& filters, Range tiles, Range blocks,
                     typename Compute::Accumulator* sums, typename Compute::Element* panel, const Epilogue& epilogue) {
  using Tiles = gemm::detail::Tiles<Compute, gemm::Panel<Compute>, gemm::Unscaled>;
  constexpr int64_t row_stride = (group_blocks + 1) * block_rows;
  const int64_t columns = (images.end - images.begin) * part.columns;
  const Range rows = {filters.tile(tiles.begin).begin, filters.tile(tiles.end - 1).end};
  int64_t pixels[group_blocks * block_rows];
  Segment segments[group_blocks * block_rows];
  const bool flat = problem.flat;
  int64_t furthest = 0;
  for (int64_t k = 0; k < part.depth && copies.in_place; ++k) furthest = elements[k] > furthest ? elements[k] : furthest;
  for (int64_t block = blocks.begin; block < blocks.end; block += group_blocks) {
    const int64_t count = blocks.end - block < group_blocks ? blocks.end - block : group_blocks;
    const int64_t first = block * block_rows;
    const int64_t live = columns - first < count * block_rows ? columns - first : count * block_rows;
    int64_t found = 0;
    int64_t row = first / part.columns, number = first % part.columns;
    int64_t q2 = number % part.pixels[2], q1 = number / part.pixels[2] % part.pixels[1];
    int64_t q0 = number / (part.pixels[1] * part.pixels[2]);
    for (int64_t j = 0; j < count * block_rows; ++j) {
      if (j >= live) {  // what follows the last pixel is read, and of no consequence
        pixels[j] = pixels[j - 1] + (j % block_rows != 0);
        if (j % block_rows == 0) pixels[j] = 0;
        continue;
      }
      pixels[j] = row * copies.image + copies.pixel(problem, q0, q1, q2);
      const bool starts = j == 0 || (flat ? q0 + q1 + q2 == 0 : q2 == 0);
      if (starts) {
        const int64_t linear = (q0 * part.pixels[1] + q1) * part.pixels[2] + q2;
        Segment& segment = segments[found++];
        segment = {images.begin + row, {q0, q1, q2}, j, 0};
        if (flat) {
          segment.pixel[0] = segment.pixel[1] = 0;
          segment.pixel[2] = linear;
        } else {
          for (int d = 0; d < 3; ++d) segment.pixel[d] = part.first[d] + segment.pixel[d] * part.step[d];
        }
      }
      ++segments[found - 1].count;
      if (++q2 == part.pixels[2]) {
        q2 = 0;
        if (++q1 == part.pixels[1]) {
          q1 = 0;
          if (++q0 == part.pixels[0]) {
            q0 = 0;
            ++row;
          }
        }
      }
    }
    if (part.depth == 0) __builtin_memset(sums, 0, filters.rows * row_stride * sizeof(*sums));
    for (int64_t e = 0; e < part.padded; e += gemm::chunk_elements) {
      const int64_t here = part.padded - e < gemm::chunk_elements ? part.padded - e : gemm::chunk_elements;
      const int64_t there = part.depth - e < here ? part.depth - e : here;
      for (int64_t b = 0; b < count; ++b) {
        pack_pixels(data, behind, furthest, pixels + b * block_rows, elements + e, there, here, panel + b * here * block_rows);
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
      for (int64_t s = 0; s < found; ++s) {
        const Segment& segment = segments[s];
        epilogue(segment.row, group, m, segment.pixel[0], segment.pixel[1], segment.pixel[2],
                 flat ? 1 : part.step[2], segment.count, sums + m * row_stride + segment.start);
      }
    }
  }
}

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
void stencil_image(const Problem& problem, const Part& part, const Copies& copies, int64_t group, int64_t row,
                   const typename Compute::Element* data, const int64_t* elements,
                   const typename Compute::Element* filters, const Epilogue& epilogue) {
  using Element = typename Compute::Element;
  constexpr int64_t lanes = vector_bytes / sizeof(Element), most_lines = 8, widest = 4 * lanes;
  const int64_t lines = part.pixels[0] * part.pixels[1], width = part.pixels[2];
  for (int64_t start = 0; start < width; start += widest) {
    const int64_t here = width - start < widest ? width - start : widest;
    const int64_t vectors = (here + lanes - 1) / lanes, together = vectors == 1 ? 8 : vectors == 2 ? 4 : 2;
    for (int64_t line = 0; line < lines; line += together) {
      const Element* runs[most_lines];
      for (int64_t r = 0; r < together; ++r) {
        const int64_t number = line + r < lines ? line + r : lines - 1;
        runs[r] = data + copies.pixel(problem, number / part.pixels[1], number % part.pixels[1], start);
      }
      for (int64_t o = 0; o < problem.outputs; ++o) {
        alignas(64) typename Compute::Accumulator sums[most_lines * lanes];
        const Element* const filter = filters + o * part.depth;
        const int64_t stride = vectors * lanes;
        if (vectors == 1) {
          stencil<8, 1, Compute>(runs, elements, filter, part.depth, sums, stride);
        } else if (vectors == 2) {
          stencil<4, 2, Compute>(runs, elements, filter, part.depth, sums, stride);
        } else if (vectors == 3) {
          stencil<2, 3, Compute>(runs, elements, filter, part.depth, sums, stride);
        } else {
          stencil<2, 4, Compute>(runs, elements, filter, part.depth, sums, stride);
        }
        for (int64_t r = 0; r < together && line + r < lines; ++r) {
          const int64_t number = line + r, q0 = number / part.pixels[1], q1 = number % part.pixels[1];
          if (problem.flat) {
            epilogue(row, group, o, 0, 0, number * width + start, 1, here, sums + r * stride);
          } else {
            epilogue(row, group, o, part.first[0] + q0 * part.step[0], part.first[1] + q1 * part.step[1],
                     part.first[2] + start * part.step[2], part.step[2], here, sums + r * stride);
          }
        }
      }
    }
  }
}

}  // namespace detail

// The whole convolution, on `threads` threads.
template <class Compute, class Storage, class Epilogue>
void convolve(const Problem& problem, const Storage* x, const Storage* w, const Epilogue& epilogue, int32_t threads) {
  using Element = typename Compute::Element;
  using Accumulator = typename Compute::Accumulator;
  constexpr int64_t page = 4096;
  if (problem.rows * problem.groups * problem.outputs * problem.pixels[0] * problem.pixels[1] * problem.pixels[2] == 0) {
    return;
  }
  const int64_t phases = problem.spread[0] * problem.spread[1] * problem.spread[2];
  int64_t depth = 0, padded = 0;
  for (int64_t p = 0; p < phases; ++p) {
    const Part part = detail::part_of(problem, p);
    depth += part.depth;
    padded += part.padded;
  }
  const bool stencil = problem.outputs <= stencil_outputs && problem.rows * problem.groups >= threads;
  const bool apart = stencil || problem.groups >= threads;  // each thread computes groups, or images, of its own
  const int64_t teams = apart ? threads : 1;
  // Memory of all: parts and their tables; of each team: copies and filters; of each thread: sums and a panel.
  const int64_t parts_bytes = round_up(phases * sizeof(Part), page);
  const int64_t tables_bytes = round_up(depth * sizeof(int64_t), page);
  char* const shared = static_cast<char*>(needed_memory(page, parts_bytes + tables_bytes));
  if (shared == nullptr) return;
  Part* const parts = reinterpret_cast<Part*>(shared);
  int64_t* const tables = reinterpret_cast<int64_t*>(shared + parts_bytes);
  for (int64_t p = 0; p < phases; ++p) parts[p] = detail::part_of(problem, p);
  Copies copies = Copies::of(problem, parts, phases);
  if constexpr (gemm::detail::same<Storage, Element>) {
    if (!stencil) copies.read_in_place(problem);
  }
  for (int64_t p = 0, at = 0; p < phases; at += parts[p++].depth) {
    if (parts[p].depth != 0) detail::element_table(problem, parts[p], copies, tables + at);
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
        for (int64_t p = 0, at = 0; p < phases; ++p) {
          const Part& part = parts[p];
          const detail::Filters<Storage> rows(problem, part, w + group * problem.w[0]);
          Element* const to = filters + problem.outputs * at;
          at += part.padded;
          if (part.depth == 0) continue;
          if (!stencil) {
            gemm::detail::pack(rows, detail::packed_of<Compute>(to, problem.outputs, part.padded), 0, part.depth,
                               team.thread, team.threads);
            continue;
          }
          Storage buffer[256];
          for (int64_t o = 0; o < problem.outputs; ++o) {
            for (int64_t k = 0; k < part.depth; k += 256) {
              const int64_t here = part.depth - k < 256 ? part.depth - k : 256;
              rows.fill(o, k, here, buffer);
              for (int64_t j = 0; j < here; ++j) to[o * part.depth + k + j] = Copies::convert<Element>(buffer + j);
            }
          }
        }
      }
      const Storage* const group_x = x + group * problem.x[1];
      if (stencil) {
        const int64_t row = unit % problem.rows;
        copies.fill(problem, group_x + row * problem.x[0], 0, problem.channels, images);
        for (int64_t p = 0, at = 0, table = 0; p < phases; ++p) {
          if (parts[p].columns != 0) {
            detail::stencil_image<Compute>(problem, parts[p], copies, group, row, images, tables + table,
                                           filters + problem.outputs * at, epilogue);
          }
          at += parts[p].padded;
          table += parts[p].depth;
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
        if constexpr (gemm::detail::same<Storage, Element>) {
          if (copies.in_place) {
            data = group_x + first * problem.x[0] + copies.start();
            behind = extent - (data - x);
          }
        }
        team.wait();
        for (int64_t p = 0, at = 0, table = 0; p < phases; ++p) {
          const Part& part = parts[p];
          const auto packed = detail::packed_of<Compute>(filters + problem.outputs * at, problem.outputs, part.padded);
          const int64_t columns = (range.end - range.begin) * part.columns;
          const int64_t blocks = (columns + block_rows - 1) / block_rows;
          const gemm::detail::Grid grid = gemm::detail::grid_of(blocks, packed.tiles, team.threads);
          if (team.thread < grid.across * grid.down) {
            const Range own_blocks = share(blocks, 1, team.thread % grid.across, grid.across);
            const Range tiles = share(packed.tiles, 1, team.thread / grid.across, grid.down);
            if (tiles.begin < tiles.end && own_blocks.begin < own_blocks.end) {
              detail::multiply_blocks<Compute>(problem, part, copies, group, range, data, behind, tables + table,
                                               packed, tiles, own_blocks, sums, panel, epilogue);
            }
          }
          at += part.padded;
          table += part.depth;
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
