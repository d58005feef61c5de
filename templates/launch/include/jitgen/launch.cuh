// What a launch of a user's kernel in CUDA C++ needs: pointers without types, and elements as bits of another type.
#pragma once

#include "jitgen/math.cuh"

namespace jitgen_launch {

// An address that is a pointer to whatever the user's kernel takes there.
struct Pointer {
  const void* address;
  template <class Element>
  JITGEN_DEVICE operator Element*() const {
    return static_cast<Element*>(const_cast<void*>(address));
  }
};

template <class To, class From>
JITGEN_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "an element has the size of its type");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace jitgen_launch
