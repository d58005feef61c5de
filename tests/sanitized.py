"""Small computations of every family, for compute-sanitizer: what is computed, and how it is compared with float64.

Inputs are made and results are compared on the CPU, so that a GPU runs jitgen's kernels and copies alone. Sizes are
ragged: an access beyond an operand is one beyond an allocation, where PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every
tensor one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RELATIVE = {BF16: 2.0**-6, F16: 2.0**-9, F32: 2.0**-16, F64: 2.0**-40}
"""Of the norm of the difference from float64, relative to the norm of the result: a few roundings of the dtype."""


@dataclass(frozen=True)
class Problem:
    """One function with its arguments.

    Attributes:
        case: the family and what of it, such as ``"gemm wgmma"``: problems of one case share a process.
        function: of tensors, or of tensors and a quantised weight, which is last.
        shapes: of the tensors.
        dtype: of the tensors.
        indices, below: how many tensors at the end are indices, and below what.
        weight: (columns, length, format, group size) of the quantised weight.
        activation: what its activations are quantised to; the rounding of int8 is within ``RELATIVE`` of bfloat16.
        gradients: whether those with respect to all floating tensors are computed, too.
    """

    case: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = BF16
    indices: int = 0
    below: int = 0
    weight: tuple[int, int, str, int | None] | None = None
    activation: str | None = None
    gradients: bool = False

    def tensors(self) -> list[Any]:
        generator = torch.Generator().manual_seed(33)
        made: list[Any] = []
        for number, shape in enumerate(self.shapes):
            if number >= len(self.shapes) - self.indices:
                made.append(torch.randint(0, self.below, shape, generator=generator))
            else:
                made.append(torch.randn(shape, generator=generator).to(self.dtype))
        if self.weight is not None:
            columns, length, name, group = self.weight
            dense = torch.randn(columns, length, generator=generator).to(self.dtype)
            made.append(jitgen.quantize(dense, name, group, activation=self.activation))
        return made

    def mistakes(self, backend: str) -> Iterator[str]:
        """Compute it on the GPU; what is wrong with the results."""
        arguments = self.tensors()
        exact = [a.dequantize(F64) if isinstance(a, jitgen.QTensor) else _exact(a) for a in arguments]
        moved = [a.cuda() for a in arguments]
        if self.gradients:
            for tensor in (*exact, *moved):
                tensor.requires_grad_(tensor.is_floating_point() and not isinstance(tensor, jitgen.QTensor))
        found, wanted = _results(jitgen.jit(self.function, backend=backend)(*moved)), _results(self.function(*exact))
        if self.gradients:
            seeds = [torch.randn(t.shape, generator=torch.Generator().manual_seed(5)).to(t.dtype) for t in found]
            leaves = [t for t in moved if t.requires_grad], [t for t in exact if t.requires_grad]
            gradients = torch.autograd.grad(found, leaves[0], [seed.cuda() for seed in seeds])
            found += gradients
            wanted += torch.autograd.grad(wanted, leaves[1], [seed.double() for seed in seeds])
        for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
            yield from _mistake(number, got.detach().cpu(), want.detach())


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _results(returned: Any) -> tuple[torch.Tensor, ...]:
    return (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)


def _mistake(number: int, got: torch.Tensor, want: torch.Tensor) -> Iterator[str]:
    if got.shape != want.shape:
        yield f"result {number} is {tuple(got.shape)} for {tuple(want.shape)}"
    elif not got.is_floating_point():
        if not torch.equal(got, want):
            yield f"result {number}: {int((got != want).sum())} of {got.numel()} integers differ"
    elif not (error := float((got.double() - want).norm() / want.norm())) <= RELATIVE[got.dtype]:
        yield f"result {number}: relative error {error:.1e}"


# ------------------------------------------------------------------------------------------------------ the problems


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_softly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.tanh(q @ k.mT / 8) * 5
    return torch.softmax(scores, -1) @ v


def add_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros(11, x.shape[1], device=x.device, dtype=x.dtype).index_add(0, index, x)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def codes(x: torch.Tensor) -> torch.Tensor:
    return (x * 16).round().clamp(-127, 127).to(torch.int8)


def multiply_codes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(codes(x), codes(weight).T)


def multiply_floats(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = (tensor.to(torch.float8_e4m3fn).float() for tensor in (x, weight))
    return (x @ weight.T).bfloat16()


def group(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    if x.dtype == F64:  # torch has products of groups for bfloat16 alone
        rows = torch.bucketize(torch.arange(len(x)), ends, right=True).clamp(max=len(weights) - 1)
        result = choose_experts(x, weights, rows)
    else:
        result = torch._grouped_mm(x, weights, offs=ends)
    return torch.where(torch.arange(len(x), device=x.device).unsqueeze(1) < ends[-1], result, 0)


def choose_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return (x.unsqueeze(1) @ weights[experts]).squeeze(1)


def route(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The order of what a top-k has chosen, the rank of each, and how many there are up to each number."""
    ids = torch.topk(x, 3, -1)[1].reshape(-1)
    order = torch.sort(ids, stable=True)[1]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0], device=x.device)
    counts = (ids[:, None] == torch.arange(x.shape[1], device=x.device)).sum(0)
    return order, ranks, torch.cumsum(counts, 0, dtype=torch.int32)


def heads(rows: int, keys: int, depth: int, width: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Shapes of queries, keys and values."""
    return (1, 2, rows, depth), (1, 2, keys, depth), (1, 2, keys, width or depth)


def _products(case: str, rows: tuple[int, ...], columns: int, length: int, dtype: torch.dtype) -> Iterator[Problem]:
    for count in rows:
        yield Problem(case, F.linear, ((count, length), (columns, length)), dtype)


def _quantized(name: str, group: int | None, length: int = 288, dtype: torch.dtype = BF16) -> Iterator[Problem]:
    for rows in (1, 16, 100):
        yield Problem(f"gemm {name}", F.linear, ((rows, length),), dtype, weight=(72, length, name, group))


PROBLEMS = (
    Problem("elementwise", lambda x, y: F.silu(x) * y + 1, ((7, 33), (33,))),
    Problem("elementwise", lambda x, y: torch.cat([x.T, y], 1).exp(), ((45, 7), (7, 130)), F32),
    Problem("elementwise", lambda x: (x.sin() * 2, x[:, ::3].clone()), ((3, 5, 129),), F64),
    Problem("elementwise", lambda x: F.gelu(x), ((1030,),), F16, gradients=True),
    Problem("reduction rows", lambda x: torch.softmax(x, -1), ((5, 1001),)),
    Problem("reduction rows", lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5), ((9, 130), (130,)), gradients=True),
    Problem("reduction rows", lambda x: x.argmax(-1), ((13, 77),), F32),
    Problem("reduction rows", lambda x: x.sum(-1), ((700, 3),), F32),
    Problem("reduction long", lambda x: torch.log_softmax(x, -1), ((2, 70001),), F32),
    Problem("reduction long", lambda x: F.layer_norm(x, x.shape[-1:]), ((3, 20003),)),
    Problem("reduction long", lambda x: x.logsumexp(-1), ((1, 300001),), F32),
    Problem("reduction columns", lambda x: x.sum(0), ((301, 65),), F32),
    Problem("reduction columns", lambda x: torch.softmax(x, 0), ((130, 37),)),
    Problem("reduction columns", lambda x: x.var(0), ((5000, 9),), F32),
    Problem("scan", lambda x: x.cumsum(-1), ((3, 1001),), F32),
    Problem("scan", lambda x: x.logcumsumexp(0), ((130, 17),), F32),
    Problem("scan", lambda x: x.cumsum(-1), ((2, 40001),), F32),
    Problem("scatter", add_rows, ((50, 33), (50,)), F32, 1, 11),
    Problem("scatter", lambda x, i: x.gather(1, i), ((7, 40), (7, 90)), F32, 1, 40, gradients=True),
    Problem("scatter", lambda w, i: F.embedding(i, w), ((30, 65), (4, 9)), F32, 1, 30, gradients=True),
    Problem("sort", lambda x: torch.sort(x, -1), ((3, 501),), F32),
    Problem("sort", lambda x: torch.topk(x, 5, -1), ((4, 333),), F32),
    Problem("sort", lambda x: torch.sort(x, -1), ((1, 9001),), F32),
    Problem("sort", route, ((5, 33),), F32),
    Problem("sort", route, ((1100, 130),), F32),
    *_products("gemm float32", (1, 5, 70), 45, 37, F32),
    *_products("gemm few rows", (1, 3, 16), 72, 1152, BF16),
    *_products("gemm few rows", (7,), 45, 133, F16),
    *_products("gemm wgmma", (100, 200), 264, 520, BF16),
    *_products("gemm wgmma", (130,), 520, 72, F16),
    *_products("gemm wgmma", (64,), 128, 8192, BF16),
    Problem("gemm wgmma", swiglu, ((130, 264), (72, 264), (72, 264))),
    Problem("gemm batched", lambda x, y: x @ y, ((3, 65, 40), (3, 40, 72))),
    Problem("gemm batched", lambda x, y: x @ y.mT, ((5, 3, 264), (5, 45, 264)), F16),
    *_quantized("int4", 128, 1152),
    *_quantized("int8", None, 264),
    *_quantized("fp8_e4m3", None, 264, F16),
    *_quantized("nf4", 96, 288, F16),
    *_quantized("uint4", 32),
    *(Problem("gemm bytes", multiply_codes, ((rows, 512), (264, 512))) for rows in (20, 100, 200)),
    *(Problem("gemm bytes", multiply_floats, ((rows, 512), (264, 512))) for rows in (5, 100, 200)),
    Problem("gemm bytes", F.linear, ((20, 288),), weight=(72, 288, "int8", None), activation="int8"),
    *(
        Problem("gemm bytes", F.linear, ((n, 512),), weight=(264, 512, "int4", 128), activation="int8")
        for n in (5, 200)
    ),
    Problem("gemm grouped", choose_experts, ((7, 72), (5, 72, 40), (7,)), indices=1, below=5),
    Problem("gemm grouped", choose_experts, ((300, 136), (5, 136, 264), (300,)), indices=1, below=5),
    Problem("gemm grouped", group, ((300, 136), (5, 136, 264), (5,)), indices=1, below=60),
    Problem("gemm grouped", lambda x, w, i: group(x, w.mT, i), ((300, 512), (9, 264, 512), (9,)), indices=1, below=33),
    Problem("attention", attend_causally, heads(100, 200, 64)),
    Problem("attention", attend, heads(65, 190, 128), F16),
    Problem("attention", attend, heads(150, 47, 128), F16),
    Problem("attention", attend_softly, heads(70, 129, 64)),
    Problem("attention", attend, heads(33, 45, 40), F32),
    Problem("attention decode", attend, heads(1, 300, 128)),
    Problem("attention decode", attend, heads(3, 2049, 64)),
    Problem("attention backward", attend_causally, heads(100, 100, 64), gradients=True),
    Problem("attention backward", attend, heads(65, 200, 128), F16, gradients=True),
    Problem("attention backward", attend_softly, heads(130, 64, 64), gradients=True),
)
CASES = tuple(dict.fromkeys(problem.case for problem in PROBLEMS))
BACKENDS = ("cuda", "triton")
