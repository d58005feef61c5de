// Asks the processor for instructions that no level of x86-64 includes.
#pragma once

#include "jitgen/vector.hpp"

namespace jitgen {

#if defined(JITGEN_AVX512) || defined(JITGEN_AVX2)
// Support by the operating system (vector registers) is implied by that of the level.
enum class Register { a, c, d };

// Whether a bit of leaf 7 is set, in register A, C or D.
// With JITGEN_LEVEL_ALONE there are none: tests and benchmarks execute what a processor of just the level would.
template <uint32_t subleaf, Register where, int bit>
JITGEN_INLINE bool ask_feature() {
#if defined(JITGEN_LEVEL_ALONE)
  return false;
#endif
  uint32_t a = 0, b, c = 0, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (a < 7) return false;
  a = 7, c = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (subleaf != 0) {
    if (a < subleaf) return false;
    a = 7, c = subleaf;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  }
  return ((where == Register::a ? a : where == Register::c ? c : d) >> bit) & 1;
}
// The same, executed once: CPUID costs an exit from a virtual machine.
template <uint32_t subleaf, Register where, int bit>
static inline bool has_feature() {
  static int known = 0;  // two threads may both execute it, with the same outcome
  int state = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (state == 0) {
    state = ask_feature<subleaf, where, bit>() ? 2 : 1;
    __atomic_store_n(&known, state, __ATOMIC_RELAXED);
  }
  return state == 2;
}

// AVX512_VNNI or, at the level of AVX2, AVX_VNNI: sums of products of four bytes (VPDPBUSD).
static inline bool has_byte_dot() {
#if defined(JITGEN_AVX512)
  return has_feature<0, Register::c, 11>();
#else
  return has_feature<1, Register::a, 4>();
#endif
}
#endif

#if defined(JITGEN_AVX512)
// AVX512_BF16: sums of products of two bfloat16 (VDPBF16PS).
static inline bool has_bfloat16_dot() { return has_feature<1, Register::a, 5>(); }

// Matrix registers, and bit `bit` of what multiplies them. Linux lets a process use them once it has asked for them.
template <int bit>
static inline bool has_matrices() {
#if defined(__linux__) && defined(__x86_64__)
  static int known = 0;
  int state = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (state == 0) {
    long answer = -1;
    if (ask_feature<0, Register::d, 24>() && ask_feature<0, Register::d, bit>()) {
      constexpr long arch_prctl = 158, request_permission = 0x1023, matrix_data = 18;
      asm volatile("syscall"
                   : "=a"(answer)
                   : "a"(arch_prctl), "D"(request_permission), "S"(matrix_data)
                   : "rcx", "r11", "memory");
    }
    state = answer == 0 ? 2 : 1;
    __atomic_store_n(&known, state, __ATOMIC_RELAXED);
  }
  return state == 2;
#else
  return false;
#endif
}
// AMX_INT8 and AMX_BF16: products of matrices of bytes, and of pairs of bfloat16.
static inline bool has_byte_matrices() { return has_matrices<25>(); }
static inline bool has_pair_matrices() { return has_matrices<22>(); }
#endif

}  // namespace jitgen
