"""Random pointwise rules before and behind kernels that users wrote, each against float64 torch.

A program is one of six kernels, with a rule of up to twelve operations and four further operands behind its result, up
to three operations before one of its operands, and perhaps an intermediate value or the kernel's own result returned
as well. Operands have the result's shape in any order of memory, or are rows, columns and numbers; the shapes are
ragged. By hand: ``TRITON_INTERPRET=1 python -m tests.own_kernel_programs COUNT [FIRST]``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

import jitgen
from tests import own_kernels as kernels

MOST_OPERATIONS, MOST_OPERANDS = 12, 4
UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": lambda x: -x,
    "abs": torch.abs,
    "gelu": F.gelu,
    "halved": lambda x: x * 0.5,
    "shifted": lambda x: x + 0.25,
    "exp": lambda x: torch.exp(x.clamp(-3, 2)),
    "square": lambda x: x.clamp(-4, 4) ** 2,
    "silu": F.silu,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda x, y: x * torch.tanh(y),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(y > 0, x, y),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel, as a function of its tensors; what it computes; and shapes for it."""

    launch: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    shapes: Callable[[random.Random], list[tuple[int, ...]]]


def _add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.add[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 2}
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1)
    grid = (triton.cdiv(m, 16) * triton.cdiv(n, 32),)
    kernels.matmul[grid](a, b, c, m, n, k, *strides, **sizes, ACTIVATION="none")
    return c


def _persistent(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    kernels.persistent_matmul[(3,)](
        a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0), PROGRAMS=3, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
    )
    return c


def _softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    kernels.softmax[(x.shape[0],)](out, x, x.stride(0), out.stride(0), x.shape[1], BLOCK_SIZE=block)
    return out


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y, rows = torch.empty_like(x), x.shape[0]
    mean, rstd = torch.empty(rows, device=x.device), torch.empty(rows, device=x.device)
    kernels.layer_norm[(rows,)](x, y, weight, bias, mean, rstd, x.stride(0), x.shape[1], 1e-3, BLOCK_SIZE=16)
    return y


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    heads, seq, dim = q.shape
    kernels.flash_attention[(triton.cdiv(seq, 16), heads)](
        q, k, v, out, q.stride(0), q.stride(1), seq, dim**-0.5, BLOCK_M=16, BLOCK_N=16, DIM=dim, CAUSAL=False
    )
    return out


def _matrices(source: random.Random) -> list[tuple[int, ...]]:
    m, n, k = source.randint(1, 40), source.randint(1, 70), source.randint(1, 40)
    return [(m, k), (k, n)]


def _rows(source: random.Random) -> list[tuple[int, ...]]:
    rows, columns = source.randint(1, 6), source.randint(2, 40)
    return [(rows, columns), (columns,), (columns,)]


def _same(count: int, rank: int) -> Callable[[random.Random], list[tuple[int, ...]]]:
    return lambda source: [tuple(source.randint(1, 14) for _ in range(rank))] * count


def _heads(source: random.Random) -> list[tuple[int, ...]]:
    return [(source.randint(1, 2), source.randint(1, 20), 16)] * 3


KERNELS: dict[str, Kernel] = {
    "add": Kernel(_add, torch.add, _same(2, 3)),
    "matmul": Kernel(_matmul, torch.matmul, _matrices),
    "persistent": Kernel(_persistent, torch.matmul, _matrices),
    "softmax": Kernel(_softmax, lambda x: x.softmax(1), _same(1, 2)),
    "layer norm": Kernel(_layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-3), _rows),
    "attention": Kernel(_attention, F.scaled_dot_product_attention, _heads),
}

Step = tuple[str, int, int | None]
"""The name of an operation, the value it is applied to, and of a binary one the other value."""


def _applied(steps: Sequence[Step], values: list[Any]) -> list[Any]:
    for name, first, second in steps:
        value = UNARY[name](values[first]) if second is None else BINARY[name](values[first], values[second])
        values.append(value)
    return values


def _operand(source: random.Random, shape: tuple[int, ...]) -> Tensor:
    """A tensor that broadcasts to ``shape``: of that shape, in some order of memory, or of 1 along dimensions."""
    sizes = tuple(1 if source.random() < 0.35 else size for size in shape)
    if source.random() < 0.3:
        sizes = sizes[source.randint(0, len(sizes)) :]
    tensor = torch.randn(sizes)
    if len(sizes) > 1 and source.random() < 0.3:
        tensor = torch.randn(sizes[::-1]).permute(*reversed(range(len(sizes))))
    return tensor


def check(
    number: int,
    device: str = "cpu",
    kernels: Mapping[str, Kernel] = KERNELS,
    call: Callable[..., Any] = lambda function, *arguments: jitgen.jit(function)(*arguments),
) -> str | None:
    """Run program ``number`` on ``device``, with one of ``kernels``; a sentence if it is wrong.

    Args:
        call: calls the program, with lists of tensors.
    """
    source = random.Random(number)
    name = list(kernels)[number % len(kernels)]
    kernel = kernels[name]
    tensors = [torch.randn(shape).to(device) for shape in kernel.shapes(source)]
    shape = kernel.reference(*tensors).shape
    extra = [_operand(source, tuple(shape)).to(device) for _ in range(source.randint(0, MOST_OPERANDS))]
    before: list[Step] = [(source.choice(list(UNARY)), step, None) for step in range(source.randint(0, 3))]
    steps: list[Step] = []
    count = 1 + len(extra)
    dependent = [0]
    for _ in range(source.randint(1, MOST_OPERATIONS)):
        first = source.choice(dependent)
        second = source.randrange(count) if source.random() < 0.55 else None
        steps.append((source.choice(list(UNARY if second is None else BINARY)), first, second))
        dependent.append(count)
        count += 1
    half = source.random() < 0.3
    returned = [count - 1, *([source.choice(dependent)] if source.random() < 0.4 else [])]
    results_of_others = source.random() < 0.2

    def computed(launch: Callable[..., Tensor], tensors: Sequence[Tensor], extra: Sequence[Tensor]) -> Any:
        x, *others = tensors
        x = _applied(before, [x])[-1]
        values = _applied(steps, [launch(x, *others), *extra])
        results = [values[index] for index in returned]
        if half:
            results[0] = results[0].to(torch.float16)
        if results_of_others:
            results.append(values[-1].sum())
        return tuple(results)

    found = call(lambda tensors, extra: computed(kernel.launch, tensors, extra), tensors, extra)
    expected = computed(kernel.reference, [t.double() for t in tensors], [t.double() for t in extra])
    for index, (result, right) in enumerate(zip(found, expected, strict=True)):
        tolerance = 4e-3 if result.dtype is torch.float16 else 5e-4
        scale = max(1.0, right.double().abs().max().item())
        error = (result.double() - right.double()).abs().max().item()
        if result.shape != right.shape or not error <= tolerance * scale:
            return f"program {number} ({name}): result {index} is off by {error}: {before} {steps}"
    return None


def _seeded(number: int) -> str | None:
    torch.manual_seed(number)
    return check(number)


def programs(first: int, count: int) -> Iterator[str | None]:
    for number in range(first, first + count):
        try:
            yield _seeded(number)
        except Exception as error:
            yield f"program {number}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    total, begin = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    wrong = [said for said in programs(begin, total) if said]
    print("\n".join(wrong[:20]))
    print(f"{total} programs, {len(wrong)} wrong")
