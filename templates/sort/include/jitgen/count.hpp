// A row of whole numbers below a bound, put in order by counting them, on the host.
#pragma once

#include "jitgen/base.hpp"
#include "jitgen/memory.hpp"
#include "jitgen/parallel.hpp"
#include "jitgen/storage.hpp"

namespace jitgen {

// Counts rows of `length` elements, one after another: fill `elements`, ask for the ends, then for ranks in order of
// columns.
template <class Element>
class Counter {
 public:
  Element* elements;

  Counter(int64_t length, int64_t bound) : length(length), bound(bound) {
    elements = allocated<Element>(length);
    ends = allocated<int64_t>(bound);
    next = allocated<int64_t>(bound);
  }
  ~Counter() {
    __builtin_free(elements);
    __builtin_free(ends);
    __builtin_free(next);
  }
  Counter(const Counter&) = delete;

  // Whether there was memory for it.
  bool ready() const { return elements && ends && next; }

  // For each number how many elements are at most that.
  const int64_t* count() {
    for (int64_t number = 0; number < bound; ++number) ends[number] = 0;
    for (int64_t column = 0; column < length; ++column) {
      if (is_number(column)) ++ends[elements[column]];
    }
    int64_t sum = 0;
    for (int64_t number = 0; number < bound; ++number) {
      next[number] = sum;
      sum += ends[number];
      ends[number] = sum;
    }
    return ends;
  }
  // Where the element at `column` goes; -1 where it is no number below the bound.
  int64_t rank_of(int64_t column) { return is_number(column) ? next[elements[column]]++ : -1; }

 private:
  int64_t length, bound;
  int64_t* ends;
  int64_t* next;

  bool is_number(int64_t column) const { return elements[column] >= 0 && elements[column] < bound; }

  template <class T>
  static T* allocated(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + cache_line) / cache_line * cache_line;
    return static_cast<T*>(needed_memory(cache_line, bytes));
  }
};

}  // namespace jitgen
