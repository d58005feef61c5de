// What a call of a user's function in C++ needs: pointers without types, and elements as bits of another type.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen_launch {

// An address that is a pointer to whatever the user's function takes there.
struct Pointer {
  const void* address;
  template <class Element>
  operator Element*() const {
    return static_cast<Element*>(const_cast<void*>(address));
  }
};

template <class To, class From>
JITGEN_INLINE To bits_as(From from) {
  return jitgen::bit_cast<To>(from);
}

}  // namespace jitgen_launch
