// One value of each element that a thread has of a row: vectors of 16 bytes of which the first `registers` lie in
// registers and the others in shared memory, where every thread has places of its own, `stride` apart.
//
//   jitgen::Held<float, 4, 8, threads> x(places);
//   x.fetch(u, pointer);         // from global memory; what goes to shared memory takes no register on its way there,
//   jitgen::wait_for_copies();   // and is there behind this
//   const auto vector = x[u];
//   y.put(u, vector);            // y may have the places of x, whose vector u is then no more
#pragma once

#include "jitgen/vector.cuh"

namespace jitgen {

template <class Storage, int width, int registers, int stride>
struct Held {
  using Values = Vector<Storage, width>;
  static_assert(Values::bytes == 16, "a place takes one access");

  Values kept[registers];
  uint4* const places;

  JITGEN_DEVICE explicit Held(uint4* own) : places(own) {}
  JITGEN_DEVICE Values operator[](int u) const {
    if (u < registers) return kept[u];
    Values values;
    values.words[0] = places[(u - registers) * stride];
    return values;
  }
  JITGEN_DEVICE void put(int u, const Values& values) {
    if (u < registers) {
      kept[u] = values;
    } else {
      places[(u - registers) * stride] = values.words[0];
    }
  }
  JITGEN_DEVICE void fetch(int u, const Storage* from) {
    if (u < registers) {
      kept[u] = load_vector<width>(from);
      return;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const uint32_t to = uint32_t(__cvta_generic_to_shared(places + (u - registers) * stride));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
#endif
  }
};

JITGEN_DEVICE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace jitgen
