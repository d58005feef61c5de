"""Kernels around the wgmma mainloops' headers, one per configuration, for the compile and the device tests.

A kernel stores its accumulators as they are, or with two contractions the first plus twice the second, which is zero
where they are confused. Every region has an output of its own, and region r's result is multiplied by r + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitgen.codegen.environment import family_folder, headers, packages
from jitgen.spec import KernelSource, Target

ENTRY = "wgmma"

_EPILOGUE = """
struct Epilogue {{
  jitgen::{element}* outputs[{regions}];
  int columns[{regions}];
  template <int W>
  __device__ void run(int region, int m, int n, const float (&acc)[{contractions}][W], int live) const {{
    jitgen::{element}* to = outputs[0];
    int stride = columns[0];
#pragma unroll
    for (int r = 1; r < {regions}; ++r) {{
      if (region == r) to = outputs[r], stride = columns[r];
    }}
#pragma unroll
    for (int j = 0; j < W; ++j) {{
      float sum = acc[0][j];
      if ({contractions} == 2) sum += 2.0f * acc[{contractions} - 1][j];
      if (j < live) to[int64_t(m) * stride + n + j] = jitgen::store<jitgen::{element}>(sum * float(region + 1));
    }}
  }}
  template <int W>
  __device__ void run(int m, int n, const float (&acc)[{contractions}][W], int live) const {{
    run<W>(0, m, n, acc, live);
  }}
  template <int W>
  struct Results {{
    float sums[{contractions}][W];
  }};
  template <int W>
  __device__ Results<W> results(int, int, const float (&acc)[{contractions}][W], int) const {{
    Results<W> all;
#pragma unroll
    for (int i = 0; i < {contractions} * W; ++i) all.sums[i / W][i % W] = acc[i / W][i % W];
    return all;
  }}
  template <int W>
  __device__ void store(int m, int n, const Results<W>& results, int live) const {{
    run<W>(m, n, results.sums, live);
  }}
}};
"""


def _fields(**values: int | bool) -> str:
    def text(value: int | bool) -> str:
        return str(value).lower()

    kind = {bool: "bool", int: "int"}
    return "\n".join(f"  static constexpr {kind[type(v)]} {name} = {text(v)};" for name, v in values.items())


@dataclass(frozen=True)
class Quantized:
    """A configuration of ``gemm_wgmma_quantized.cuh``; the fields are the header's, and the weight's type."""

    tokens: int = 128
    warpgroups: int = 2
    blocks: int = 2
    contractions: int = 1
    regions: int = 1
    stages: int = 6
    span: int = 1
    steps: int = 2
    stagger: int = 0
    most_splits: int = 1
    multicast: int = 1
    trimmed: bool = False
    raster: int = 16
    resident: int = 1
    ranges: int = 1
    element: str = "bfloat16"
    format: str = "int4"
    group: int = 128

    @property
    def bits(self) -> int:
        return 8 if self.format == "int8" else 4

    @property
    def cluster(self) -> int:
        return max(self.most_splits, self.multicast)

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128

    @property
    def columns(self) -> int:
        """Of a tile."""
        return self.warpgroups * self.blocks * 64 // self.contractions

    @property
    def box(self) -> tuple[int, int]:
        """Of a copy of codes: tiles of 16 rows, and words of each."""
        words = 32 * self.bits * self.span
        return self.columns // 16, words if words <= 256 else 32 * self.bits

    @property
    def wgmmas(self) -> int:
        """In the kernel's text: a stage's steps of 16 k's, for each 64 rows of the weight."""
        return 4 * self.span * self.blocks

    @property
    def shared_bytes(self) -> int:
        tiles = self.warpgroups * self.blocks * 4
        part = next(k for k in (64 * self.span, 64, 32) if self.group % k == 0)
        parts = 64 * self.span // part
        scale = 4 if self.format == "int8" else 2
        side = (tiles * parts * 16 * scale if self.group else 0) + (tiles * parts * 16 if self.format == "uint4" else 0)
        whole = 64 if self.tokens % 64 == 0 and self.warpgroups * self.resident <= 2 else 32
        chunk = 16 if self.tokens % 32 else whole // self.contractions
        staging = self.warpgroups * self.contractions * chunk * 68 * 4
        return self.stages * ((self.tokens + tiles * self.bits) * 128 * self.span + side + 16) + staging

    def source(self) -> KernelSource:
        names = ("tokens", "warpgroups", "blocks", "contractions", "regions", "stages", "span", "steps", "most_splits")
        fields = _fields(
            **{name: getattr(self, name) for name in (*names, "multicast", "trimmed", "stagger", "raster", "resident")},
            ranges=self.ranges,
        )
        scale = "float" if self.format == "int8" else "jitgen::bfloat16"
        zeros = str(self.format == "uint4").lower()
        weight = f"jitgen::QuantWeight<jitgen::{self.element}, {self.bits}, {zeros}, {scale}, {self.group}>"
        places = [(r, c) for r in range(self.regions) for c in range(self.contractions)]
        maps = "".join(f", const __grid_constant__ jitgen::TensorMap codes{r}_{c}" for r, c in places)
        weights = "".join(
            f", const uint4* w{r}_{c}, const {scale}* s{r}_{c}, const uint8_t* z{r}_{c}" for r, c in places
        )

        def region(r: int) -> str:
            made = ", ".join(f"Weight{{w{r}_{c}, s{r}_{c}, z{r}_{c}}}" for c in range(self.contractions))
            mapped = ", ".join(f"&codes{r}_{c}" for c in range(self.contractions))
            return f"{{{{{made}}}, {{{mapped}}}, n{r}}}"

        regions = ", ".join(region(r) for r in range(self.regions))
        call = "jitgen::gemm_wgmma_quantized<Config, Weight>(x, m, k, regions, epilogue);"
        described = f"jitgen::QuantizedRegion<Weight, {self.contractions}> regions[] = {{{regions}}};"
        config = f"struct Config : jitgen::QuantizedDefaults {{\n{fields}\n}};"
        head = f"#include <jitgen/gemm_wgmma_quantized.cuh>\nusing Weight = {weight};\n{config}"
        shape = "jitgen::QuantizedShape<Config, Weight>"
        return _source(self, head, shape, maps, weights, described, call)


@dataclass(frozen=True)
class Dense:
    """A configuration of ``gemm_wgmma_dense_shape.cuh``; the fields are the header's."""

    down: int = 2
    across: int = 1
    columns: int = 256
    contractions: int = 1
    regions: int = 1
    stages: int = 4
    multicast: int = 1
    most_splits: int = 1
    transposed: bool = False
    trimmed: bool = False
    raster: int = 8
    resident: int = 1
    pingpong: bool = False
    ranges: int = 1
    staged: int = 64
    run: int = 8
    element: str = "bfloat16"
    shares_x: bool = False
    swapped: bool = False
    blocks: int = 1
    other_multicast: int = 1
    x_transposed: bool = False

    @property
    def cluster(self) -> int:
        return max(self.most_splits, self.multicast * self.other_multicast)

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128

    @property
    def warpgroups(self) -> int:
        """That compute."""
        return 2 if self.pingpong else self.down * self.across

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.down * self.blocks * 64

    @property
    def shares(self) -> tuple[int, int]:
        """Blocks that share a tile of x, and one of the weight."""
        both = (self.multicast, self.other_multicast)
        return both if self.shares_x else both[::-1]

    @property
    def x_box(self) -> int:
        """Rows of x that one copy brings."""
        rows = self.columns if self.swapped else self.rows
        return -(-rows // (8 * self.shares[0])) * 8

    @property
    def depths(self) -> tuple[int, int]:
        """The k's that one copy brings of x and of a weight that lie across K, so that blocks have as many copies."""
        x, weight = (self.columns, self.rows) if self.swapped else (self.rows, self.columns)
        of_x, of_weight = (64 * math.gcd(n // 64, of) // of for n, of in zip((x, weight), self.shares, strict=True))
        return of_x, of_weight

    @property
    def weight_box(self) -> int:
        """Columns of a weight that is contiguous along K."""
        columns = self.rows if self.swapped else self.columns
        return -(-columns // (8 * self.shares[1])) * 8

    @property
    def wgmmas(self) -> int:
        blocks = self.down if self.pingpong else self.blocks
        return 4 * blocks * self.contractions

    @property
    def shared_bytes(self) -> int:
        stage = (self.rows + self.contractions * self.columns) * 128
        staging = self.warpgroups * (68 if self.swapped else 64) * self.staged * 4
        return self.stages * (stage + 16) + staging

    def source(self) -> KernelSource:
        names = ("down", "across", "columns", "contractions", "regions", "stages", "multicast", "most_splits")
        fields = _fields(
            **{name: getattr(self, name) for name in (*names, "transposed", "trimmed", "raster", "resident", "staged")},
            pingpong=self.pingpong,
            ranges=self.ranges,
            shares_x=self.shares_x,
            swapped=self.swapped,
            blocks=self.blocks,
            other_multicast=self.other_multicast,
            x_transposed=self.x_transposed,
            run=self.run,
        )
        places = [(r, c) for r in range(self.regions) for c in range(self.contractions)]
        maps = "".join(f", const __grid_constant__ jitgen::TensorMap w{r}_{c}" for r, c in places)

        def region(r: int) -> str:
            return f"{{{{{', '.join(f'&w{r}_{c}' for c in range(self.contractions))}}}, n{r}}}"

        regions = ", ".join(region(r) for r in range(self.regions))
        described = f"jitgen::DenseRegion<{self.contractions}> regions[] = {{{regions}}};"
        element = f"  using Element = jitgen::{self.element};"
        config = f"struct Config : jitgen::DenseDefaults {{\n{element}\n{fields}\n}};"
        head = f"#include <jitgen/gemm_wgmma_dense.cuh>\n{config}"
        call = "jitgen::gemm_wgmma_dense<Config>(x, m, k, regions, epilogue);"
        return _source(self, head, "jitgen::DenseShape<Config>", maps, "", described, call)


def _source(
    config: Quantized | Dense, head: str, shape: str, maps: str, weights: str, regions: str, call: str
) -> KernelSource:
    every = range(config.regions)
    outputs = "".join(f", jitgen::{config.element}* y{r}" for r in every) + "".join(f", int n{r}" for r in every)
    epilogue = _EPILOGUE.format(element=config.element, regions=config.regions, contractions=config.contractions)
    made = f"{{{', '.join(f'y{r}' for r in every)}}}, {{{', '.join(f'n{r}' for r in every)}}}"
    text = f"""{head}
using Shape = {shape};
static_assert(Shape::bytes == {config.shared_bytes} && Shape::threads == {config.threads}, "as the test computes it");
{epilogue}
extern "C" __global__ void __launch_bounds__(Shape::threads, Config::resident)
{ENTRY}(const __grid_constant__ jitgen::TensorMap x{maps}{weights}{outputs}, int m, int k) {{
  const {regions}
  const Epilogue epilogue{{{made}}};
  {call}
}}
"""
    options = (("fmad", True),)
    included = headers(family_folder("gemm"), text)
    target, of = Target("cuda", "sm_90a"), packages(text, included)
    return KernelSource(ENTRY, "cuda", "nvrtc", target, text, included, of, options)


QUANTIZED = (
    Quantized(),
    Quantized(steps=1, stages=7),
    Quantized(tokens=64, span=2, stages=5, trimmed=True),
    Quantized(tokens=64, span=2, stages=5, trimmed=True, stagger=1),
    Quantized(tokens=32, stages=6, most_splits=3, stagger=3),
    Quantized(tokens=64, span=2, stages=4, group=64, warpgroups=3, blocks=1, most_splits=5),
    Quantized(tokens=32, span=2, stages=4, format="uint4", group=96, contractions=2),
    Quantized(tokens=64, span=2, stages=4, group=0, element="float16", multicast=2, regions=2),
    Quantized(tokens=16, blocks=1, most_splits=3),
    Quantized(tokens=32, warpgroups=4, blocks=1, raster=1),
    Quantized(tokens=64, most_splits=5, warpgroups=3, blocks=1),
    Quantized(tokens=64, multicast=2, blocks=1, resident=2, stages=5),
    Quantized(tokens=256, blocks=1, stages=5, trimmed=True),
    Quantized(tokens=96, warpgroups=3, blocks=1, span=2, stages=4, most_splits=8, trimmed=True),
    Quantized(tokens=192, blocks=1, stages=5, most_splits=2),
    Quantized(contractions=2, format="uint4", group=32),
    Quantized(tokens=64, contractions=2, most_splits=2, format="uint4", group=0),
    Quantized(tokens=64, regions=3, group=0),
    Quantized(tokens=64, regions=2, contractions=2, multicast=2, group=96),
    Quantized(tokens=64, format="int8", group=0),
    Quantized(tokens=128, format="int8", group=64, steps=1, stages=5),
    Quantized(tokens=64, format="int8", group=32, span=2, blocks=1, stages=5, most_splits=3),
    Quantized(tokens=96, format="int8", group=128, span=2, warpgroups=1, blocks=2, contractions=2, stages=3, regions=2),
    Quantized(tokens=256, format="int8", group=32, blocks=1, stages=4, trimmed=True, most_splits=2),
    Quantized(tokens=160, format="int8", group=64, warpgroups=3, blocks=1, stages=5),
    Quantized(tokens=64, element="float16", group=64),
    Quantized(tokens=64, element="float16", format="uint4", group=0),
    Quantized(tokens=64, element="float16", format="int8", group=0),
    Quantized(tokens=80, blocks=1, span=2, stages=4, trimmed=True),
    Quantized(tokens=80, warpgroups=1, resident=2, stages=4, most_splits=3, trimmed=True),
    Quantized(tokens=80, warpgroups=3, blocks=1, stages=5, regions=2),
    Quantized(tokens=160, warpgroups=1, blocks=1, resident=2, stages=4),
    Quantized(tokens=224, blocks=1, stages=5, raster=2),
    Quantized(tokens=64, warpgroups=1, blocks=1, resident=3, span=2, stages=3, most_splits=8),
    Quantized(tokens=112, stages=7, trimmed=True),
    Quantized(tokens=144, blocks=1, stages=7, most_splits=3),
    Quantized(tokens=176, blocks=1, stages=6, element="float16"),
    Quantized(tokens=208, blocks=1, stages=5, trimmed=True),
    Quantized(tokens=240, blocks=1, stages=4),
    Quantized(tokens=64, span=2, stages=4, ranges=3, trimmed=True),
    Quantized(tokens=160, warpgroups=3, blocks=1, span=2, stages=3, trimmed=True),
    Quantized(tokens=176, warpgroups=3, blocks=1, group=32),
)
DENSE = (
    Dense(),
    Dense(multicast=2, raster=3),
    Dense(multicast=2, most_splits=2),
    Dense(columns=96, stages=7, most_splits=8, trimmed=True, staged=32),
    Dense(columns=128, stages=4, multicast=2, most_splits=2, transposed=True, contractions=2),
    Dense(down=1, across=2, columns=192, stages=6, most_splits=3, staged=32),
    Dense(transposed=True, trimmed=True),
    Dense(down=1, across=1, columns=32, resident=2, stages=8, trimmed=True, staged=32),
    Dense(columns=192, stages=5, staged=32),
    Dense(transposed=True, multicast=2, element="float16"),
    Dense(contractions=2, columns=128),
    Dense(contractions=2, columns=96, staged=32),
    Dense(regions=3, columns=128, stages=6),
    Dense(regions=2, contractions=2, columns=64, multicast=2, transposed=False),
    Dense(down=1, across=2, columns=128, resident=2, stages=3, element="float16"),
    Dense(down=1, across=2, columns=64, multicast=2, stages=8, staged=32),
    Dense(columns=224, stages=4, staged=32),
    Dense(columns=160, stages=5, most_splits=4, trimmed=True, staged=32),
    Dense(columns=80, stages=5, contractions=2, staged=32, run=4),
    Dense(down=1, across=1, columns=160, resident=2, stages=3, staged=32),
    Dense(down=1, across=1, columns=64, resident=3, stages=4, most_splits=8, staged=32, regions=2),
    Dense(pingpong=True, columns=160, multicast=2, stages=4, staged=32),
    Dense(pingpong=True, columns=128, multicast=2, trimmed=True, regions=3),
    Dense(pingpong=True, down=1, columns=256, multicast=2, stages=4),
    Dense(pingpong=True, columns=96, contractions=2, stages=5, staged=32),
    Dense(pingpong=True, columns=64, stages=2, transposed=True),
    Dense(pingpong=True, columns=160, stages=5, staged=32),
    Dense(columns=160, stages=5, staged=32, element="float16"),
    Dense(columns=224, stages=4, staged=32, regions=2, most_splits=4),
    Dense(down=3, columns=128, stages=5, staged=32, most_splits=4, trimmed=True),
    Dense(down=3, columns=64, contractions=2, stages=5, staged=32),
    Dense(down=1, columns=64, stages=6, ranges=5, regions=2, trimmed=True),
    Dense(multicast=2, shares_x=True, raster=3, trimmed=True),
    Dense(columns=192, multicast=2, shares_x=True, most_splits=2, trimmed=True),
    Dense(down=3, columns=128, multicast=2, shares_x=True, stages=5, staged=32, regions=2, trimmed=True),
    Dense(columns=128, multicast=2, shares_x=True, stages=4, transposed=True, contractions=2, trimmed=True),
    Dense(pingpong=True, columns=160, multicast=2, shares_x=True, stages=4, staged=32, trimmed=True),
    Dense(pingpong=True, down=1, columns=256, multicast=2, shares_x=True, stages=4, trimmed=True),
    Dense(columns=208, stages=4, staged=16, most_splits=3, trimmed=True),
    Dense(swapped=True, columns=208, stages=4, staged=16, trimmed=True),
    Dense(swapped=True, columns=160, stages=5, staged=32, trimmed=True, multicast=2),
    Dense(swapped=True, columns=112, stages=5, staged=16, trimmed=True, multicast=2, shares_x=True),
    Dense(swapped=True, down=1, columns=96, stages=8, staged=32, resident=1),
    Dense(swapped=True, columns=144, stages=5, staged=16, trimmed=True, pingpong=True, raster=3),
    Dense(swapped=True, down=3, columns=128, stages=5, staged=32, trimmed=True, element="float16"),
    Dense(swapped=True, down=1, across=2, columns=256, stages=5, staged=32, multicast=2),
    Dense(swapped=True, blocks=2, columns=144, stages=4, staged=16, trimmed=True, multicast=4, shares_x=True),
    Dense(swapped=True, blocks=2, columns=144, stages=4, staged=16, trimmed=True),
    Dense(swapped=True, down=1, columns=112, stages=8, staged=16, trimmed=True, multicast=2, other_multicast=2),
    Dense(swapped=True, down=1, columns=64, stages=6, staged=32, ranges=3, trimmed=True),
    Dense(down=1, columns=128, stages=8, staged=32, trimmed=True, multicast=4, other_multicast=2),
    Dense(down=1, columns=64, stages=8, trimmed=True, multicast=4, other_multicast=2, shares_x=True, ranges=3),
    Dense(swapped=True, columns=96, stages=5, staged=32, trimmed=True, multicast=4, other_multicast=2, ranges=2),
    Dense(columns=192, stages=4, trimmed=True, multicast=2, ranges=2),
    Dense(columns=96, stages=7, staged=32, trimmed=True, multicast=2, other_multicast=2, shares_x=True),
    Dense(blocks=2, columns=128, stages=4, staged=32, trimmed=True, most_splits=3),
    Dense(x_transposed=True, transposed=True, multicast=2, most_splits=2, trimmed=True),
    Dense(x_transposed=True, multicast=2, shares_x=True, raster=3, trimmed=True),
    Dense(x_transposed=True, down=3, columns=128, stages=5, staged=32, most_splits=4, trimmed=True, element="float16"),
    Dense(x_transposed=True, transposed=True, pingpong=True, columns=128, multicast=2, regions=3),
    Dense(x_transposed=True, transposed=True, pingpong=True, down=1, columns=128, stages=8, trimmed=True),
    Dense(x_transposed=True, blocks=2, columns=96, stages=4, staged=32, multicast=2, other_multicast=2),
    Dense(x_transposed=True, down=1, across=2, columns=128, contractions=2, stages=4, resident=1, trimmed=True),
    Dense(x_transposed=True, down=1, columns=64, stages=6, ranges=5, transposed=True, trimmed=True),
    Dense(x_transposed=True, down=1, columns=96, stages=6, staged=32, multicast=4, other_multicast=2, shares_x=True),
    Dense(transposed=True, columns=64, stages=6, multicast=4, trimmed=True),
    Dense(columns=144, stages=5, staged=16, multicast=2, trimmed=True),
    Dense(transposed=True, swapped=True, down=3, columns=96, stages=4, staged=32, multicast=2, other_multicast=2),
    Dense(transposed=True, swapped=True, down=1, columns=144, stages=6, staged=16, multicast=4, other_multicast=2),
)
