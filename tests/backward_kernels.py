"""Kernels around ``attention_backward.cuh``, one per configuration, for compile and device tests: attention with
a scale and a mask of indices, of contiguous tensors, with its log-sum-exp and delta = sum(dO * O) as inputs."""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.codegen.environment import family_folder, headers, packages
from jitgen.spec import KernelSource, Target

MASKS = {
    "full": ("false", "true", "false"),
    "causal": ("key_first > row_last", "key_last <= row_first", "key > row"),
    "window": (
        "key_first > row_last || key_last < row_first - 200",
        "key_last <= row_first && key_first >= row_last - 200",
        "key > row || key < row - 200",
    ),
}
"""Whether a tile is hidden, whether all of it is seen, and whether a score is hidden."""

_TEXT = """
#include <jitgen/attention_backward.cuh>
using Index = int;
struct Config {{
  using Element = jitgen::{element};
{fields}
}};
using Shape = jitgen::BackwardShape<Config>;
static_assert(Shape::bytes == {bytes}, "shared memory as the launch has it");
struct Operands {{
  const jitgen::TensorMap &block0, &block1, &tile0, &tile1;
  const float *lse, *delta;
  jitgen::{element} *out0, *out1;
  int batch, of_keys, shared, rows, keys, depth, width;
  float scale;
  struct Task {{
    int batch, row_head, key_head;
    const float *lse, *delta;
  }};
  JITGEN_DEVICE int tasks() const {{ return {tasks}; }}
  JITGEN_DEVICE int heads() const {{ return {heads}; }}
  JITGEN_DEVICE Task task(int number, int head) const {{
    const int row_heads = of_keys * shared;
    Task found;
    if (Config::by_keys) {{
      found.batch = number / of_keys, found.key_head = number % of_keys;
      found.row_head = found.key_head * shared + head;
    }} else {{
      found.batch = number / row_heads, found.row_head = number % row_heads, found.key_head = found.row_head / shared;
    }}
    const int64_t at = (int64_t(found.batch) * row_heads + found.row_head) * (Config::by_keys ? keys : rows);
    found.lse = lse + at, found.delta = delta + at;
    return found;
  }}
  struct BlockEnds {{
    int first, last;
  }};
  JITGEN_DEVICE BlockEnds block_ends(const Task&, int first, int end) const {{ return {{first, end - 1}}; }}
  JITGEN_DEVICE uint32_t visibility(const Task&, const BlockEnds& block, int tile_first, int tile_end) const {{
    const int row_first = Config::by_keys ? tile_first : block.first;
    const int row_last = Config::by_keys ? tile_end - 1 : block.last;
    const int key_first = Config::by_keys ? block.first : tile_first;
    const int key_last = Config::by_keys ? block.last : tile_end - 1;
    return ({hidden}) ? 0u : ({open}) ? 3u : 1u;
  }}
  template <int slot>
  JITGEN_DEVICE int columns() const {{ return slot == 0 ? depth : width; }}
  template <int number>
  JITGEN_DEVICE int result_columns() const {{ return number == 0 ? depth : width; }}
  JITGEN_DEVICE void row_words(uint32_t (&found)[2], const Task& task, int row) const {{
    found[0] = uint32_t(__float_as_int(task.lse[row] * jitgen::log2_e));
    found[1] = uint32_t(__float_as_int(task.delta[row]));
  }}
  template <int count>
  JITGEN_DEVICE void tile_words(uint32_t (&found)[count], const Task& task, int item) const {{
    if constexpr (Config::by_keys) row_words(found, task, item);
  }}
  template <int count>
  JITGEN_DEVICE void block_words(uint32_t (&found)[count], const Task& task, int item) const {{
    if constexpr (!Config::by_keys) row_words(found, task, item);
  }}
  static JITGEN_DEVICE float word(uint32_t bits) {{ return __int_as_float(int(bits)); }}
  template <bool masked, class Block, class Tile>
  JITGEN_DEVICE float first(
      float product, float& weight, const Task&, const Block& of_block, const Tile& of_tile, int a, int b) const {{
    const int row = Config::by_keys ? b : a, key = Config::by_keys ? a : b;
    const float base = Config::by_keys ? word(of_tile[0]) : word(of_block[0]);
    weight = jitgen::exp2_normal(__fmaf_rn(product, scale * jitgen::log2_e, -base));
    if (masked) weight = b >= keys || ({hides}) ? 0.0f : weight;
    return weight;
  }}
  template <bool masked, class Block, class Tile>
  JITGEN_DEVICE float second(
      float weight, float dp, float&, const Task&, const Block& of_block, const Tile& of_tile, int, int) const {{
    return weight * (dp - (Config::by_keys ? word(of_tile[1]) : word(of_block[1])));
  }}
  template <int pair>
  JITGEN_DEVICE void copy_block(uint32_t to, const Task& task, int column, int item, uint32_t barrier) const {{
    const int batch[] = {{0, task.batch, Config::by_keys ? task.key_head : task.row_head}};
    jitgen::copy_box_of_batch(to, pair ? block1 : block0, column, item, batch, barrier);
  }}
  template <int pair>
  JITGEN_DEVICE void copy_tile(uint32_t to, const Task& task, int column, int item, uint32_t barrier) const {{
    const int batch[] = {{0, task.batch, Config::by_keys ? task.row_head : task.key_head}};
    jitgen::copy_box_of_batch(to, pair ? tile1 : tile0, column, item, batch, barrier);
  }}
  template <int pair>
  JITGEN_DEVICE void results(const Task& task, int item, int column, const float (&run)[8], int live) const {{
    jitgen::Vector<jitgen::{element}, 8> words;
#pragma unroll
    for (int j = 0; j < 8; ++j) words[j] = jitgen::store<jitgen::{element}>(pair == 0 ? run[j] * scale : run[j]);
    const int64_t matrix = Config::by_keys ? int64_t(task.batch) * of_keys + task.key_head
                                           : int64_t(task.batch) * of_keys * shared + task.row_head;
    const int64_t row = matrix * rows + item;
    jitgen::store_vector((pair == 0 ? out0 : out1) + row * (pair == 0 ? depth : width) + column, words);
  }}
}};
extern "C" __global__ void __launch_bounds__(Shape::threads, 1)
{name}(const __grid_constant__ jitgen::TensorMap block0, const __grid_constant__ jitgen::TensorMap block1,
    const __grid_constant__ jitgen::TensorMap tile0, const __grid_constant__ jitgen::TensorMap tile1, const float* lse,
    const float* delta, jitgen::{element}* out0, jitgen::{element}* out1, int batch, int of_keys, int shared, int rows,
    int keys, int depth, int width, float scale) {{
  const Operands operands = {{block0, block1, tile0, tile1, lse, delta, out0, out1,
                             batch, of_keys, shared, rows, keys, depth, width, scale}};
  jitgen::attention_backward<Config>(operands);
}}
"""


@dataclass(frozen=True)
class Backward:
    """A configuration of ``attention_backward.cuh``; the fields are the header's, and the mask's name."""

    by_keys: bool = True
    warpgroups: int = 2
    tile: int = 64
    depth: int = 128
    width: int = 128
    stages: int = 3
    mask: str = "causal"
    element: str = "bfloat16"
    overlap: bool = False

    @property
    def name(self) -> str:
        return "by_keys" if self.by_keys else "by_rows"

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128

    @property
    def block(self) -> int:
        return self.warpgroups * 64

    @property
    def tile_words(self) -> int:
        return 2 if self.by_keys else 0

    @property
    def shared_bytes(self) -> int:
        chunks = -(-self.depth // 64) + -(-self.width // 64)
        words = -(-self.tile_words * self.tile * 4 // 1024) * 1024
        barriers = (2 + 3 * self.stages) * 8 + 16 - (2 + 3 * self.stages) % 2 * 8
        return (
            chunks * 128 * (self.block + self.stages * self.tile)
            + self.stages * words
            + self.warpgroups * 4 * 16 * 40 * 4
            + barriers
            + 16 * (1 + self.stages)
        )

    def source(self) -> KernelSource:
        numbers = {name: getattr(self, name) for name in ("warpgroups", "tile", "stages", "tile_words")}
        numbers |= {"products": 2, "depth0": self.depth, "depth1": self.width, "columns0": self.depth}
        numbers |= {"columns1": self.width if self.by_keys else 0, "slot0": 0, "slot1": 1}
        numbers |= {"block_words": 0 if self.by_keys else 2, "block_copied": 3, "tile_copied": 3}
        flags = {"by_keys": self.by_keys, "early": True, "first_are_long": self.by_keys}
        flags |= {"masked": self.mask != "full", "overlap": self.overlap}
        fields = "\n".join(
            [
                *(f"  static constexpr int {name} = {number};" for name, number in numbers.items()),
                *(f"  static constexpr bool {name} = {str(flag).lower()};" for name, flag in flags.items()),
            ]
        )
        hidden, is_open, hides = MASKS[self.mask]
        text = _TEXT.format(
            element=self.element,
            fields=fields,
            bytes=self.shared_bytes,
            tasks="batch * of_keys" + ("" if self.by_keys else " * shared"),
            heads="shared" if self.by_keys else "1",
            hidden=hidden,
            open=is_open,
            hides=hides,
            name=self.name,
        )
        included = headers(family_folder("attention_backward"), text)
        return KernelSource(
            self.name,
            "cuda",
            "nvrtc",
            Target("cuda", "sm_90a"),
            text,
            included,
            packages(text, included),
            (("fmad", True),),
        )
