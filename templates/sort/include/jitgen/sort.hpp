// The ranks of a row on the host: the places of its elements in the order of jitgen/ir/sorts.py.
//
// An element becomes a key, an unsigned integer of its width that is ordered as elements are: floats by the usual change
// of their bits, with one key for all NaN, above every number, and one for both zeros; downward, its complement. Keys
// are sorted by their bytes, the lowest first, each time stably (radix sort), so that equal elements keep the order of
// their places. A byte that all keys share costs no pass. Where few ranks are asked for, elements beyond the last of them
// are dropped by one comparison as they are read, and what remains is sorted from time to time.
#pragma once

#include "jitgen/base.hpp"
#include "jitgen/memory.hpp"
#include "jitgen/parallel.hpp"
#include "jitgen/storage.hpp"

namespace jitgen {
namespace detail {

// -------------------------------------------------------------------------------------------------------------- keys

template <class Key>
JITGEN_INLINE Key float_key(Key bits, Key infinity) {
  constexpr Key sign = Key(Key(1) << (8 * sizeof(Key) - 1));
  const Key magnitude = Key(bits & Key(~sign));
  const Key key = bits & sign ? Key(sign - magnitude) : Key(sign + magnitude);
  return magnitude > infinity ? Key(~Key(0)) : key;
}

JITGEN_INLINE uint16_t key_of(bfloat16 x) { return float_key<uint16_t>(x.bits, 0x7f80u); }
JITGEN_INLINE uint16_t key_of(float16 x) { return float_key<uint16_t>(x.bits, 0x7c00u); }
JITGEN_INLINE uint32_t key_of(float x) { return float_key<uint32_t>(bits_of(x), 0x7f800000u); }
JITGEN_INLINE uint64_t key_of(double x) { return float_key<uint64_t>(bits_of(x), 0x7ff0000000000000u); }
JITGEN_INLINE uint8_t key_of(boolean x) { return x.byte != 0; }
JITGEN_INLINE uint8_t key_of(uint8_t x) { return x; }
template <class Integer>
JITGEN_INLINE unsigned_t<Integer> key_of(Integer x) {
  using Key = unsigned_t<Integer>;
  return Key(Key(x) ^ Key(Key(1) << (8 * sizeof(Key) - 1)));
}

}  // namespace detail

// ------------------------------------------------------------------------------------------------------------- groups

// Which elements of a row are of the groups that are kept: the `kept` of `groups` whose greatest element, or the sum of
// whose two greatest (`terms`), is greatest. NaN is beyond every number; of equal groups the first comes first.
template <int groups, int kept, int terms>
inline void open_groups(const float* elements, int64_t length, uint8_t* open) {
  const int64_t size = length / groups;
  float counts[groups];
  for (int group = 0; group < groups; ++group) {
    const float* const own = elements + group * size;
    uint32_t first = detail::key_of(own[0]), second = 0;
    float greatest = own[0], next = 0;
    for (int64_t i = 1; i < size; ++i) {
      const uint32_t key = detail::key_of(own[i]);
      if (key > first) {
        second = first;
        next = greatest;
        first = key;
        greatest = own[i];
      } else if (i == 1 || key > second) {
        second = key;
        next = own[i];
      }
    }
    counts[group] = terms == 1 ? greatest : greatest + next;
  }
  for (int group = 0; group < groups; ++group) {
    const uint32_t own = detail::key_of(counts[group]);
    int before = 0;
    for (int other = 0; other < groups; ++other) {
      const uint32_t key = detail::key_of(counts[other]);
      before += key > own || (key == own && other < group);
    }
    for (int64_t i = 0; i < size; ++i) open[group * size + i] = before < kept;
  }
}

// -------------------------------------------------------------------------------------------------------------- rows

// Sorts rows of `length` elements, one after another: fill `elements`, then ask for the places `sorted()`.
template <class Element, class Place, bool descending>
class Sorter {
  using Key = decltype(detail::key_of(Element()));
  struct Entry {
    Key key;
    Place position;
  };
  static constexpr int64_t short_row = 48;    // entries up to which insertion is quicker than counting
  static constexpr int64_t least_room = 512;  // entries that are sorted together at least, where few ranks are asked for
  static constexpr int64_t few = 8;           // ranks are few where a row has so many times more elements

 public:
  Element* elements;

  // `ranks`: how many of the first ranks are asked for.
  Sorter(int64_t length, int64_t ranks) : length(length), ranks(ranks) {
    const bool partial = ranks * few <= length && length > least_room;
    room = partial ? (2 * ranks > least_room ? 2 * ranks : least_room) : length;
    elements = allocated<Element>(length);
    entries = allocated<Entry>(room);
    other = allocated<Entry>(room);
    positions = allocated<Place>(room);
  }
  ~Sorter() {
    __builtin_free(elements);
    __builtin_free(entries);
    __builtin_free(other);
    __builtin_free(positions);
  }
  Sorter(const Sorter&) = delete;

  // Whether there was memory for it.
  bool ready() const { return elements && entries && other && positions; }

  // The places of the row's first `ranks` ranks, in order.
  const Place* sorted() {
    int64_t count = length;
    if (room < length) {
      count = chosen();
    } else {
      for (int64_t i = 0; i < length; ++i) entries[i] = {key(i), Place(i)};
    }
    sort(count);
    for (int64_t i = 0; i < ranks; ++i) positions[i] = entries[i].position;
    return positions;
  }

 private:
  int64_t length, ranks, room;
  Entry* entries;
  Entry* other;
  Place* positions;

  template <class T>
  static T* allocated(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + cache_line) / cache_line * cache_line;
    return static_cast<T*>(needed_memory(cache_line, bytes));
  }

  Key key(int64_t i) const {
    const Key up = detail::key_of(elements[i]);
    return descending ? Key(~up) : up;
  }

  // Entries among which the first ranks are, in the order of their places among equals; how many.
  int64_t chosen() {
    int64_t count = room < length ? room : length;
    for (int64_t i = 0; i < count; ++i) entries[i] = {key(i), Place(i)};
    sort(count);
    int64_t from = count;
    count = ranks;
    if (count == 0) return 0;
    Key last = entries[count - 1].key;
    constexpr int64_t block = 64;
    for (; from < length; from += block) {
      const int64_t size = length - from < block ? length - from : block;
      // An element that equals the last rank comes behind it, because its place does.
      int any = 0;
#pragma omp simd reduction(| : any)
      for (int64_t i = 0; i < size; ++i) any |= key(from + i) < last;
      if (!any) continue;
      for (int64_t i = from; i < from + size; ++i) {
        const Key own = key(i);
        if (own >= last) continue;
        entries[count++] = {own, Place(i)};
        if (count == room) {
          sort(count);
          count = ranks;
          last = entries[count - 1].key;
        }
      }
    }
    return count;
  }

  // Sorts the first `count` entries by their keys, stably.
  void sort(int64_t count) {
    if (count <= short_row) return insert(count);
    constexpr int bytes = sizeof(Key);
    int64_t counts[bytes][256] = {};
    for (int64_t i = 0; i < count; ++i) {
      for (int byte = 0; byte < bytes; ++byte) ++counts[byte][uint8_t(entries[i].key >> (8 * byte))];
    }
    for (int byte = 0; byte < bytes; ++byte) {
      const int shift = 8 * byte;
      int64_t* const begins = counts[byte];
      if (begins[uint8_t(entries[0].key >> shift)] == count) continue;
      int64_t before = 0;
      for (int digit = 0; digit < 256; ++digit) {
        const int64_t here = begins[digit];
        begins[digit] = before;
        before += here;
      }
      for (int64_t i = 0; i < count; ++i) other[begins[uint8_t(entries[i].key >> shift)]++] = entries[i];
      Entry* const sorted = other;
      other = entries;
      entries = sorted;
    }
  }

  void insert(int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
      const Entry own = entries[i];
      int64_t at = i;
      for (; at > 0 && own.key < entries[at - 1].key; --at) entries[at] = entries[at - 1];
      entries[at] = own;
    }
  }
};

}  // namespace jitgen
