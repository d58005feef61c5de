"""The dense mainloop's copies of single elements, and those that transpose bytes, run on the CPU: every element of a
tile, and zeros from K on."""

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
template <class T> constexpr bool is_integer = false;
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t order) {
  uint64_t both = uint64_t(high) << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> (order >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
struct Element { UINT bits; };
ENUM
TILE
using Tile = OperandTile<Element, Along::ALONG, VECTOR, OUTER, THREADS>;
extern "C" void stage(const Element* from, long outer_stride, long k_stride, int live, int k0, int K, UINT* to) {
  for (int i = 0; i < Tile::bytes; ++i) shared[i] = 0xA5;
  const Tile tile{from, outer_stride, k_stride, live};
  for (int thread = 0; thread < THREADS; ++thread) tile.stage(0, k0, K, thread);
  for (int at = 0; at < OUTER; ++at) {
    for (int k = 0; k < Tile::depth; ++k) {
      to[at * Tile::depth + k] = *reinterpret_cast<UINT*>(shared + Tile::place(at, k));
    }
  }
}
"""


def stage_of(directory: Path, along: str, outer: int, threads: int, vector: int, bits: int) -> Any:
    """``OperandTile::stage`` of elements of ``bits``, as a function that fills a tile of [outer, 128 bytes]."""
    text = dict(headers(family_folder("gemm"), '#include "jitgen/gemm_dense.cuh"'))["jitgen/gemm_dense.cuh"]
    tile = text[text.index("template <class Element, Along along") : text.index("// The same for x. A computed")]
    tile, stores = re.subn(
        r'asm volatile\("st\.shared\.u(\d+) \[%0\], %1;" ::"r"\((.*)\), "[hr]"\((.*)\) : "memory"\);',
        r"*reinterpret_cast<uint\1_t*>(shared + \2) = uint\1_t(\3);",
        tile,
    )
    assert stores == 3
    program = PROGRAM.replace("ENUM", "enum class Along { k, outer, neither };").replace("TILE", tile)
    facts = {"ALONG": along, "VECTOR": vector, "OUTER": outer, "THREADS": threads, "UINT": f"uint{bits}_t"}
    for name, value in facts.items():
        program = re.sub(rf"\b{name}\b", str(value), program)
    (directory / "stage.cpp").write_text(program)
    command = ["g++", "-std=c++17", "-O1", "-w", "-fno-strict-aliasing"]
    files = ["-shared", "-fPIC", str(directory / "stage.cpp"), "-o", str(directory / "stage.so")]
    subprocess.run([*command, *files], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(directory / "stage.so")).stage


@pytest.mark.parametrize(
    ("along", "outer", "threads", "vector", "bits"),
    [
        *(("k", 128, 256, 1, 16), ("outer", 64, 256, 1, 16), ("neither", 24, 128, 1, 16)),
        *(("k", 128, 256, 2, 8), ("outer", 64, 256, 1, 8), ("outer", 16, 128, 4, 8), ("outer", 128, 256, 16, 8)),
    ],
)
def test_every_element_is_copied_and_zeros_from_k_on(
    along: str, outer: int, threads: int, vector: int, bits: int, tmp_path: Path
) -> None:
    stage = stage_of(tmp_path, along, outer, threads, vector, bits)
    rng, depth = np.random.default_rng(), 1024 // bits
    dtype = np.uint16 if bits == 16 else np.uint8
    for K, k0, live in itertools.product((1, 63, 64, 65, 111, 130), (0, depth), (1, outer - 3, outer)):
        if k0 >= K:
            continue
        values = rng.integers(1, 2**bits, (outer, K), dtype=dtype)
        memory = values if along != "outer" else np.ascontiguousarray(values.T)
        strides = (K, 1) if along != "outer" else (1, outer)
        found = np.empty((outer, depth), dtype)
        pointers = memory.ctypes.data_as(ctypes.c_void_p), found.ctypes.data_as(ctypes.c_void_p)
        stage(pointers[0], *map(ctypes.c_long, strides), live, k0, K, pointers[1])
        want = np.zeros((outer, depth), dtype)
        rest = values[:, k0 : k0 + depth]
        want[:, : rest.shape[1]] = rest
        assert (found[:live] == want[:live]).all(), (K, k0, live)
        untouched = live if vector == 1 else -(-live // 4) * 4  # no result depends on rows beyond what lives
        assert (found[untouched:] == (0xA5A5 if bits == 16 else 0xA5)).all(), "nothing is written beyond what lives"
