// Rows are computed in groups of `lanes` neighbours: a loop over a group has as many independent iterations as hide the
// latency of an addition, and a constant count, so that the compiler makes straight-line vector code of it.
//
// What such a loop reads or writes through the arrays here remains in registers, because GCC forwards an array from the
// unrolled loop that writes it to the one that reads it. This is how plain C++ can do two things that no scalar
// expression can: store whole lines past the cache, and convert bfloat16 in the cheaper order.
#pragma once

#include "jitgen/parallel.hpp"
#include "jitgen/storage.hpp"

#define JITGEN_MEMBER inline __attribute__((always_inline))

// Elements of a group: as a rule four vectors of floats at once, which hide the latency of one addition. A source for
// short rows, which have few whole groups of those, defines fewer.
#ifndef JITGEN_LANES
#define JITGEN_LANES 64
#endif

namespace jitgen {

constexpr int64_t lanes = JITGEN_LANES;

// The count of a group, known to the compiler; what is left at a row's end has a plain int64_t.
template <int64_t count>
struct Whole {
  constexpr operator int64_t() const { return count; }
};
constexpr int64_t fewest = 8;  // elements of a group: a vector of floats
// How many times smaller the next groups are at a row's end. Each size is another copy of a kernel's body, and where
// nothing is optimised (JITGEN_CXXFLAGS=-O0) compiling them takes longer than running them: a row's end has one size.
#ifdef __OPTIMIZE__
constexpr int64_t shrink = 2;
#else
constexpr int64_t shrink = lanes;
#endif

namespace detail {

// The groups of what a row's whole ones leave: half of the last one each, where there is so much.
template <int64_t size, class Body>
JITGEN_INLINE void rest(int64_t first, int64_t count, const Body& body) {
  if constexpr (size >= fewest) {
    if (first + size <= count) {
      body(first, Whole<size>{});
      first += size;
    }
    rest<size / shrink>(first, count, body);
  } else {
    if (first < count) body(first, count - first);
  }
}

}  // namespace detail

// body(first, count) for the groups of [0, count), in order.
template <class Body>
JITGEN_INLINE void groups(int64_t count, const Body& body) {
  int64_t first = 0;
  for (; first + lanes <= count; first += lanes) body(first, Whole<lanes>{});
  detail::rest<lanes / shrink>(first, count, body);
}

// Fetches neighbours into the second-level cache, for what comes later: any address will do.
template <class Storage>
JITGEN_INLINE void fetch(const Storage* from, int64_t count = lanes) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; i += cache_line / int64_t(sizeof(Storage))) __builtin_prefetch(from + i, 0, 2);
}

// A group of bfloat16 as floats. In whole groups the even elements come before the odd ones: taking the halves of
// 32-bit words costs half of what widening 16-bit lanes does, and a kernel whose operands all have this order need not
// know. A group of a single vector is in memory order: assembled from two halves, it would wait for both in memory. The
// elements of an incomplete group are loaded one by one.
template <class Count>
constexpr bool is_halved = false;
template <int64_t count>
constexpr bool is_halved<Whole<count>> = count * int64_t(sizeof(float)) >= 2 * stream_width;

template <class Count, bool = is_halved<Count>>
struct Halves {
  const bfloat16* const from;

  JITGEN_MEMBER Halves(const bfloat16* from, Count) : from(from) {}
  JITGEN_MEMBER float at(int64_t j) const { return load(from[j]); }
  // Which element of the group that is.
  JITGEN_INLINE int64_t element(int64_t j) { return j; }
};
template <int64_t count>
struct Halves<Whole<count>, true> {
  alignas(cache_line) float lane[count];

  JITGEN_MEMBER Halves(const bfloat16* from, Whole<count>) {
#pragma omp simd
    for (int64_t j = 0; j < count / 2; ++j) {
      const Pair pair = load_pair(from + 2 * j);
      lane[j] = pair.low;
      lane[count / 2 + j] = pair.high;
    }
  }
  JITGEN_MEMBER float at(int64_t j) const { return lane[j]; }
  JITGEN_INLINE int64_t element(int64_t j) { return j < count / 2 ? 2 * j : 2 * j - count + 1; }
};

namespace detail {

// Whole cache lines to where they belong, past the cache or not: by vectors, for a memcpy would need them in memory.
template <int64_t bytes>
JITGEN_INLINE void put(void* to, const void* lines, bool past) {
  if constexpr (bytes % stream_width != 0) {
    __builtin_memcpy(to, lines, bytes);
  } else {
    const stream_vector* const source = static_cast<const stream_vector*>(lines);  // auto would lose that it may alias
    if (past) {
#pragma GCC unroll 32
      for (int64_t i = 0; i < bytes / stream_width; ++i) stream_one(static_cast<stream_vector*>(to) + i, source[i]);
    } else {
#pragma GCC unroll 32
      for (int64_t i = 0; i < bytes / stream_width; ++i) static_cast<stream_source*>(to)[i] = source[i];
    }
  }
}

}  // namespace detail

// A group of results that is stored to `to`: with `past` by non-temporal stores, to an address that is a multiple of a
// cache line. The elements of an incomplete group are stored one by one.
template <class Storage, class Count>
struct Group {
  Storage* const to;

  JITGEN_MEMBER Group(Storage* to, Count) : to(to) {}
  template <class Compute>
  JITGEN_MEMBER void set(int64_t j, Compute value) {
    to[j] = store<Storage>(value);
  }
  JITGEN_MEMBER void write(bool) const {}
};
template <class Storage, int64_t count>
struct Group<Storage, Whole<count>> {
  alignas(cache_line) Storage lane[count];
  Storage* const to;

  JITGEN_MEMBER Group(Storage* to, Whole<count>) : to(to) {}
  template <class Compute>
  JITGEN_MEMBER void set(int64_t j, Compute value) {
    lane[j] = store<Storage>(value);
  }
  JITGEN_MEMBER void write(bool past) const { detail::put<sizeof(lane)>(to, lane, past); }
};

// The same of values in the order of Halves. `narrow_nan`: see round_bfloat16.
template <class Storage, class Count, bool narrow_nan = false, bool = is_halved<Count>>
struct GroupOfHalves : Group<Storage, Count> {
  using Group<Storage, Count>::Group;
};
template <int64_t count, bool narrow_nan>
struct GroupOfHalves<bfloat16, Whole<count>, narrow_nan, true> {
  alignas(cache_line) float lane[count];
  bfloat16* const to;

  JITGEN_MEMBER GroupOfHalves(bfloat16* to, Whole<count>) : to(to) {}
  JITGEN_MEMBER void set(int64_t j, float value) { lane[j] = value; }
  JITGEN_MEMBER void write(bool past) const {
    alignas(cache_line) bfloat16 packed[count];
#pragma omp simd
    for (int64_t j = 0; j < count / 2; ++j) store_pair<narrow_nan>(packed + 2 * j, {lane[j], lane[count / 2 + j]});
    detail::put<sizeof(packed)>(to, packed, past);
  }
};

template <class Storage, class Count>
using GroupOfNarrowNan = GroupOfHalves<Storage, Count, true>;

// Results of short rows that are stored past the cache, several rows at a time where they follow each other in memory.
// Row by row, lines that two rows share would be written in pieces.
template <class Storage, int64_t longest>
struct Stage {
  static constexpr int64_t capacity = 4096 / sizeof(Storage) + longest;
  alignas(cache_line) Storage buffer[capacity];
  Storage* begin = nullptr;
  int64_t count = 0;
  Seam seam;

  // Where the results of the row at `row` are to be written.
  JITGEN_MEMBER Storage* place(Storage* row, int64_t length) {
    if (row != begin + count || count + length > capacity) {
      flush();
      begin = row;
    }
    count += length;
    return buffer + count - length;
  }
  // After the last row.
  inline void finish() {
    flush();
    seam.flush();
  }

 private:
  inline void flush() {
    if (count != 0) seam.stream(begin, buffer, count * int64_t(sizeof(Storage)));
    count = 0;
  }
};

// Where the blocks of a row's results are written: to the row itself, past the cache if `streaming`, or first to
// `buffer` if the row does not consist of whole lines.
template <class Storage>
struct Output {
  Storage* const row;
  Storage* const buffer;
  const bool past;
  const bool buffered;
  Seam& seam;

  JITGEN_MEMBER Output(Storage* row, Storage* buffer, int64_t length, bool streaming, Seam& seam)
      : row(row),
        buffer(buffer),
        past(streaming && is_lines(row, length)),
        buffered(streaming && !is_lines(row, length)),
        seam(seam) {}
  JITGEN_INLINE bool is_lines(const Storage* row, int64_t length) {
    return detail::offset_in_line(row) == 0 && length * int64_t(sizeof(Storage)) % cache_line == 0;
  }

  JITGEN_MEMBER Storage* begin(int64_t start) const { return buffered ? buffer : row + start; }
  JITGEN_MEMBER void end(int64_t start, int64_t count) const {
    if (buffered) seam.stream(row + start, buffer, count * int64_t(sizeof(Storage)));
  }
};

}  // namespace jitgen
