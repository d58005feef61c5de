// A second entry point that takes all arguments as one buffer.
//
// ctypes converts and checks every argument of a call, about 90 ns each; packing them with struct.pack and passing the
// one pointer costs a third of that in all. JITGEN_PACKED_ENTRY(kernel) defines `kernel_packed` next to
// `extern "C" void kernel(...)`. It returns 0, the status of a kernel that checks indices, or no_memory. The buffer holds the arguments in order, each in a slot of eight bytes (a float or
// an int32_t in the slot's first four); jitgen/runtime/cpu.py writes it.
#pragma once

#include "jitgen/base.hpp"
#include "jitgen/memory.hpp"

namespace jitgen {
namespace detail {

template <class T>
JITGEN_INLINE T take(const unsigned char*& slot) {
  static_assert(sizeof(T) <= 8, "an argument fits one slot");
  T value;
  __builtin_memcpy(&value, slot, sizeof(T));
  slot += 8;
  return value;
}

// A constructor, because only in a braced list are arguments evaluated in their order.
template <class... Parameters>
struct Call {
  JITGEN_INLINE void unpack(void (*entry)(Parameters...), const unsigned char* slot) {
    Call{entry, take<Parameters>(slot)...};
  }
  __attribute__((always_inline)) Call(void (*entry)(Parameters...), Parameters... arguments) { entry(arguments...); }
};

// Of a kernel that returns a status.
template <class... Parameters>
struct CheckedCall {
  int32_t status;
  __attribute__((always_inline)) CheckedCall(int32_t (*entry)(Parameters...), Parameters... arguments)
      : status(entry(arguments...)) {}
};

template <class... Parameters>
JITGEN_INLINE int32_t call_packed(int32_t (*entry)(Parameters...), const unsigned char* slot) {
  const int64_t failed = failed_allocations();
  const int32_t status = CheckedCall<Parameters...>{entry, take<Parameters>(slot)...}.status;
  return failed_allocations() == failed ? status : no_memory;
}

template <class... Parameters>
JITGEN_INLINE int32_t call_packed(void (*entry)(Parameters...), const unsigned char* slots) {
  const int64_t failed = failed_allocations();
  Call<Parameters...>::unpack(entry, slots);
  return failed_allocations() == failed ? 0 : no_memory;
}

}  // namespace detail
}  // namespace jitgen

#define JITGEN_PACKED_ENTRY(kernel) \
  extern "C" int32_t kernel##_packed(const unsigned char* slots) { return jitgen::detail::call_packed(kernel, slots); }
