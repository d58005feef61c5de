// Aligned vectors of storage elements, moved in accesses of up to 16 bytes.
//
//   auto x = jitgen::load_vector<8>(pointer);      // pointer aligned to the vector's size, or to 16 if that is less
//   x[3]                                           // one element; subscripts must be constants after unrolling
//   jitgen::store_vector(pointer, y);
//
// A vector of 32 bytes moves as two accesses of 16. The cache policies are functions of their own, so that the choice
// is the template's: *_streaming and *_once are for data that is used once.
#pragma once

#include "jitgen/storage.cuh"

namespace jitgen {

template <int bytes>
struct AccessType;
template <>
struct AccessType<1> {
  using type = uint8_t;
};
template <>
struct AccessType<2> {
  using type = uint16_t;
};
template <>
struct AccessType<4> {
  using type = uint32_t;
};
template <>
struct AccessType<8> {
  using type = uint2;
};
template <>
struct AccessType<16> {
  using type = uint4;
};

template <class Storage, int N>
struct Vector {
  static constexpr int bytes = N * int(sizeof(Storage));
  static constexpr int width = bytes < 16 ? bytes : 16;
  static constexpr int count = bytes / width;
  static_assert(count * width == bytes, "a vector is 1, 2, 4, 8 bytes or a multiple of 16");
  using Access = typename AccessType<width>::type;

  union {
    Access words[count];
    Storage elements[N];
  };

  JITGEN_DEVICE Storage& operator[](int position) { return elements[position]; }
  JITGEN_DEVICE const Storage& operator[](int position) const { return elements[position]; }
};

// ----------------------------------------------------------------------------------------------- one access, by policy

// ld.global.nc.L1::no_allocate: reads through the read-only path and leaves L1 to data that is reused. It is for data
// that no kernel writes: it may be read before `previous_kernel_wait`, and compilers may move it there.
JITGEN_DEVICE uint4 read_once(const uint4* address) {
  uint4 word;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
      : "l"(address));
  return word;
}

// The same for data that the preceding kernel in the stream may have written. This load is executed after a
// `previous_kernel_wait` that precedes it in the program, which the read-only path does not guarantee. It may be
// reordered with stores to other elements.
JITGEN_DEVICE uint4 read_own(const uint4* address) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}
JITGEN_DEVICE uint2 read_own(const uint2* address) {
  uint2 word;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(address));
  return word;
}
template <class Access>
JITGEN_DEVICE Access read_own(const Access* address) {
  return *address;  // accesses this small use L1, since neighbouring threads share a line
}

// The same where neighbouring lanes read less than a line of 128 bytes: the second-level cache fetches all of it.
JITGEN_DEVICE uint4 read_own_line(const uint4* address) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}
JITGEN_DEVICE uint2 read_own_line(const uint2* address) {
  uint2 word;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(word.x), "=r"(word.y)
               : "l"(address));
  return word;
}

// ------------------------------------------------------------------------------------------------------------- vectors

template <int N, class Storage>
JITGEN_DEVICE Vector<Storage, N> load_vector(const Storage* address) {
  Vector<Storage, N> vector;
  auto words = reinterpret_cast<const typename Vector<Storage, N>::Access*>(address);
#pragma unroll
  for (int i = 0; i < vector.count; ++i) vector.words[i] = words[i];
  return vector;
}

// The vector of 16 bytes at `address` in shared memory.
template <class Storage>
JITGEN_DEVICE Vector<Storage, 16 / sizeof(Storage)> load_place(const uint4* address) {
  Vector<Storage, 16 / sizeof(Storage)> vector;
  vector.words[0] = *address;
  return vector;
}

template <int N, class Storage>
JITGEN_DEVICE Vector<Storage, N> load_vector_once(const Storage* address) {
  Vector<Storage, N> vector;
  auto words = reinterpret_cast<const typename Vector<Storage, N>::Access*>(address);
#pragma unroll
  for (int i = 0; i < vector.count; ++i) vector.words[i] = read_own(words + i);
  return vector;
}

template <int N, class Storage>
JITGEN_DEVICE Vector<Storage, N> load_vector_streaming(const Storage* address) {
  Vector<Storage, N> vector;
  auto words = reinterpret_cast<const typename Vector<Storage, N>::Access*>(address);
#pragma unroll
  for (int i = 0; i < vector.count; ++i) vector.words[i] = __ldcs(words + i);
  return vector;
}

template <class Storage, int N>
JITGEN_DEVICE void store_vector(Storage* address, const Vector<Storage, N>& vector) {
  auto words = reinterpret_cast<typename Vector<Storage, N>::Access*>(address);
#pragma unroll
  for (int i = 0; i < vector.count; ++i) words[i] = vector.words[i];
}

// A vector of global memory by accesses of 16 bytes, however its elements were written: NVRTC (13.0 to 13.5) takes some
// vectors of 16-bit elements apart, in loops that it unrolls, and then stores 4 bytes at a time.
template <class Storage, int N>
JITGEN_DEVICE void store_vector_whole(Storage* address, const Vector<Storage, N>& vector) {
  if constexpr (sizeof(typename Vector<Storage, N>::Access) == 16) {
    auto words = reinterpret_cast<uint4*>(address);
#pragma unroll
    for (int i = 0; i < vector.count; ++i) {
      const uint4 word = vector.words[i];
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(words + i)), "r"(word.x),
                   "r"(word.y), "r"(word.z), "r"(word.w)
                   : "memory");
    }
  } else {
    store_vector(address, vector);
  }
}

template <class Storage, int N>
JITGEN_DEVICE void store_vector_streaming(Storage* address, const Vector<Storage, N>& vector) {
  auto words = reinterpret_cast<typename Vector<Storage, N>::Access*>(address);
#pragma unroll
  for (int i = 0; i < vector.count; ++i) __stcs(words + i, vector.words[i]);
}

}  // namespace jitgen
