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
  const uint32_t bits = uint32_t(__float_as_int(value + 0.0f));  // of -0, those of 0
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

// The number with the precedence `ascending` among descending ones.
JITGEN_DEVICE float preceding(uint32_t ascending) {
  return __int_as_float(int(ascending ^ (ascending >> 31 ? 0x80000000u : 0xffffffffu)));
}

// An element's precedence and place: of equal elements that with the greater `~place` comes first.
struct Key {
  uint32_t precedence, inverted_place;
  JITGEN_DEVICE uint64_t whole() const { return uint64_t(precedence) << 32 | inverted_place; }
};

// Sorts `keys`, the greatest first, by odd-even merges (Batcher, 1968). One comparison chooses four words: as a swap of
// 64-bit numbers it would be compiled to two.
template <int count>
JITGEN_DEVICE void sort_keys(Key (&keys)[count]) {
#pragma unroll
  for (int run = 1; run < count; run *= 2) {
#pragma unroll
    for (int distance = run; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int from = distance % run;  // 0 in a run's first merge
        const bool first = i >= from && (i - from) % (2 * distance) < distance && i + distance < count;
        if (first && i / (2 * run) == (i + distance) / (2 * run)) {
          const Key a = keys[i], b = keys[i + distance];
          const bool swap = a.whole() < b.whole();
          keys[i].precedence = swap ? b.precedence : a.precedence;
          keys[i].inverted_place = swap ? b.inverted_place : a.inverted_place;
          keys[i + distance].precedence = swap ? a.precedence : b.precedence;
          keys[i + distance].inverted_place = swap ? a.inverted_place : b.inverted_place;
        }
      }
    }
  }
}

// Selects the ranks `start` .. `start + count` of a row, of which the lanes of a warp have `tile` elements each, lane l
// those at places j * 32 + l: lane r gets rank `start + r`, with its place in the row. The warp finds the first of the
// elements that are left: each lane has its own in order, so that one of them is the first. `places` are forgotten.
template <class Order, int tile, class Element>
JITGEN_DEVICE void select_ranks(const Element (&elements)[tile], int32_t (&places)[tile], int start, int count, int lane,
                                Element& rank, int32_t& place) {
  if constexpr (sizeof(Element) <= 4) {
    Key keys[tile];  // what is nowhere comes last
#pragma unroll
    for (int j = 0; j < tile; ++j) {
      const uint32_t precedence = Order::precedence(elements[j]);
      keys[j] = {places[j] == nowhere ? 0u : precedence, ~uint32_t(places[j])};
    }
    sort_keys(keys);
#pragma unroll 1
    for (int i = 0; i < start + count; ++i) {
      const uint32_t greatest = __reduce_max_sync(0xffffffffu, keys[0].precedence);
      const uint32_t mine = keys[0].precedence == greatest ? keys[0].inverted_place : 0u;
      const uint32_t first = __reduce_max_sync(0xffffffffu, mine);
      if (i == start + lane) place = int32_t(~first);
      if (keys[0].inverted_place == first) {
#pragma unroll
        for (int j = 1; j < tile; ++j) keys[j - 1] = keys[j];
        keys[tile - 1] = {0u, ~uint32_t(nowhere)};
      }
    }
#pragma unroll
    for (int j = 0; j < tile; ++j) {
      const Element other = of_lane(elements[j], place & 31);
      if (place >> 5 == j) rank = other;
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

// The group of a column, `inverse` being one over the size of a group: its nearest float, or one beside that, is exact
// enough for columns below 2^16, since the middle of a column is half a column away from the next group.
JITGEN_DEVICE int group_of(int column, float inverse) { return int((float(column) + 0.5f) * inverse); }

// Lanes that find the greatest elements of a group together.
template <int groups>
JITGEN_DEVICE constexpr int lanes_of_group() {
  return groups > 16 ? 1 : groups > 8 ? 2 : groups > 4 ? 4 : groups > 2 ? 8 : 16;
}
template <int groups>
JITGEN_DEVICE bool is_open(uint32_t open, int column, float inverse) {
  return open >> (group_of(column, inverse) * lanes_of_group<groups>() & 31) & 1;
}

// The groups of a row that are kept, a bit for the first lane of each: the `kept` of `groups` whose greatest element, or
// the sum of whose two greatest (`terms`), is greatest. Lanes have elements j * 32 + lane of the row, and `shared` has
// room for all. Of equal groups the first comes first.
template <int groups, int kept, int terms, int tile>
JITGEN_DEVICE uint32_t open_groups(const float (&elements)[tile], uint32_t (&shared)[tile * 32], int length, int lane) {
  constexpr int lanes = lanes_of_group<groups>(), most = (tile * 32 / groups + lanes - 1) / lanes;
  const int size = length / groups, group = lane / lanes;
#pragma unroll
  for (int j = 0; j < tile; ++j) shared[j * 32 + lane] = precedence<true>(elements[j]);
  __syncwarp();
  // Groups start at elements of their own, so that lanes read different banks.
  const int start = group < groups ? group * size : 0, turn = group * lanes % size;
  uint32_t first = 0, second = 0;  // of nothing
#pragma unroll
  for (int i = 0; i < most; ++i) {
    const int element = i * lanes + lane % lanes, turned = element + turn;
    const uint32_t key = element < size ? shared[start + (turned < size ? turned : turned - size)] : 0u;
    const uint32_t lesser = key < first ? key : first;
    second = lesser > second ? lesser : second;
    first = key > first ? key : first;
  }
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) {
    const uint32_t other = from_lane(first, distance), next = from_lane(second, distance);
    const uint32_t lesser = other < first ? other : first;
    second = next > second ? next : second;
    second = lesser > second ? lesser : second;
    first = other > first ? other : first;
  }
  if (terms == 2) first = precedence<true>(preceding(first) + preceding(second));
  int before = 0;
#pragma unroll
  for (int other = 0; other < groups; ++other) {
    const uint32_t theirs = of_lane(first, other * lanes);
    before += theirs > first || (theirs == first && other < group);
  }
  return __ballot_sync(0xffffffffu, lane % lanes == 0 && group < groups && before < kept);
}

}  // namespace jitgen
