// jitgen 0.1.0: template attention_backward/attention_backward.cu.j2
// target sm_90a: wgmma, 128 rows a block, 2 warpgroups, 4 stages of 64 streamed rows
// stages: contract over d0; contract over d1; map; 2 x contract over n; map
// (N0, N1, N2, N3): left bfloat16 contiguous, right bfloat16 contiguous, left bfloat16 contiguous, right bfloat16 contiguous, score int64 row, score int64 key, score float32 key, score float32 key,
//     value bfloat16 contiguous, value bfloat16 contiguous, store bfloat16 contiguous, store bfloat16 contiguous
#include <jitgen/entry.cuh>
#include <jitgen/storage.cuh>
#include <jitgen/math.cuh>
#include <jitgen/vector.cuh>
#include <jitgen/attention_backward.cuh>

using Index = int32_t;

struct Params {
  jitgen::TensorMap left_map;
  jitgen::TensorMap left_2_map;
  jitgen::TensorMap right_map;
  jitgen::TensorMap right_2_map;
  jitgen::Operand<const jitgen::bfloat16, Index, 3> left;
  jitgen::Operand<const jitgen::bfloat16, Index, 3> right;
  jitgen::Operand<const jitgen::bfloat16, Index, 3> left_2;
  jitgen::Operand<const jitgen::bfloat16, Index, 3> right_2;
  jitgen::Ramp<Index, 3> row_index;
  jitgen::Ramp<Index, 3> key_index;
  jitgen::Operand<const float, Index, 3> key_input;
  jitgen::Operand<const float, Index, 3> key_input_2;
  jitgen::Operand<const jitgen::bfloat16, Index, 3> value;
  jitgen::Operand<const jitgen::bfloat16, Index, 3> value_2;
  jitgen::Operand<jitgen::bfloat16, Index, 3> result;
  jitgen::Operand<jitgen::bfloat16, Index, 3> result_2;
  Index rows;
  Index keys;
  Index depth0;
  Index depth1;
  Index width0;
  Index width1;
  Index batch_size0;
};
static_assert(
    sizeof(Params) == 832 && JITGEN_OFFSET(left_map) == 0 && JITGEN_OFFSET(left_2_map) == 128 &&
    JITGEN_OFFSET(right_map) == 256 && JITGEN_OFFSET(right_2_map) == 384 && JITGEN_OFFSET(left) == 512 &&
    JITGEN_OFFSET(right) == 536 && JITGEN_OFFSET(left_2) == 560 && JITGEN_OFFSET(right_2) == 584 &&
    JITGEN_OFFSET(row_index) == 608 && JITGEN_OFFSET(key_index) == 624 && JITGEN_OFFSET(key_input) == 640 &&
    JITGEN_OFFSET(key_input_2) == 664 && JITGEN_OFFSET(value) == 688 && JITGEN_OFFSET(value_2) == 712 &&
    JITGEN_OFFSET(result) == 736 && JITGEN_OFFSET(result_2) == 760 && JITGEN_OFFSET(rows) == 784 &&
    JITGEN_OFFSET(keys) == 788 && JITGEN_OFFSET(depth0) == 792 && JITGEN_OFFSET(depth1) == 796 &&
    JITGEN_OFFSET(width0) == 800 && JITGEN_OFFSET(width1) == 804 && JITGEN_OFFSET(batch_size0) == 808, "the launch packs it so");

struct Config {
  using Element = jitgen::bfloat16;
  static constexpr int warpgroups = 2;
  static constexpr int tile = 64;
  static constexpr int stages = 4;
  static constexpr int products = 2;
  static constexpr int depth0 = 64;
  static constexpr int depth1 = 64;
  static constexpr int columns0 = 64;
  static constexpr int columns1 = 64;
  static constexpr int slot0 = 0;
  static constexpr int slot1 = 1;
  static constexpr int tile_words = 2;
  static constexpr int block_words = 0;
  static constexpr int block_copied = 3;
  static constexpr int tile_copied = 15;
  static constexpr bool early = true;
  static constexpr bool masked = true;
  static constexpr bool first_are_long = true;
  static constexpr bool overlap = true;
};
using Shape = jitgen::BackwardShape<Config>;
static_assert(Shape::bytes == 123088, "shared memory as the launch has it");
static_assert(Shape::threads == 384, "threads as the launch has them");

struct Operands {
  const Params& constants;  // where the tensor maps are
  const Params params = constants;  // in registers
  Index rows = params.rows, keys = params.keys;

  // One batch index and one of what is summed over: the offsets at which operands begin, and the values of those that have
  // one alone.
  struct Task {
    Index z0;
    Index left_at;
    Index right_at;
    Index left_2_at;
    Index right_2_at;
    Index row_index_at;
    Index key_index_at;
    Index key_input_at;
    Index key_input_2_at;
    Index value_at;
    Index value_2_at;
    Index result_at;
    Index result_2_at;
  };
  // The ends of what rows of a block have.
  struct BlockEnds {
    jitgen::Ends row_index_value;
  };

  JITGEN_DEVICE int tasks() const { return int(params.batch_size0); }
  JITGEN_DEVICE int heads() const { return int(1); }
  JITGEN_DEVICE Task task(int number, int head) const {
    Task task;
    const Index z0 = number;
    task.z0 = z0;
    task.left_at = z0 * params.left.strides[0];
    task.right_at = z0 * params.right.strides[0];
    task.left_2_at = z0 * params.left_2.strides[0];
    task.right_2_at = z0 * params.right_2.strides[0];
    task.row_index_at = params.row_index.first + z0 * params.row_index.strides[0];
    task.key_index_at = params.key_index.first + z0 * params.key_index.strides[0];
    task.key_input_at = z0 * params.key_input.strides[0];
    task.key_input_2_at = z0 * params.key_input_2.strides[0];
    task.value_at = z0 * params.value.strides[0];
    task.value_2_at = z0 * params.value_2.strides[0];
    task.result_at = z0 * params.result.strides[0];
    task.result_2_at = z0 * params.result_2.strides[0];
    return task;
  }

  JITGEN_DEVICE BlockEnds block_ends(const Task& task, int first, int end) const {
    BlockEnds ends_of_rows;
    {
      jitgen::Ends ends = {int64_t(1) << 62, -(int64_t(1) << 62)};
      for (int side = 0; side < 2; ++side) {
        const Index a = side ? end - 1 : first;
        const int64_t value = int64_t(task.row_index_at + a * params.row_index.strides[1]);
        ends = {jitgen::lesser(ends.low, value), jitgen::greater(ends.high, value)};
      }
      ends_of_rows.row_index_value = ends;
    }
    return ends_of_rows;
  }
  // Bit 0: some pair of rows counts; bit 1: no mask hides any.
  JITGEN_DEVICE uint32_t visibility(const Task& task, const BlockEnds& block, int first, int end) const {
    const int64_t low_of4 = block.row_index_value.low, high_of4 = block.row_index_value.high;
    int64_t low_of5, high_of5;
    {
      jitgen::Ends ends = {int64_t(1) << 62, -(int64_t(1) << 62)};
      for (int side = 0; side < 2; ++side) {
        const Index b = side ? end - 1 : first;
        const int64_t value = int64_t(task.key_index_at + b * params.key_index.strides[2]);
        ends = {jitgen::lesser(ends.low, value), jitgen::greater(ends.high, value)};
      }
      low_of5 = ends.low, high_of5 = ends.high;
    }
    const int64_t low2 = low_of4;
    const int64_t high2 = high_of4;
    const int64_t low3 = low_of5;
    const int64_t high3 = high_of5;
    const bool somewhere4 = high2 > low3;
    const bool everywhere4 = low2 > high3;
    const bool hidden = everywhere4;
    const bool open = somewhere4 == false;
    return hidden ? 0u : open ? 3u : 1u;
  }

  // What a row of a tile has for all of its pairs, as words of 4 bytes.
  template <int count>
  JITGEN_DEVICE void tile_words(uint32_t (&row_words)[count], const Task& task, Index b) const {
    const float s3 = float(jitgen::load(params.key_input.pointer[task.key_input_at + b * params.key_input.strides[2]]));
    const float s11 = float(jitgen::load(params.key_input_2.pointer[task.key_input_2_at + b * params.key_input_2.strides[2]]));
    const float s5 = 1.4426950216293335f;
    const float s8 = s3 * s5;
    const float s12 = jitgen::reciprocal(s11);
    row_words[0] = uint32_t(__float_as_int(s8));
    row_words[1] = uint32_t(__float_as_int(s12));
  }
  // What a row of a block has for all of its pairs, as words of 4 bytes.
  template <int count>
  JITGEN_DEVICE void block_words(uint32_t (&row_words)[count], const Task& task, Index a) const {
  }
  // The rule of a pair of rows, in two phases. Not `masked`: no mask hides the pair, and both rows exist.
  template <bool masked, class Block, class Tile>
  JITGEN_DEVICE float first(
      float acc0, float& other, const Task& task, const Block& of_block, const Tile& of_tile, Index a, Index b) const {
    if constexpr (!masked) {
      const float s8 = __int_as_float(int(of_tile[0]));
      const float s12 = __int_as_float(int(of_tile[1]));
      const float s5 = 1.4426950216293335f;
      const float s6 = 0.1803368777036667f;
      const float s7 = acc0 * s6;
      const float s9 = s7 - s8;
      const float s10 = jitgen::exp2_normal(s9);
      const float s13 = s10 * s12;
      other = s13;
      return s13;
    } else {
      const bool exists = b < keys;
      const float s14 = __int_as_float(int(of_tile[0]));
      const float s18 = __int_as_float(int(of_tile[1]));
      const int32_t s1 = int32_t(task.row_index_at + a * params.row_index.strides[1]);
      const int32_t s2 = int32_t(task.key_index_at + b * params.key_index.strides[2]);
      const bool s3 = s1 > s2;
      const float s4 = -__int_as_float(0x7f800000);
      const float s10 = 1.4426950216293335f;
      const float s11 = 0.1803368777036667f;
      const float s12 = acc0 * s11;
      const float s13 = s3 ? s4 : s12;
      const float s15 = s13 - s14;
      const float s16 = jitgen::exp2_normal(s15);
      const float s19 = s16 * s18;
      other = exists ? s19 : 0.0f;
      return s19;
    }
  }
  template <bool masked, class Block, class Tile>
  JITGEN_DEVICE float second(
      float s19, float acc1, float& other, const Task& task, const Block& of_block, const Tile& of_tile,
      Index a, Index b) const {
    if constexpr (!masked) {
      const float s13 = s19;
      const float s15 = s13 * acc1;
      return s15;
    } else {
      const bool exists = b < keys;
      const float s21 = s19 * acc1;
      return exists ? s21 : 0.0f;
    }
  }

  template <int number>
  JITGEN_DEVICE void copy_block(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    if constexpr (number == 0) {
      const int batch[] = {0, 0, params.left.strides[0] != 0 ? int(task.z0) : 0};
      jitgen::copy_box_of_batch(to, constants.left_map, column, row, batch, barrier);
    }
    if constexpr (number == 1) {
      const int batch[] = {0, 0, params.left_2.strides[0] != 0 ? int(task.z0) : 0};
      jitgen::copy_box_of_batch(to, constants.left_2_map, column, row, batch, barrier);
    }
  }
  template <int number>
  JITGEN_DEVICE Config::Element block_element(const Task& task, Index row, Index column) const {
    return Config::Element{};
  }
  template <int number>
  JITGEN_DEVICE void copy_tile(uint32_t to, const Task& task, int column, int row, uint32_t barrier) const {
    if constexpr (number == 0) {
      const int batch[] = {0, 0, params.right.strides[0] != 0 ? int(task.z0) : 0};
      jitgen::copy_box_of_batch(to, constants.right_map, column, row, batch, barrier);
    }
    if constexpr (number == 1) {
      const int batch[] = {0, 0, params.right_2.strides[0] != 0 ? int(task.z0) : 0};
      jitgen::copy_box_of_batch(to, constants.right_2_map, column, row, batch, barrier);
    }
  }
  template <int number>
  JITGEN_DEVICE Config::Element tile_element(const Task& task, Index row, Index column) const {
    return Config::Element{};
  }
  // Columns of the operands of a tile, of which the first two are those of a block; and of results.
  template <int number>
  JITGEN_DEVICE int columns() const {
    return int(number == 0 ? params.depth0 : number == 1 ? params.depth1 : number == 2 ? 0 : 0);
  }
  template <int number>
  JITGEN_DEVICE int result_columns() const {
    return int(number == 0 ? params.width0 : params.width1);
  }

  // `live` neighbours from column e of a row, at most 8.
  template <int number>
  JITGEN_DEVICE void results(const Task& task, Index a, Index e, const float (&sums)[8], int live) const {
    if constexpr (number == 0) {
      const float s1 = 0.125f;
      jitgen::Vector<jitgen::bfloat16, 8> y10;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float acc2 = sums[j] * s1;
        y10[j] = jitgen::store<jitgen::bfloat16>(acc2);
      }
      jitgen::store_vector_whole(params.result.pointer + task.result_at + a * params.result.strides[1] + e * 1, y10);
    }
    if constexpr (number == 1) {
      jitgen::Vector<jitgen::bfloat16, 8> y11;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float acc3 = sums[j];
        y11[j] = jitgen::store<jitgen::bfloat16>(acc3);
      }
      jitgen::store_vector_whole(params.result_2.pointer + task.result_2_at + a * params.result_2.strides[1] + e * 1, y11);
    }
  }
};

extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
jitgen_attention_backward_87b86cd1(const __grid_constant__ Params params) {
  const Operands operands = {params};
  jitgen::attention_backward<Config>(operands);
}
