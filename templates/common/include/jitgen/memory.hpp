// Memory that the threads of a call share.
#pragma once

#include <stddef.h>

namespace jitgen {

// The C library's aligned_alloc under a name of our own; free it with __builtin_free. Libraries declare aligned_alloc
// differently (noexcept or not), and a source that is compiled as a torch operator includes their declaration too.
void* aligned_memory(size_t alignment, size_t bytes) __asm__("aligned_alloc");

}  // namespace jitgen
