// What a kernel needs around its arithmetic: an even distribution of work among threads, and non-temporal stores.
//
// A thread computes a block into a small aligned buffer, streams the buffer to memory, and calls stream_fence() once at
// the end of its share: non-temporal stores are weakly ordered, and another thread may read them only after a fence.
// They save the read of every output line that an ordinary store must first bring into the cache ("write allocate"), a
// third of the traffic of a copy; they lose when the result is read again soon, so the caller decides by size.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {

constexpr int64_t cache_line = 64;

// ------------------------------------------------------------------------------------------------------------- split

struct Range {
  int64_t begin;
  int64_t end;
};

// The share of `thread` in [0, total), cut at multiples of `unit`: shares differ by at most one unit, earlier threads
// get the larger ones, and a thread without work gets an empty range.
JITGEN_INLINE Range share(int64_t total, int64_t unit, int64_t thread, int64_t threads) {
  const int64_t units = total / unit + (total % unit != 0);
  const int64_t each = units / threads;
  const int64_t extra = units % threads;
  const int64_t first = thread * each + (thread < extra ? thread : extra);
  const int64_t begin = first * unit;
  const int64_t end = (first + each + (thread < extra)) * unit;
  return {begin < total ? begin : total, end < total ? end : total};
}

// --------------------------------------------------------------------------------------------------- streaming stores

#if defined(__AVX512F__)
constexpr int64_t stream_width = 64;
#elif defined(__AVX__)
constexpr int64_t stream_width = 32;
#else
constexpr int64_t stream_width = 16;
#endif

namespace detail {

typedef long long stream_vector __attribute__((vector_size(stream_width), may_alias));
typedef long long stream_source __attribute__((vector_size(stream_width), may_alias, aligned(1)));

JITGEN_INLINE void stream_one(stream_vector* to, stream_vector value) {
#if defined(__clang__)
  __builtin_nontemporal_store(value, to);
#elif defined(__AVX512F__)
  __builtin_ia32_movntdq512(to, value);
#elif defined(__AVX__)
  __builtin_ia32_movntdq256(to, value);
#elif defined(__SSE2__)
  __builtin_ia32_movntdq(to, value);
#else
  *to = value;
#endif
}

// Whole lines: `to` is a multiple of one, any alignment of `from` works and a cache line's is fastest.
JITGEN_INLINE void stream_lines(char* to, const char* from, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += cache_line) {
#pragma GCC unroll 4
    for (int64_t chunk = 0; chunk < cache_line; chunk += stream_width) {
      stream_one(reinterpret_cast<stream_vector*>(to + done + chunk),
                 *reinterpret_cast<const stream_source*>(from + done + chunk));
    }
  }
}

JITGEN_INLINE int64_t offset_in_line(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) & (cache_line - 1));
}

}  // namespace detail

// Copies `bytes` from `source` (a block buffer) to `target`, without reading the target's lines into the cache. Lines
// that only partly belong to the target are written with ordinary stores: non-temporal stores of partial lines would
// cost a read and a write of memory each.
JITGEN_INLINE void stream(void* target, const void* source, int64_t bytes) {
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  const int64_t misaligned = -detail::offset_in_line(to) & (cache_line - 1);
  const int64_t head = misaligned < bytes ? misaligned : bytes;
  if (head != 0) __builtin_memcpy(to, from, head);
  const int64_t whole = (bytes - head) & -cache_line, done = head + whole;
  detail::stream_lines(to + head, from + head, whole);
  if (done < bytes) __builtin_memcpy(to + done, from + done, bytes - done);
}

// The same for runs of bytes, each of which begins where the one before it ends. A line that two runs share is buffered
// until the second run completes it, and then written by non-temporal stores too.
struct Seam {
  alignas(cache_line) char line[cache_line];
  char* at = nullptr;  // the address of the line
  int64_t begin = 0;   // of the buffered bytes, within the line
  int64_t end = 0;

  inline void stream(void* target, const void* source, int64_t bytes) {
    char* to = static_cast<char*>(target);
    const char* from = static_cast<const char*>(source);
    const int64_t offset = detail::offset_in_line(to);
    if (offset != 0) {
      const int64_t head = cache_line - offset < bytes ? cache_line - offset : bytes;
      hold(to - offset, offset, from, head);
      to += head;
      from += head;
      bytes -= head;
    }
    const int64_t whole = bytes & -cache_line;
    detail::stream_lines(to, from, whole);
    if (whole < bytes) hold(to + whole, 0, from + whole, bytes - whole);
  }
  // Writes the buffered bytes.
  inline void flush() {
    if (begin == 0 && end == cache_line) {
      detail::stream_lines(at, line, cache_line);
    } else if (begin < end) {
      __builtin_memcpy(at + begin, line + begin, end - begin);
    }
    begin = end = 0;
    at = nullptr;
  }

 private:
  inline void hold(char* place, int64_t offset, const char* from, int64_t bytes) {
    if (place != at || offset != end) {
      flush();
      at = place;
      begin = offset;
    }
    __builtin_memcpy(line + offset, from, bytes);
    end = offset + bytes;
    if (end == cache_line) flush();
  }
};

// Makes this thread's streamed stores visible to whoever synchronises with it afterwards.
JITGEN_INLINE void stream_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#else
  __sync_synchronize();
#endif
}

}  // namespace jitgen
