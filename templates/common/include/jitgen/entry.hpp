// The entry of a kernel: a method of `Params`, which holds what a launch passes.
//
// ctypes converts and checks every argument of a call, about 90 ns each; packing them with struct.pack and passing the
// one pointer costs a third of that in all. JITGEN_ENTRY(kernel) defines `kernel_packed`, which takes that buffer: it
// holds the members of `Params` in order, each in a slot of eight bytes (a float or an int32_t in the slot's first
// four); jitgen/runtime/cpu.py writes it. It returns 0, the status of a kernel that checks indices, or no_memory.
// `kernel` itself is for C++ that makes a `Params` (jitgen/compilers/torch_operator.hpp).
#pragma once

#include "jitgen/base.hpp"
#include "jitgen/memory.hpp"

namespace jitgen {
namespace detail {

template <class Params>
JITGEN_INLINE int32_t status_of(const Params& params, void (Params::*run)() const) {
  (params.*run)();
  return 0;
}

// Of a kernel that checks indices.
template <class Params>
JITGEN_INLINE int32_t status_of(const Params& params, int32_t (Params::*run)() const) {
  return (params.*run)();
}

template <class Params>
JITGEN_INLINE int32_t run_packed(const unsigned char* slots) {
  const int64_t failed = failed_allocations();
  Params params;
  __builtin_memcpy(&params, slots, sizeof(Params));
  const int32_t status = status_of(params, &Params::run);
  return failed_allocations() == failed ? status : no_memory;
}

}  // namespace detail
}  // namespace jitgen

#define JITGEN_ENTRY(kernel)                                              \
  [[maybe_unused]] static auto kernel(Params params) { return params.run(); } \
  extern "C" int32_t kernel##_packed(const unsigned char* slots) { return jitgen::detail::run_packed<Params>(slots); }
