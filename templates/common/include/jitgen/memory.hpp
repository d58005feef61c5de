// Allocates memory that the threads of a call share.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace jitgen {

// The C library's aligned_alloc under a name of our own; free it with __builtin_free. Libraries declare aligned_alloc
// differently (noexcept or not), and a source that is compiled as a torch operator includes their declaration too.
void* aligned_memory(size_t alignment, size_t bytes) __asm__("aligned_alloc");

// What a packed entry returns where a kernel got no memory. Indices out of range have positive numbers.
constexpr int32_t no_memory = -1;

// How many allocations of this kernel failed so far, in all threads. A call during which the number grows has computed
// nothing, and its caller raises an error. So does one that runs at the same time in another thread, needlessly.
static int64_t counted_failures = 0;

inline int64_t failed_allocations() { return __atomic_load_n(&counted_failures, __ATOMIC_RELAXED); }

// Memory that a kernel cannot do without, to be freed with __builtin_free. Null where there is none, which is counted.
inline void* needed_memory(size_t alignment, size_t bytes) {
  void* const memory = aligned_memory(alignment, bytes);
  if (memory == nullptr) __atomic_fetch_add(&counted_failures, 1, __ATOMIC_RELAXED);
  return memory;
}

}  // namespace jitgen
