"""Generated CUDA kernels compiled for the CPU and run block by block, for where there is no GPU.

The source is the one a GPU would get, with the same headers. A block's threads are coroutines (POSIX ``ucontext``) that
take turns: in each round a thread runs until it shuffles or waits at a barrier. The threads of a warp must pass the
same shuffles, and all threads of a block the same barriers, as here they do. Of PTX only the conversions of 16-bit
floats and accesses of shared memory are known, and an AssertionError names any other instruction that a thread comes
to; ``headers`` may take the place of a header that has more of it, as ``tests/host_ptx.cuh`` does of the matrix
products' instructions. Slow: meant for kernels of a few blocks.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import jitgen
from jitgen.compilers import host
from jitgen.ir import symbols
from jitgen.quant import weights
from jitgen.spec import DTYPES

_BEFORE = r"""
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's headers: half of what C++'s own take to read, in each kernel
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define __grid_constant__
#define __CUDA_ARCH__ 800

struct dim { unsigned x, y, z; };
static dim threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 { float x, y, z, w; };

static unsigned char shared_memory[1 << 18] __attribute__((aligned(1024)));
static size_t __cvta_generic_to_shared(const void* p) { return static_cast<const unsigned char*>(p) - shared_memory; }

static float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }
static int __float_as_int(float f) { int bits; memcpy(&bits, &f, 4); return bits; }
static double __longlong_as_double(long long bits) { double d; memcpy(&d, &bits, 8); return d; }
static long long __double_as_longlong(double d) { long long bits; memcpy(&bits, &d, 8); return bits; }
static int __ffs(unsigned a) { return __builtin_ffs(int(a)); }
template <class T> static T atomicAdd(T* at, T value) { const T before = *at; *at += value; return before; }
static int __popc(unsigned a) { return __builtin_popcount(a); }
static int __clz(unsigned a) { return a ? __builtin_clz(a) : 32; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
template <class T> static T __ldg(const T* p) { return *p; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return found;
}
template <class T> static T __ldcs(const T* p) { return *p; }
template <class T> static void __stcs(T* p, T v) { *p = v; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static double rsqrt(double x) { return 1.0 / sqrt(x); }

static float from_bfloat16(uint16_t bits) { return __int_as_float(int(uint32_t(bits) << 16)); }
static uint16_t to_bfloat16(float x) {
  if (x != x) return 0x7fff;
  uint32_t bits = uint32_t(__float_as_int(x));
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static float from_float16(uint16_t bits) { _Float16 h; memcpy(&h, &bits, 2); return float(h); }
static uint16_t to_float16(float x) { _Float16 h = _Float16(x); uint16_t bits; memcpy(&bits, &h, 2); return bits; }

constexpr int most_threads = 1024;
static ucontext_t scheduler, fibers[most_threads];
static char* stacks;
static int running, count, arrived, generation;
static bool ended[most_threads];
static uint32_t slots[most_threads];

static void pause() { const int self = running; swapcontext(&fibers[self], &scheduler); }

// A thread that has had so many turns at one barrier waits for ever: the whole grid ends, and Python raises.
constexpr int most_turns = 4000;
static const char* stuck_at;
static int stuck_thread;
static void give_up(const char* name) {
  if (!stuck_at) stuck_at = name, stuck_thread = running;
  for (int t = 0; t < count; ++t) ended[t] = true;
  pause();
}
static void __syncthreads() {
  ++arrived;
  for (const int now = generation; now == generation;) pause();
}
static void __syncwarp() { pause(); }
static uint32_t exchange(uint32_t word, int lane_of_warp) {
  const int self = running;
  slots[self] = word;
  pause();
  const uint32_t found = slots[self / 32 * 32 + lane_of_warp];
  pause();
  return found;
}
static uint32_t __shfl_up_sync(unsigned, uint32_t word, int distance, int width) {
  const int lane = running % 32;
  return exchange(word, lane % width >= distance ? lane - distance : lane);
}
static uint32_t __shfl_sync(unsigned, uint32_t word, int source, int width = 32) {
  const int lane = running % 32;
  return exchange(word, lane / width * width + source);
}
static float __shfl_xor_sync(unsigned, float value, int step) {
  return __int_as_float(int(exchange(uint32_t(__float_as_int(value)), running % 32 ^ step)));
}
static uint32_t __shfl_xor_sync(unsigned, uint32_t word, int step) { return exchange(word, running % 32 ^ step); }
static int64_t __shfl_xor_sync(unsigned, int64_t value, int step) {
  const int other = running % 32 ^ step;
  const uint64_t low = exchange(uint32_t(value), other), high = exchange(uint32_t(uint64_t(value) >> 32), other);
  return int64_t(high << 32 | low);
}
static unsigned __ballot_sync(unsigned, bool mine) {
  const int self = running;
  slots[self] = mine;
  pause();
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= slots[self / 32 * 32 + lane] << lane;
  pause();
  return found;
}
static uint32_t __reduce_max_sync(unsigned, uint32_t mine) {
  const int self = running;
  slots[self] = mine;
  pause();
  uint32_t found = mine;
  for (const uint32_t* other = slots + self / 32 * 32; other < slots + self / 32 * 32 + 32; ++other) {
    found = *other > found ? *other : found;
  }
  pause();
  return found;
}
static uint32_t __reduce_add_sync(unsigned, uint32_t mine) {
  const int self = running;
  slots[self] = mine;
  pause();
  uint32_t found = 0;
  for (int lane = 0; lane < 32; ++lane) found += slots[self / 32 * 32 + lane];
  pause();
  return found;
}
static uint32_t __reduce_min_sync(unsigned mask, uint32_t mine) { return ~__reduce_max_sync(mask, ~mine); }
static bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
"""
_AFTER = r"""
static void (*body)();
static void one_thread() { body(); ended[running] = true; pause(); }
static void run_block(dim block, dim shape) {
  const int threads = int(shape.x * shape.y * shape.z);
  constexpr size_t stack = 256 << 10;
  if (!stacks) stacks = static_cast<char*>(malloc(stack * most_threads));
  blockIdx = block;
  count = threads;
  arrived = 0;
  blockDim = shape;
  for (int t = 0; t < threads; ++t) {
    ended[t] = false;
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = stacks + stack * t;
    fibers[t].uc_stack.ss_size = stack;
    fibers[t].uc_link = &scheduler;
    makecontext(&fibers[t], one_thread, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (int t = 0; t < threads; ++t) {
      if (ended[t]) continue;
      running = t;
      threadIdx = {t % shape.x, t / shape.x % shape.y, t / (shape.x * shape.y)};
      swapcontext(&scheduler, &fibers[t]);
      any = any || !ended[t];
    }
    if (arrived == threads) {  // all wait at the same barrier
      arrived = 0;
      ++generation;
    }
  }
}
"""
_ASSEMBLY = {
    r'asm\("mov.b32 %0, \{0, %1\};".*?\);': "value = from_bfloat16(element.bits);",
    r'asm\("cvt.rn.bf16.f32.*?\);': "element.bits = to_bfloat16(value);",
    r'asm\("cvt.f32.f16 .*?\);': "value = from_float16(bits);",
    r'asm\("cvt.rn.f16.f32.*?\);': "element.bits = to_float16(value);",
    r'asm\("cvt.rn.bf16x2.f32.*?\);': "pair = uint32_t(to_bfloat16(high)) << 16 | to_bfloat16(low);",
    r'asm\("(min|max).NaN.f32.*?\);': r"result = a != a || b != b ? a + b : f\1f(a, b);",
    r'asm\("ex2.approx.ftz.f32.*?\);': "result = exp2f(a);",
    r'asm\("rcp.approx.ftz.f32 %0, %1;" : "=f"\(inverse\).*?\);': (
        "inverse = 1.0f / (1.0f + exp2_normal(2.88539008f * a));"
    ),
    r'asm\("rcp.approx.ftz.f32 %0, %1;" : "=f"\(result\) : "f"\(__fmaf.*?\);': (
        "result = 1.0f / __fmaf_rn(0.125f, power, 0.125f);"
    ),
    r'asm\("rcp.approx.ftz.f32 %0, %1;" : "=f"\(t\).*?\);': ("t = 1.0f / __fmaf_rn(0.4187246f, size, 1.0f);"),
    r'asm( volatile)?\("ld.global(?:.|\n)*?\);': "word = *address;",
    r'asm volatile\("st.global.v4(?:.|\n)*?\);': "words[i] = word;",
    r'asm volatile\("prefetch.global.L2(?:.|\n)*?\);': "(void)*reinterpret_cast<const volatile char*>(from + i);",
    r'asm volatile\("ld.shared.v4.u32 (?:.|\n)*?\);': "memcpy(b, shared_memory + address, 16);",
    r'asm volatile\("st.shared.v[24].u32 .*?::"r"\((.*?)\), "r"\(word(?:.|\n)*?\);': (
        r"memcpy(shared_memory + \1, &word, sizeof(word));"
    ),
    r'asm volatile\("st.shared.u(8|16|32) \[%0\], %1;" ::"r"\((.*)\), "[rh]"\((.*)\) : "memory"\);': (
        r"{ const uint\1_t stored = uint\1_t(\3); memcpy(shared_memory + \2, &stored, sizeof(stored)); }"
    ),
    r'asm( volatile)?\("" : .*?\);': ";",
}
_UNKNOWN = re.compile(r"asm(?: volatile)?\((?:.|\n)*?\);")
_THREADS = "jitgen/cuda_on_host.hpp"
"""The header with what kernels find on a GPU, which ``tests/compiled_once.py`` compiles once for all kernels: what it
includes itself takes half of a kernel's time."""

_SHARED = re.compile(r"extern __shared__ .*? (\w+)\[\];")
_SHARED_NUMBERS = re.compile(r"extern __shared__ (float|double|int) (\w+)\[\];")


def _refused(assembly: re.Match[str]) -> str:
    """Text that ends the grid where a thread comes to an instruction that the host does not know."""
    words = re.search(r"[a-z]\w*(\.\w+(::\w+)?)+|[a-z]\w*", assembly[0].partition('"')[2])
    return f'give_up("the instruction {words[0] if words else "?"}, which the host does not know");'


def on_host(
    source: Any, directory: Path, replaced: Mapping[str, str], entry: str = "", cluster: int = 1
) -> Callable[..., None]:
    """``source``, a CUDA ``KernelSource``, as a function of the grid, the block (each a number, or three) and the bytes
    of its struct: the entry whose name is the kernel's, followed by ``entry``. Of a ``cluster`` of several blocks,
    which run one after another, the grid runs twice: the second time blocks read what the others had the first time
    (``tests/host_wgmma.cuh``), so that each block may have one piece of work that it shares."""
    headers = dict(source.headers) | replaced
    for name, text in headers.items():
        for pattern, replacement in _ASSEMBLY.items():
            text = re.sub(pattern, replacement, text)
        text = _UNKNOWN.sub(_refused, text)
        text = _SHARED.sub(r"unsigned char* const \1 = shared_memory;", text)
        path = directory / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (directory / "include" / _THREADS).write_text(_BEFORE)
    text = source.text
    scope = f"{entry[1:]}::" if f"namespace {entry[1:]} {{" in text else ""
    struct_ = "jitgen_launch::Params" if "namespace jitgen_launch {" in text else "Params"
    wrapper = f"""
static {struct_} params;
static void call() {{ {scope}{source.name}{entry}(params); }}
extern "C" void run(const unsigned* grid, const unsigned* threads, const unsigned char* bytes) {{
  memcpy(&params, bytes, sizeof params);
  gridDim = {{grid[0], grid[1], grid[2]}};
  body = call;
  stuck_at = nullptr;
  const dim shape = {{threads[0], threads[1], threads[2]}};
  for (unsigned z = 0; z < grid[2] * (JITGEN_CLUSTER > 1 ? 2 : 1); ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0] && !stuck_at; ++x) run_block({{x, y, z % grid[2]}}, shape);
}}
extern "C" const char* stuck(int* thread) {{ *thread = stuck_thread; return stuck_at; }}
"""
    text = _SHARED_NUMBERS.sub(r"\1* const \2 = reinterpret_cast<\1*>(shared_memory);", text)
    text = _SHARED.sub(r"unsigned char* const \1 = shared_memory;", text)
    (directory / "kernel.cpp").write_text(
        f"#include <{_THREADS}>\n#define JITGEN_CLUSTER {cluster}\n{_AFTER}{text}{wrapper}"
    )
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"]
    flags += [f"-frandom-seed={source.name}", "-I", "include", "-shared", "kernel.cpp", "-o", "kernel.so"]
    host._run(source, directory, [shutil.which("g++") or "g++", *flags])
    loaded = ctypes.CDLL(str(directory / "kernel.so"))
    function, stuck = loaded.run, loaded.stuck
    stuck.restype = ctypes.c_char_p
    three = ctypes.c_uint * 3
    function.argtypes = [three, three, ctypes.c_char_p]
    function.restype = None

    def call(grid: Any, block: Any, struct_bytes: bytes) -> None:
        sizes = (three(*((size, 1, 1) if isinstance(size, int) else size)) for size in (grid, block))
        function(*sizes, struct_bytes)
        thread = ctypes.c_int()
        name = stuck(ctypes.byref(thread))
        assert name is None, f"{source.name} hangs: thread {thread.value} waits for {name.decode()}"

    return call


def _encoded(of: Any, address: int) -> bytes:
    """The ``TensorMap`` of ``tests/host_wgmma.cuh`` for a mapped tensor of up to five dimensions."""
    missing = 5 - len(of.sizes)
    sizes, strides = (*(1,) * missing, *of.sizes), (*(0,) * missing, *of.strides)
    item = 4 if of.dtype == "uint32" else DTYPES[of.dtype].itemsize
    return struct.pack("14q16x", address + of.offset, *sizes, *strides, of.box[-2], item, of.box[-1])


def packed(arguments: Any, codes: str, varying: Sequence[Any]) -> bytes:
    """The struct of an entry.

    Args:
        codes: of run-time scalars.
        varying: the values of tensor maps, pointers and run-time scalars.
    """
    packing, rest = arguments.packing(codes), iter(varying)
    assert packing.layout is not None
    offsets, size = packing.layout
    found = bytearray(size)
    for code, value, offset in zip(packing.codes, packing.values, offsets, strict=True):
        code = {"T": "128s", "P": "Q"}.get(code, code)
        struct.pack_into(f"={code}", found, offset, next(rest) if value is None else value)
    return bytes(found)


def _tensors(weight: Any, layouts: Any) -> Sequence[torch.Tensor]:
    """The tensors of a quantised weight in the layout that kernels read."""
    return weight.with_layout(weights.layout_of(weight, layouts)).tensors


_CODES = {"float32": "f", "float64": "d", "int64": "q"}
DRAWN = 5, 0
"""Seed and offset of random numbers."""


def run(
    function: Callable[..., Any],
    *arguments: Any,
    target: str = "sm_90a",
    headers: Mapping[str, str] | None = None,
    clusters: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The results of ``function`` by its CUDA kernels, run on the CPU, which updates arguments in place; outputs that
    are views are not known.

    Args:
        arguments: tensors, quantised weights and numbers, or lists of them.
        headers: the text of headers that take the place of those of the source, by name.
        clusters: whether blocks are in clusters as a launch has them, else each is alone.
    """
    lowered = jitgen.jit(function).lower(*arguments, backend="cuda", target=target)._lowered
    program = lowered.program
    leaves = pytree.tree_leaves(arguments)
    numbers = [leaf for leaf in leaves if isinstance(leaf, (int, float))]
    tensors = [
        tensor
        for argument in leaves
        if not isinstance(argument, (int, float))
        for tensor in (
            _tensors(argument, lowered.route.layouts) if isinstance(argument, jitgen.QTensor) else (argument,)
        )
    ]
    held = list(tensors)
    updated = {len(tensors) + len(program.temporaries) + result: index for index, result in program.mutated}
    for memory, buffer in zip(lowered.memories[len(tensors) :], program.buffers[len(tensors) :], strict=True):
        if len(held) in updated:
            held.append(tensors[updated[len(held)]])
            continue
        steps = zip(memory.view.sizes, memory.view.strides, strict=True)
        extent = 1 + sum((size - 1) * abs(step) for size, step in steps)
        room = torch.full((max(extent, 1) * DTYPES[buffer.dtype].itemsize,), 0xA5, dtype=torch.uint8)
        held.append(room.view(DTYPES[buffer.dtype]).as_strided(memory.view.sizes, memory.view.strides))
    environment = {
        symbol.args[0]: size
        for index, tensor in enumerate(tensors)
        for dim, size in enumerate(tensor.shape)
        for symbol in [symbols.size_symbol(index, dim)]
    } | dict(zip(symbols.DRAWN, DRAWN, strict=True))
    environment |= {f"a{index}": number for index, number in enumerate(numbers)}
    for number, kernel in enumerate(program.kernels):
        if not lowered.work(number).elements:
            continue
        shape, arguments = lowered.launch(number), lowered.arguments(number)
        scalars = [symbols.evaluate(expr, environment) for expr, _ in kernel.scalars]
        maps = [_encoded(each, held[each.buffer].data_ptr()) for each in arguments.maps]
        pointers = [held[buffer].data_ptr() + offset for buffer, offset in arguments.pointers]
        source, _ = lowered.render(number)
        with tempfile.TemporaryDirectory() as directory:
            compiled = on_host(source, Path(directory), headers or {}, shape.entry, shape.cluster if clusters else 1)
        codes = "".join(_CODES[dtype] for _, dtype in kernel.scalars)
        compiled(shape.grid, shape.block, packed(arguments, codes, [*maps, *pointers, *scalars]))
    return tuple(
        held[len(tensors) + len(program.temporaries) + output] if isinstance(output, int) else held[output.input]
        for output in program.outputs
    )
