// Multiplies bytes, or pairs of bfloat16, by the matrix registers of a processor (AMX): 32 rows of x with two blocks of
// 16 rows of weights.
//
// Weights are packed as for VPDPBUSD or VDPBF16PS, four or two neighbours in k of 16 rows together, which is how a
// matrix register has its right operand. Rows of x are the left one: they lie one after another, in place of being
// interleaved. Of bytes one operand is unsigned and the other one signed, and sums are exact.
#pragma once

#include "jitgen/gemm_code_tile.hpp"
#include "jitgen/parallel.hpp"

namespace jitgen {
namespace gemm {

#if defined(JITGEN_AVX512)

// The arithmetic `Compute`, of `Quads`, `CodeBytes` or `Pairs`, by matrix registers.
template <class Compute>
struct Matrices : Compute {
  static constexpr int tile_rows = 32;
  static constexpr int fewest_rows = 1;
  static constexpr bool rows_are_whole = true;
};

#endif

namespace detail {

// Whether packed rows of x lie one after another.
template <class Compute>
constexpr decltype(+Compute::rows_are_whole) whole_rows(int) {
  return Compute::rows_are_whole;
}
template <class Compute>
constexpr bool whole_rows(long) {
  return false;
}

constexpr int64_t matrix_rows = 16;  // rows of a matrix register, of 64 bytes each
constexpr int64_t matrix_step = 16;  // elements of four bytes along k in one of them

// What a product's elements of four bytes are: bytes, of which those of x are unsigned or signed, or pairs of bfloat16.
enum class Dot { unsigned_x, signed_x, pairs };
template <class Compute>
constexpr Dot dot_of() {
  if constexpr (same<typename Compute::Accumulator, float>) return Dot::pairs;
  else return Compute::x_is_signed ? Dot::signed_x : Dot::unsigned_x;
}

// Processors without AVX-512 have declarations alone, and call nothing of this.
template <class Compute>
class MatrixRegisters;
template <Dot dot>
void matrix_sums(int64_t rows, bool pair, const char* w, int64_t block_bytes, const char* x, int64_t x_bytes,
                 int64_t steps, void* to, int64_t to_bytes, bool adds);
template <class Scale>
void pair_matrices(int64_t rows, bool pair, const char* w, int64_t block_bytes, const char* x, int64_t x_bytes,
                   int64_t elements, int64_t per_scale, const Scale* scales, int64_t scales_stride, float* c,
                   int64_t row_stride, bool first);
template <class Compute>
void codes_to_bytes(const uint8_t* codes, int64_t units, typename Compute::Element* to);
template <int64_t span, bool zeroed, class Scale>
void code_matrices(int64_t rows, bool pair, const char* w, int64_t block_bytes, const char* x, int64_t x_bytes,
                   int64_t elements, int64_t per_scale, const Scale* scales, const uint8_t* zeros,
                   int64_t scales_stride, const int32_t* totals, int64_t totals_stride, float* c, int64_t row_stride,
                   bool first);

#if defined(JITGEN_AVX512)

// Gives the matrix registers of this thread their shapes: 0 to 3 have sums, 4 and 5 rows of x (up to 32), 6 and 7
// weights. The destructor releases them.
template <class Compute>
class MatrixRegisters {
 public:
  inline explicit MatrixRegisters(Range of) { configure(of); }
  inline void configure(Range of) const {
    const int64_t rows = of.end - of.begin;
    struct alignas(64) Shapes {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    const uint8_t first = uint8_t(rows < matrix_rows ? rows : matrix_rows);
    const uint8_t second = uint8_t(rows - first);
    const uint8_t heights[] = {first, first, second, second, first, second, matrix_rows, matrix_rows};
    for (int i = 0; i < 8; ++i) {
      shapes.bytes[i] = heights[i] != 0 ? 64 : 0;
      shapes.rows[i] = heights[i];
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  inline ~MatrixRegisters() { asm volatile("tilerelease"); }
};

// Adds the product of x in registers 4 or 5 and weights in 6 or 7 to sums.
template <Dot dot, int sums>
JITGEN_INLINE void matrix_dot() {
  if constexpr (dot == Dot::pairs) {
    if constexpr (sums == 0) asm volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0" : :);
    if constexpr (sums == 1) asm volatile("tdpbf16ps %%tmm7, %%tmm4, %%tmm1" : :);
    if constexpr (sums == 2) asm volatile("tdpbf16ps %%tmm6, %%tmm5, %%tmm2" : :);
    if constexpr (sums == 3) asm volatile("tdpbf16ps %%tmm7, %%tmm5, %%tmm3" : :);
  } else if constexpr (dot == Dot::signed_x) {
    if constexpr (sums == 0) asm volatile("tdpbsud %%tmm6, %%tmm4, %%tmm0" : :);
    if constexpr (sums == 1) asm volatile("tdpbsud %%tmm7, %%tmm4, %%tmm1" : :);
    if constexpr (sums == 2) asm volatile("tdpbsud %%tmm6, %%tmm5, %%tmm2" : :);
    if constexpr (sums == 3) asm volatile("tdpbsud %%tmm7, %%tmm5, %%tmm3" : :);
  } else {
    if constexpr (sums == 0) asm volatile("tdpbusd %%tmm6, %%tmm4, %%tmm0" : :);
    if constexpr (sums == 1) asm volatile("tdpbusd %%tmm7, %%tmm4, %%tmm1" : :);
    if constexpr (sums == 2) asm volatile("tdpbusd %%tmm6, %%tmm5, %%tmm2" : :);
    if constexpr (sums == 3) asm volatile("tdpbusd %%tmm7, %%tmm5, %%tmm3" : :);
  }
}

// Sums `steps` steps along k of rows of x, `x_bytes` apart, with one block of weights or two, and writes the sums to
// `to`, or adds them to what is there. Rows of sums are `to_bytes` apart, and there are more than 16 if `tall`.
template <Dot dot, bool tall, bool pair>
void matrix_tile(const char* w, int64_t block_bytes, const char* x, int64_t x_bytes, int64_t steps, void* to,
                 int64_t to_bytes, bool adds) {
  char* const sums = static_cast<char*>(to);
  char* const lower = sums + matrix_rows * to_bytes;
  if (adds) {
    asm volatile("tileloadd (%0,%1,1), %%tmm0" : : "r"(sums), "r"(to_bytes) : "memory");
    if constexpr (pair) asm volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(sums + 64), "r"(to_bytes) : "memory");
    if constexpr (tall) asm volatile("tileloadd (%0,%1,1), %%tmm2" : : "r"(lower), "r"(to_bytes) : "memory");
    if constexpr (tall && pair) {
      asm volatile("tileloadd (%0,%1,1), %%tmm3" : : "r"(lower + 64), "r"(to_bytes) : "memory");
    }
  } else {
    asm volatile("tilezero %%tmm0" : :);
    if constexpr (pair) asm volatile("tilezero %%tmm1" : :);
    if constexpr (tall) asm volatile("tilezero %%tmm2" : :);
    if constexpr (tall && pair) asm volatile("tilezero %%tmm3" : :);
  }
  const int64_t w_bytes = 64;
  for (int64_t step = 0; step < steps; ++step, w += matrix_step * w_bytes, x += 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(x), "r"(x_bytes) : "memory");
    asm volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(w), "r"(w_bytes) : "memory");
    matrix_dot<dot, 0>();
    if constexpr (tall) {
      asm volatile("tileloadd (%0,%1,1), %%tmm5" : : "r"(x + matrix_rows * x_bytes), "r"(x_bytes) : "memory");
      matrix_dot<dot, 2>();
    }
    if constexpr (pair) {
      asm volatile("tileloadd (%0,%1,1), %%tmm7" : : "r"(w + block_bytes), "r"(w_bytes) : "memory");
      matrix_dot<dot, 1>();
      if constexpr (tall) matrix_dot<dot, 3>();
    }
  }
  asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(sums), "r"(to_bytes) : "memory");
  if constexpr (pair) asm volatile("tilestored %%tmm1, (%0,%1,1)" : : "r"(sums + 64), "r"(to_bytes) : "memory");
  if constexpr (tall) asm volatile("tilestored %%tmm2, (%0,%1,1)" : : "r"(lower), "r"(to_bytes) : "memory");
  if constexpr (tall && pair) {
    asm volatile("tilestored %%tmm3, (%0,%1,1)" : : "r"(lower + 64), "r"(to_bytes) : "memory");
  }
}

// The same for any number of rows, up to 32, and one or two blocks.
template <Dot dot>
void matrix_sums(int64_t rows, bool pair, const char* w, int64_t block_bytes, const char* x, int64_t x_bytes,
                 int64_t steps, void* to, int64_t to_bytes, bool adds) {
  const auto tile = rows > matrix_rows ? pair ? matrix_tile<dot, true, true> : matrix_tile<dot, true, false>
                    : pair             ? matrix_tile<dot, false, true>
                                       : matrix_tile<dot, false, false>;
  tile(w, block_bytes, x, x_bytes, steps, to, to_bytes, adds);
}

// Writes the codes of a unit from element `step` on as bytes.
template <class Compute, int step = 0>
JITGEN_INLINE void store_codes(const char* unit, typename Compute::Element* to) {
  store_vector(to + step * block_rows, Compute::template codes<step>(unit, 0));
  if constexpr (step + 1 < Compute::steps) store_codes<Compute, step + 1>(unit, to);
}

// Writes the codes of `units` units as bytes: an element of the 16 rows for each step.
template <class Compute>
void codes_to_bytes(const uint8_t* codes, int64_t units, typename Compute::Element* to) {
  const char* unit = reinterpret_cast<const char*>(codes);
  for (int64_t i = 0; i < units; ++i, unit += Compute::unit_bytes, to += Compute::steps * block_rows) {
    store_codes<Compute>(unit, to);
  }
}

// The products of one block of codes or two and `rows` rows of x, as `code_tile` has them: exact sums of a span, times
// the scales, are added up in order. Scales and zero-points are for `per_scale` elements, or for all (0), and those of
// the second block are `scales_stride` on.
template <int64_t span, bool zeroed, class Scale>
void code_matrices(int64_t rows, bool pair, const char* w, int64_t block_bytes, const char* x, int64_t x_bytes,
                   int64_t elements, int64_t per_scale, const Scale* scales, const uint8_t* zeros,
                   int64_t scales_stride, const int32_t* totals, int64_t totals_stride, float* c, int64_t row_stride,
                   bool first) {
  const int halves = pair ? 2 : 1;
  alignas(64) int32_t sums[2 * matrix_rows][2 * block_rows];
  for (int64_t done = 0; done < elements; done += span, totals += totals_stride) {
    const int64_t here = elements - done < span ? elements - done : span;
    matrix_sums<Dot::signed_x>(rows, pair, w + done * 64, block_bytes, x + done * 4, x_bytes, here / matrix_step, sums[0],
                      sizeof(sums[0]), false);
    Floats scale[2];
    Ints zero[2];
    for (int half = 0; half < halves; ++half) {
      widen(scales + half * scales_stride, scale[half]);
      if constexpr (zeroed) zero[half] = (Ints)widen_bytes(zeros + half * scales_stride);
    }
    for (int64_t m = 0; m < rows; ++m) {
      const Ints total_of_x = splat(totals[m]);
      for (int half = 0; half < halves; ++half) {
        float* const to = c + m * row_stride + half * block_rows;
        Floats total = first && done == 0 ? Floats{} : load_vector<Floats>(to);
        const Ints sum = load_vector<Ints>(&sums[m][half * block_rows]);
        const Ints offset = zeroed ? zero[half] * total_of_x : total_of_x;
        accumulate(total, scale[half], __builtin_convertvector(sum - offset, Floats));
        store_vector(to, total);
      }
    }
    if (per_scale != 0 && (done + span) % per_scale == 0) scales += block_rows, zeros += block_rows;
  }
}

// The products of one block of weights or two and `rows` rows of x, in pairs: sums of a group, times its scales, are
// added up in order. Scales are for `per_scale` elements, and those of the second block are `scales_stride` on.
template <class Scale>
void pair_matrices(int64_t rows, bool pair, const char* w, int64_t block_bytes, const char* x, int64_t x_bytes,
                   int64_t elements, int64_t per_scale, const Scale* scales, int64_t scales_stride, float* c,
                   int64_t row_stride, bool first) {
  const int halves = pair ? 2 : 1;
  alignas(64) float sums[2 * matrix_rows][2 * block_rows];
  for (int64_t done = 0; done < elements; done += per_scale, scales += block_rows) {
    matrix_sums<Dot::pairs>(rows, pair, w + done * 64, block_bytes, x + done * 4, x_bytes, per_scale / matrix_step,
                            sums[0], sizeof(sums[0]), false);
    Floats scale[2];
    for (int half = 0; half < halves; ++half) widen(scales + half * scales_stride, scale[half]);
    for (int64_t m = 0; m < rows; ++m) {
      for (int half = 0; half < halves; ++half) {
        float* const to = c + m * row_stride + half * block_rows;
        Floats total = first && done == 0 ? Floats{} : load_vector<Floats>(to);
        accumulate(total, scale[half], load_vector<Floats>(&sums[m][half * block_rows]));
        store_vector(to, total);
      }
    }
  }
}

#endif

}  // namespace detail

}  // namespace gemm
}  // namespace jitgen
