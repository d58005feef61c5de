// Rows sorted by a block in shared memory, by the order of jitgen/ir/sorts.py.
//
// Elements are compared together with their places in the row, of which no two are the same, so that the network, which
// is not stable by itself, has one right result. Room that no element takes is `nowhere`, and comes last.
#pragma once

#include "jitgen/storage.cuh"

namespace jitgen {

constexpr int32_t nowhere = 0x7fffffff;

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

}  // namespace jitgen
