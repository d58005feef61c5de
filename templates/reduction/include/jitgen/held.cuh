// A thread's elements of a row, as vectors of 16 bytes. The first `registers` vectors lie in registers, the others in
// shared memory, where the vectors of one thread are `stride` vectors apart.
//
//   jitgen::Held<float, 4, 8, threads> x(in_shared);  // `in_shared` points to the thread's first vector in shared memory
//   x.fetch(u, pointer);         // loads vector u from global memory; to shared memory it is copied past the registers
//   jitgen::wait_for_copies();   // behind this the copies have arrived
//   const auto vector = x[u];
//   y.put(u, vector);            // y may use the shared memory of x, whose vector u is then overwritten
#pragma once

#include "jitgen/vector.cuh"

namespace jitgen {

template <class Storage, int width, int registers, int stride>
struct Held {
  using Values = Vector<Storage, width>;
  static_assert(Values::bytes == 16, "a place takes one access");

  Values in_registers[registers];
  uint4* const in_shared;

  JITGEN_DEVICE explicit Held(uint4* own) : in_shared(own) {}
  JITGEN_DEVICE Values operator[](int u) const {
    if (u < registers) return in_registers[u];
    Values values;
    values.words[0] = in_shared[(u - registers) * stride];
    return values;
  }
  JITGEN_DEVICE void put(int u, const Values& values) {
    if (u < registers) {
      in_registers[u] = values;
    } else {
      in_shared[(u - registers) * stride] = values.words[0];
    }
  }
  JITGEN_DEVICE void fetch(int u, const Storage* from) {
    if (u < registers) {
      in_registers[u] = load_vector<width>(from);
      return;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const uint32_t to = uint32_t(__cvta_generic_to_shared(in_shared + (u - registers) * stride));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
#endif
  }
};

// Waits for all copies to shared memory that this thread has started by `fetch`.
JITGEN_DEVICE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace jitgen
