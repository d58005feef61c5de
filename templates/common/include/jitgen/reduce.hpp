// Reductions on the host: accumulators that the compiler keeps in vector registers, combined in a fixed order.
//
// A row is divided into blocks. Within a block, element i goes to accumulator (lane) i % lanes, so that the loop over
// neighbouring elements is a loop over independent accumulators, which vectorises without reordering a sum. The lanes
// of a block are combined as a tree, and the blocks of a row pairwise, as they come. So the error of a sum grows with
// the logarithm of the length (Higham, "The accuracy of floating point summation", 1993; PyTorch's cascade
// sum is of the same kind). The order depends on the length alone and not on which thread computes which block, so that
// any number of threads gives the same bits.
//
// A `Kind` is a reduction: the types `value` (of an element) and `partial` (of several), `identity()` and
// `combine(a, b)`.
#pragma once

#include <stddef.h>

#include "jitgen/arithmetic.hpp"
#include "jitgen/exponential.hpp"
#include "jitgen/group.hpp"
#include "jitgen/memory.hpp"
#include "jitgen/parallel.hpp"

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace jitgen {

// -------------------------------------------------------------------------------------------------------------- kinds

template <class T>
constexpr T lowest = is_signed<T> ? static_cast<T>(uint64_t(1) << (8 * sizeof(T) - 1)) : T(0);
template <class T>
constexpr T highest = static_cast<T>(~static_cast<uint64_t>(lowest<T>));
template <>
constexpr float lowest<float> = -__builtin_inff();
template <>
constexpr double lowest<double> = -__builtin_inf();
template <>
constexpr float highest<float> = __builtin_inff();
template <>
constexpr double highest<double> = __builtin_inf();
template <>
constexpr bool highest<bool> = true;

#define JITGEN_KIND(Name, first, a_with_b)                   \
  template <class T>                                         \
  struct Name {                                              \
    using value = T;                                         \
    using partial = T;                                       \
    JITGEN_INLINE T identity() { return first; }             \
    JITGEN_INLINE T combine(T a, T b) { return a_with_b; }   \
  };
JITGEN_KIND(Sum, T(0), a + b)
JITGEN_KIND(Prod, T(1), a * b)
JITGEN_KIND(Any, T(0), a | b)
JITGEN_KIND(All, T(1), a & b)
// A maximum that drops NaN, in one instruction, for kernels in which what uses the maximum finds the NaN again.
JITGEN_KIND(MaxOfNumbers, lowest<T>, b > a ? b : a)
#undef JITGEN_KIND

// `b > a || b != b` gives what maximum(a, b) gives, by two comparisons that do not depend on one another. `of_numbers`
// is one instruction and drops NaN.
#define JITGEN_EXTREME_KIND(Name, first, beyond)                                        \
  template <class T>                                                                    \
  struct Name {                                                                         \
    using value = T;                                                                    \
    using partial = T;                                                                  \
    JITGEN_INLINE T identity() { return first; }                                        \
    JITGEN_INLINE T combine(T a, T b) { return (b beyond a) | (b != b) ? b : a; }       \
    JITGEN_INLINE T of_numbers(T a, T b) { return b beyond a ? b : a; }                 \
  };
JITGEN_EXTREME_KIND(Max, lowest<T>, >)
JITGEN_EXTREME_KIND(Min, highest<T>, <)
#undef JITGEN_EXTREME_KIND

// The extreme value and its first index. The index is `nowhere` as long as no value is more extreme than the identity.
constexpr int64_t nowhere = int64_t(1) << 62;

template <class T>
struct Found {
  T value;
  int64_t index;
};

// `b` replaces `a` if it is more extreme, or NaN where `a` is not. Of equal values the one with the lower index wins.
#define JITGEN_ARG_KIND(Name, first, beyond)                                                        \
  template <class T>                                                                                \
  struct Name {                                                                                     \
    using value = T;                                                                                \
    using partial = Found<T>;                                                                       \
    JITGEN_INLINE partial identity() { return {first, nowhere}; }                                   \
    JITGEN_INLINE bool replaces(T b, T a) { return (b beyond a) | ((b != b) & (a == a)); }          \
    template <class Index>                                                                          \
    JITGEN_INLINE bool wins(T b, Index b_index, T a, Index a_index) {                               \
      const bool same = (a == b) | ((a != a) & (b != b));                                           \
      return replaces(b, a) | (same & (b_index < a_index));                                         \
    }                                                                                               \
    JITGEN_INLINE partial combine(partial a, partial b) {                                           \
      return wins(b.value, b.index, a.value, a.index) ? b : a;                                      \
    }                                                                                               \
  };
JITGEN_ARG_KIND(ArgMax, lowest<T>, >)
JITGEN_ARG_KIND(ArgMin, highest<T>, <)
#undef JITGEN_ARG_KIND

// The result of a reduction from the partial result of all elements. An index of `nowhere` says that every element
// equals the identity, and the first one has index 0.
template <class T>
JITGEN_INLINE T settled(T partial) {
  return partial;
}
template <class T>
JITGEN_INLINE int64_t settled(Found<T> partial) {
  return partial.index == nowhere ? 0 : partial.index;
}

// e^x for x <= 0 or NaN, as softmax needs it after subtracting the maximum: half of the operations of exp, with a
// relative error of 1.7e-7. With x = k ln 2 + r, the rounder leaves k + 64 + 127 in the low bits of a float. Shifted to
// the exponent they are 2^(k + 64), a normal number for every k down to -150. The minimax polynomial of degree 5 in r
// has a factor of 2^-64 in its coefficients, so that the product is rounded once where it is subnormal. At x = -104 it
// is below half of the smallest subnormal number and rounds to 0.
JITGEN_INLINE float exp_below(float x) {
  constexpr float shift = detail::rounder + 64.0f + 127.0f, unit = 0x1p-64f;
  const float bounded = x < -104.0f ? -104.0f : x;  // this is one operation; choosing 0 afterwards would be two
  const float shifted = detail::mul_add(bounded, 1.44269504f, shift);
  const float r = detail::remainder_of_ln2(shifted - shift, bounded);
  const float p = detail::horner(r, 0.008289267f * unit, 0.04189816f * unit, 0.16667654f * unit, 0.49999148f * unit,
                                 0.9999997f * unit, unit);
  return p * float_of(bits_of(shifted) << 23);
}
JITGEN_INLINE double exp_below(double x) { return exp(x); }

// -------------------------------------------------------------------------------------------------------------- lanes

// `count` accumulators side by side: all of one block of a row, or one for each of `count` neighbouring rows.
template <class Kind, int64_t count = lanes, class Partial = typename Kind::partial>
struct Lanes {
  alignas(cache_line) Partial lane[count];

  JITGEN_MEMBER void clear(int64_t used = count) {
    for (int64_t j = 0; j < used; ++j) lane[j] = Kind::identity();
  }
  // Without `counts` the value is dropped.
  JITGEN_MEMBER void take(int64_t j, int64_t, typename Kind::value v, bool counts = true) {
    lane[j] = Kind::combine(lane[j], counts ? v : Kind::identity());
  }
  JITGEN_MEMBER Partial at(int64_t j, int64_t) const { return lane[j]; }

  // Combines all lanes, as a tree of which the shape does not depend on how long the block is.
  JITGEN_MEMBER Partial fold(int64_t) {
#pragma GCC unroll 8
    for (int64_t half = count / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) lane[j] = Kind::combine(lane[j], lane[j + half]);
    }
    return lane[0];
  }
};

// Extremes of floats. A NaN is found by a second accumulator, the largest magnitude as an integer. That takes two
// operations on integers, where a comparison that sees NaN, a mask and a selection would take three of the vector
// units.
template <class Kind, int64_t count>
struct Extremes {
  static constexpr uint32_t infinity_bits = 0x7f800000u;
  alignas(cache_line) float lane[count];
  alignas(cache_line) uint32_t magnitude[count];

  JITGEN_MEMBER void clear(int64_t used = count) {
    for (int64_t j = 0; j < used; ++j) {
      lane[j] = Kind::identity();
      magnitude[j] = 0;
    }
  }
  JITGEN_MEMBER void take(int64_t j, int64_t, float v, bool counts = true) {
    const float value = counts ? v : Kind::identity();
    join(j, value, bits_of(value) & 0x7fffffffu);
  }
  JITGEN_MEMBER float at(int64_t j, int64_t) const {
    return magnitude[j] > infinity_bits ? __builtin_nanf("") : lane[j];
  }
  JITGEN_MEMBER float fold(int64_t start) {
#pragma GCC unroll 8
    for (int64_t half = count / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) join(j, lane[j + half], magnitude[j + half]);
    }
    return at(0, start);
  }

 private:
  JITGEN_MEMBER void join(int64_t j, float v, uint32_t bits) {
    lane[j] = Kind::of_numbers(lane[j], v);
    magnitude[j] = bits > magnitude[j] ? bits : magnitude[j];
  }
};
template <int64_t count>
struct Lanes<Max<float>, count, float> : Extremes<Max<float>, count> {};
template <int64_t count>
struct Lanes<Min<float>, count, float> : Extremes<Min<float>, count> {};

// Extremes with an index. It is relative to the block's start and has 32 bits, as wide as most values, so that values
// and indices fit vectors of the same number of lanes.
template <class Kind, int64_t count, class T>
struct Lanes<Kind, count, Found<T>> {
  static constexpr int32_t none = 0x7fffffff;
  alignas(cache_line) T lane[count];
  alignas(cache_line) int32_t index[count];

  JITGEN_MEMBER void clear(int64_t used = count) {
    for (int64_t j = 0; j < used; ++j) {
      lane[j] = Kind::identity().value;
      index[j] = none;
    }
  }
  JITGEN_MEMBER void take(int64_t j, int64_t i, T v, bool counts = true) {
    const bool better = counts & Kind::replaces(v, lane[j]);
    lane[j] = better ? v : lane[j];
    index[j] = better ? static_cast<int32_t>(i) : index[j];
  }
  JITGEN_MEMBER Found<T> at(int64_t j, int64_t start) const {
    return {lane[j], index[j] == none ? nowhere : start + index[j]};
  }
  JITGEN_MEMBER Found<T> fold(int64_t start) const {
    Found<T> best = at(0, start);
    for (int64_t j = 1; j < count; ++j) best = Kind::combine(best, at(j, start));
    return best;
  }
};

// ------------------------------------------------------------------------------------------------- threads and blocks

// The threads that share a row, most often one. They leave the partial result of each block in `memory`.
struct Team {
  int64_t thread;
  int64_t threads;
  char* memory;

  JITGEN_INLINE Team alone() { return {0, 1, nullptr}; }
  inline Range share(int64_t blocks) const {
    return threads == 1 ? Range{0, blocks} : jitgen::share(blocks, 1, thread, threads);
  }
  // Waits until every thread of the team has called this.
  inline void meet() const {
    if (threads > 1) {
#pragma omp barrier
    }
  }
};

constexpr int64_t partial_bytes = 16;  // bytes of the largest partial result

// Memory for a call, to be freed with __builtin_free; null where there is none, and a caller then does without.
JITGEN_INLINE char* room(int64_t bytes) {
  return static_cast<char*>(aligned_memory(cache_line, (bytes + 63) & -64));
}

// Combines the partial results of blocks pairwise, as they are added in order. It keeps one open result for each bit of
// their number.
template <class Kind>
struct Pairwise {
  using Partial = typename Kind::partial;
  Partial open[48];
  int64_t count = 0;

  inline void add(Partial partial) {
    int level = 0;
    for (int64_t n = count++; n & 1; n >>= 1, ++level) partial = Kind::combine(open[level], partial);
    open[level] = partial;
  }
  inline Partial result() const {
    Partial all = Kind::identity();
    bool any = false;
    for (int level = 0; count >> level != 0; ++level) {
      if (((count >> level) & 1) == 0) continue;
      all = any ? Kind::combine(open[level], all) : open[level];
      any = true;
    }
    return all;
  }
};

// The result of a row from its blocks. A thread alone combines the blocks as it goes. The threads of a team leave them
// in the team's memory, and after a barrier each thread combines all of them in the same order.
template <class Kind>
struct Blocks {
  using Partial = typename Kind::partial;
  Pairwise<Kind> pairwise;
  Partial only = Kind::identity();  // the result of a row of one block
  Partial* shared;
  int64_t count;

  // `slot` is the number of the reduction in its kernel; each has memory for `count` blocks.
  JITGEN_MEMBER Blocks(const Team& team, int64_t slot, int64_t count)
      : shared(team.threads > 1 ? reinterpret_cast<Partial*>(team.memory + slot * count * partial_bytes) : nullptr),
        count(count) {}
  JITGEN_MEMBER void put(int64_t block, Partial partial) {
    if (shared != nullptr) {
      shared[block] = partial;
    } else if (count == 1) {
      only = partial;
    } else {
      pairwise.add(partial);
    }
  }
  JITGEN_MEMBER auto result() {
    for (int64_t block = 0; shared != nullptr && block < count; ++block) pairwise.add(shared[block]);
    return settled(count > 1 ? pairwise.result() : only);
  }
};

// Neighbouring rows that are walked together, one element of each in a step. Where they are few and one run of memory,
// as the columns of a narrow matrix are, a step takes `folds` elements of each row, as if they belonged to rows of
// their own.
struct Tile {
  int64_t rows;    // elements of a step: rows, times folds
  int64_t length;  // steps
  int64_t last;    // elements of the last step
  int64_t folds;   // elements of one row in a step

  JITGEN_INLINE Tile of(int64_t rows, int64_t length, int64_t folds) {
    const int64_t steps = (length + folds - 1) / folds;
    return {rows * folds, steps, rows * (length - (steps - 1) * folds), folds};
  }
  inline int64_t own() const { return rows / folds; }
  inline int64_t rows_of(int64_t step) const { return step + 1 == length ? last : rows; }
  // The offset of what step `step` reads, where a step has `inner` elements. Steps beyond the last are those of the
  // next tile.
  inline int64_t ahead(int64_t step, int64_t inner) const {
    return step < length ? step * inner : step % length * inner + step / length * rows;
  }

  template <class T>
  inline void repeat(T* values) const {
    const int64_t own = this->own();
    for (int64_t j = own; j < rows; ++j) values[j] = values[j - own];
  }
};

JITGEN_INLINE int64_t folds_of(int64_t rows, int64_t length) {
  constexpr int64_t wide = 256;
  const int64_t most = length / 8 < wide / rows ? length / 8 : wide / rows;
  return most > 1 ? most : 1;
}

// The results of the rows of a tile from chunks of their length. Each chunk has one partial result for each row.
template <class Kind, int64_t width>
struct Parts {
  using Partial = typename Kind::partial;
  Partial total[width];
  Partial* shared;
  int64_t count;

  JITGEN_MEMBER Parts(const Team& team, int64_t slot, int64_t count)
      : shared(team.threads > 1 ? reinterpret_cast<Partial*>(team.memory + slot * count * width * partial_bytes)
                                : nullptr),
        count(count) {
    if (count == 1 && shared == nullptr) return;
    for (int64_t j = 0; j < width; ++j) total[j] = Kind::identity();
  }
  JITGEN_MEMBER void put(int64_t piece, int64_t start, const Lanes<Kind, width>& lanes, int64_t rows) {
    if (shared != nullptr) {
      for (int64_t j = 0; j < rows; ++j) shared[piece * width + j] = lanes.at(j, start);
    } else if (count == 1) {
      for (int64_t j = 0; j < rows; ++j) total[j] = lanes.at(j, start);
    } else {
      for (int64_t j = 0; j < rows; ++j) total[j] = Kind::combine(total[j], lanes.at(j, start));
    }
  }
  template <class T>
  JITGEN_MEMBER void result(T* row, const Tile& tile) {
    const int64_t rows = tile.rows, own = tile.own();
    for (int64_t piece = 0; shared != nullptr && piece < count; ++piece) {
      for (int64_t j = 0; j < rows; ++j) total[j] = Kind::combine(total[j], shared[piece * width + j]);
    }
    for (int64_t first = own; first < rows; first += own) {
      for (int64_t j = 0; j < own; ++j) total[j] = Kind::combine(total[j], total[first + j]);
    }
    for (int64_t j = 0; j < own; ++j) row[j] = settled(total[j]);
    tile.repeat(row);
  }
};

// Elements of a chunk: about the square root of the length, so that neither the elements of a chunk nor the chunks are
// many.
JITGEN_INLINE int64_t part_of(int64_t length) {
  int64_t piece = 64;
  while (piece * piece < length) piece *= 2;
  return piece;
}

// Rows of a tile: `width`, or fewer where that would leave a thread without a tile.
JITGEN_INLINE int64_t tile_of(int64_t width, int64_t inner, int64_t others, int64_t threads) {
  const int64_t each = (inner * others + threads - 1) / threads;
  const int64_t whole = (each + cache_line - 1) / cache_line * cache_line;
  return whole < width ? (whole > 0 ? whole : cache_line) : width;
}

}  // namespace jitgen
