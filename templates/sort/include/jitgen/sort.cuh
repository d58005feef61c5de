// Rows sorted by a block in shared memory, by the order of jitgen/ir/sorts.py.
//
// Elements are compared together with their places in the row, of which no two are the same, so that the network, which
// is not stable by itself, has one right result. Room that no element takes is `nowhere`, and comes last.
#pragma once

#include "jitgen/lanes.cuh"
#include "jitgen/storage.cuh"

namespace jitgen {

constexpr int32_t nowhere = 0x7fffffff;

// The value that lane `lane` of the warp has.
template <class T>
JITGEN_DEVICE T of_lane(T value, int lane) {
  return by_words(value, [=](uint32_t word) { return __shfl_sync(0xffffffffu, word, lane); });
}

// A number that is the greater the earlier `value`, a number of at most 32 bits, comes; equal numbers have the same.
template <bool descending>
JITGEN_DEVICE uint32_t precedence(float value) {
  if (value != value) return descending ? 0xffffffffu : 0u;
  const uint32_t bits = value == 0.0f ? 0u : uint32_t(__float_as_int(value));
  const uint32_t ascending = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
  return descending ? ascending : ~ascending;
}
template <bool descending>
JITGEN_DEVICE uint32_t precedence(int32_t value) {
  const uint32_t ascending = uint32_t(value) ^ 0x80000000u;
  return descending ? ascending : ~ascending;
}

template <class Element, bool descending>
struct Order {
  // Whether `a` comes before `b`, and not only for its place. NaN is beyond every number.
  static JITGEN_DEVICE bool precedes(Element a, Element b) {
    const auto x = load(a), y = load(b);
    const bool x_number = x == x, y_number = y == y;
    return descending ? x > y || (!x_number && y_number) : x < y || (x_number && !y_number);
  }
  static JITGEN_DEVICE bool precedes(Element a, int32_t place_a, Element b, int32_t place_b) {
    if (place_a == nowhere || place_b == nowhere) return place_a < place_b;
    return precedes(a, b) || (!precedes(b, a) && place_a < place_b);
  }
  // A number that is the greater the earlier an element of at most 32 bits comes; equal elements have the same.
  static JITGEN_DEVICE uint32_t precedence(Element element) {
    return jitgen::precedence<descending>(load(element));
  }
};

// Sorts every `tile` of `room` elements, both powers of two, by bitonic merges (Batcher, "Sorting networks and their
// applications", 1968): runs of `span` elements, every other one backward, are merged from runs of half that.
template <class Order, int threads, int room, int tile, class Element>
JITGEN_DEVICE void sort_tiles(Element* elements, int32_t* positions) {
  for (int span = 2; span <= tile; span *= 2) {
    for (int distance = span / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < room / 2; pair += threads) {
        const int first = 2 * pair - (pair & (distance - 1));
        const int second = first + distance;
        const bool backward = (first & (tile - 1) & span) != 0;
        const Element a = elements[first], b = elements[second];
        const int32_t place_a = positions[first], place_b = positions[second];
        if (Order::precedes(b, place_b, a, place_a) != backward) {
          elements[first] = b;
          elements[second] = a;
          positions[first] = place_b;
          positions[second] = place_a;
        }
      }
    }
  }
  __syncthreads();
}

// Selects the ranks `start` .. `start + count` of a row, of which the lanes of a warp have `tile` elements each, lane l
// those at places j * 32 + l: lane r gets rank `start + r`, with its place in the row. The warp finds the first of the
// elements that are left. `places` are forgotten.
template <class Order, int tile, class Element>
JITGEN_DEVICE void select_ranks(const Element (&elements)[tile], int32_t (&places)[tile], int start, int count, int lane,
                                Element& rank, int32_t& place) {
  if constexpr (sizeof(Element) <= 4) {
    uint32_t precedences[tile];  // 0, which others may have too, of what is nowhere
#pragma unroll
    for (int j = 0; j < tile; ++j) precedences[j] = places[j] == nowhere ? 0u : Order::precedence(elements[j]);
    for (int i = 0; i < start + count; ++i) {
      uint32_t first = precedences[0];
#pragma unroll
      for (int j = 1; j < tile; ++j) first = precedences[j] > first ? precedences[j] : first;
      const uint32_t greatest = __reduce_max_sync(0xffffffffu, first);
      int32_t at = nowhere;
#pragma unroll
      for (int j = 0; j < tile; ++j) {
        const int32_t equal = precedences[j] == greatest ? places[j] : nowhere;
        at = equal < at ? equal : at;
      }
      at = int32_t(__reduce_min_sync(0xffffffffu, uint32_t(at)));
      if (i == start + lane) place = at;
#pragma unroll
      for (int j = 0; j < tile; ++j) {
        if (places[j] == at) {
          places[j] = nowhere;
          precedences[j] = 0;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < tile; ++j) {
      const Element other = of_lane(elements[j], place % 32);
      if (place / 32 == j) rank = other;
    }
    return;
  }
  for (int i = 0; i < start + count; ++i) {
    Element first = elements[0];
    int32_t at = places[0];
#pragma unroll
    for (int j = 1; j < tile; ++j) {
      if (Order::precedes(elements[j], places[j], first, at)) {
        first = elements[j];
        at = places[j];
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const Element other = from_lane(first, distance);
      const int32_t other_at = from_lane(at, distance);
      if (Order::precedes(other, other_at, first, at)) {
        first = other;
        at = other_at;
      }
    }
    if (i == start + lane) {
      rank = first;
      place = at;
    }
#pragma unroll
    for (int j = 0; j < tile; ++j) {
      if (places[j] == at) places[j] = nowhere;
    }
  }
}

// The groups of a row that are kept, a bit for each: the `kept` of `groups` whose greatest element, or the sum of whose
// two greatest (`terms`), is greatest. Lanes have elements j * 32 + lane of the row. Of equal groups the first comes first.
template <int groups, int kept, int terms, int tile>
JITGEN_DEVICE uint32_t open_groups(const float (&elements)[tile], int length, int lane) {
  using Greatest = Order<float, true>;
  const int size = length / groups;
  float counts[groups];
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    float first = 0, second = 0;
    int32_t place = nowhere, next = nowhere;  // of the greatest two
#pragma unroll
    for (int j = 0; j < tile; ++j) {
      const int column = j * 32 + lane;
      if (column < length && column / size == group) {
        if (Greatest::precedes(elements[j], column, first, place)) {
          second = first;
          next = place;
          first = elements[j];
          place = column;
        } else if (Greatest::precedes(elements[j], column, second, next)) {
          second = elements[j];
          next = column;
        }
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = from_lane(first, distance), other_second = from_lane(second, distance);
      const int32_t other_place = from_lane(place, distance), other_next = from_lane(next, distance);
      if (Greatest::precedes(other, other_place, first, place)) {
        const bool mine = Greatest::precedes(first, place, other_second, other_next);
        second = mine ? first : other_second;
        next = mine ? place : other_next;
        first = other;
        place = other_place;
      } else if (Greatest::precedes(other, other_place, second, next)) {
        second = other;
        next = other_place;
      }
    }
    counts[group] = terms == 1 ? first : first + second;
  }
  uint32_t open = 0;
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    int before = 0;
#pragma unroll
    for (int other = 0; other < groups; ++other) {
      before += Greatest::precedes(counts[other], other, counts[group], group);
    }
    open |= uint32_t(before < kept) << group;
  }
  return open;
}

}  // namespace jitgen
