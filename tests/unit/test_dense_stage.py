"""The dense mainloop's copies of single elements, run on the CPU: every element of a tile, and zeros from K on."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jitgen.codegen.environment import family_folder, headers

PROGRAM = """
#include <cstdint>
#define JITGEN_DEVICE inline
static unsigned char shared[1 << 16];
inline int smaller(int a, int b) { return a < b ? a : b; }
inline void load_matrices(uint32_t (&)[4], uint32_t) {}
inline void load_matrices_transposed(uint32_t (&)[4], uint32_t) {}
template <int bytes> inline void copy_async(uint32_t, const void*, int = 0) {}
struct Element { uint16_t bits; };
ENUM
TILE
using Tile = OperandTile<Element, Along::ALONG, VECTOR, OUTER, THREADS>;
extern "C" void stage(const Element* from, long outer_stride, long k_stride, int live, int k0, int K, uint16_t* to) {
  for (int i = 0; i < Tile::bytes; ++i) shared[i] = 0xA5;
  const Tile tile{from, outer_stride, k_stride, live};
  for (int thread = 0; thread < THREADS; ++thread) tile.stage(0, k0, K, thread);
  for (int at = 0; at < OUTER; ++at) {
    for (int k = 0; k < 64; ++k) to[at * 64 + k] = *reinterpret_cast<uint16_t*>(shared + Tile::place(at, k));
  }
}
"""


def stage_of(directory: Path, along: str, outer: int, threads: int) -> Any:
    """``OperandTile::stage`` of single elements, as a function that fills a tile of [outer, 64]."""
    text = dict(headers(family_folder("gemm"), '#include "jitgen/gemm_dense.cuh"'))["jitgen/gemm_dense.cuh"]
    tile = text[text.index("template <class Element, Along along") : text.index("// The same for x. A computed")]
    tile, stores = re.subn(
        r'asm volatile\("st\.shared\.u16 \[%0\], %1;" ::"r"\((.*)\), "h"\((.*)\) : "memory"\);',
        r"*reinterpret_cast<uint16_t*>(shared + \1) = \2;",
        tile,
    )
    assert stores == 1
    program = PROGRAM.replace("ENUM", "enum class Along { k, outer, neither };").replace("TILE", tile)
    for name, value in {"ALONG": along, "VECTOR": 1, "OUTER": outer, "THREADS": threads}.items():
        program = re.sub(rf"\b{name}\b", str(value), program)
    (directory / "stage.cpp").write_text(program)
    command = ["g++", "-std=c++17", "-O1", "-w", "-fno-strict-aliasing"]
    files = ["-shared", "-fPIC", str(directory / "stage.cpp"), "-o", str(directory / "stage.so")]
    subprocess.run([*command, *files], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(directory / "stage.so")).stage


@pytest.mark.parametrize(("along", "outer", "threads"), [("k", 128, 256), ("outer", 64, 256), ("neither", 24, 128)])
def test_every_element_is_copied_and_zeros_from_k_on(along: str, outer: int, threads: int, tmp_path: Path) -> None:
    stage = stage_of(tmp_path, along, outer, threads)
    rng = np.random.default_rng()
    for K, k0, live in itertools.product((1, 63, 64, 65, 111), (0, 64), (1, outer - 3, outer)):
        if k0 >= K:
            continue
        values = rng.integers(1, 2**16, (outer, K), dtype=np.uint16)
        memory = values if along != "outer" else np.ascontiguousarray(values.T)
        strides = (K, 1) if along != "outer" else (1, outer)
        found = np.empty((outer, 64), np.uint16)
        pointers = memory.ctypes.data_as(ctypes.c_void_p), found.ctypes.data_as(ctypes.c_void_p)
        stage(pointers[0], *map(ctypes.c_long, strides), live, k0, K, pointers[1])
        want = np.zeros((outer, 64), np.uint16)
        rest = values[:, k0 : k0 + 64]
        want[:, : rest.shape[1]] = rest
        assert (found[:live] == want[:live]).all(), (K, k0, live)
        assert (found[live:] == 0xA5A5).all(), "nothing is written beyond what lives"
