"""Random mixtures of experts: a router, a way to bring tokens to experts, experts, and a sum that a grammar composes.

``program(seed)`` is a function in plain PyTorch with its arguments. The grammar:

    logits   := an argument | F.linear(x, router)
    scores   := softmax | sigmoid | sqrt(softplus) | the logits
    choice   := top-k | top-k with a bias | groups by their greatest or their two greatest scores, then top-k
    weights  := of the scores | over their sum | softmax of the chosen | times a factor
    dispatch := sorted | padded to a capacity | one-hot | matrices by ids | a loop over experts
    products := grouped | bmm | einsum | F.linear, of dense or quantised matrices
    expert   := swiglu | clamped swiglu with biases | relu squared | gelu
    sum      := unsorted rows | index_add_ | weighted einsum;  and a shared expert, gated or not
    result   := the sum | beside ids, ends of experts, a loss of balance, the weights

The expert that a token chooses jumps. So a program is one whose choice no rounding changes: ``judged`` sees to it.
By hand: ``python -m tests.routing_programs COUNT [FIRST] [BACKEND]``, with ``TRITON_INTERPRET=1`` for triton.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import jitgen
from tests.program_gradients import _Rounded
from tests.programs import RUNS, Verdict, _Perturbed, mistake

TOKENS = (1, 2, 3, 5, 8, 17, 33, 64)
EXPERTS = (1, 2, 3, 4, 6, 8, 12, 16, 33)
WIDTHS = (16, 32, 48, 64, 96)
SMALL = ((1, 2, 3, 5), (1, 2, 4, 6), (16, 32))
"""The same of programs for Triton's interpreter."""
FORMATS = ("int8", "int4", "int3", "int2", "uint4", "mxfp4", "nvfp4", "fp8_e4m3", "nf4")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Program:
    """A mixture and its arguments.

    Attributes:
        make: takes the function that computes a grouped product, and returns the mixture. Its first result are the ids
            that tokens choose.
        words: what the grammar composed.
        differentiable: positions of the arguments that it may be differentiated by.
    """

    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    args: list[Any]
    words: list[str] = field(default_factory=list)

    @property
    def differentiable(self) -> list[int]:
        floating = [isinstance(arg, Tensor) and not isinstance(arg, jitgen.QTensor) for arg in self.args]
        return [at for at, arg in enumerate(self.args) if floating[at] and arg.is_floating_point()]

    def exact_args(self) -> list[Any]:
        return [_in(arg, torch.float64) for arg in self.args]

    def __repr__(self) -> str:
        sizes = [f"{type(arg).__name__} {tuple(arg.shape)} {arg.dtype}" for arg in self.args]
        return "; ".join([", ".join(self.words), *sizes])


def _in(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, jitgen.QTensor):
        return arg.dequantize(dtype)
    return arg.to(dtype, copy=True) if arg.is_floating_point() else arg


def by_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A grouped product of any dtype."""
    begin, rows = 0, []
    for end, matrix in zip(ends.tolist(), weight, strict=True):
        rows.append(x[begin:end] @ matrix)
        begin = end
    return torch.cat(rows)


class _Drawn:
    """What is drawn for one program: its arguments, by their numbers, and words."""

    def __init__(self, seed: int, dtypes: tuple[torch.dtype, ...]):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice(dtypes)
        self.args: list[Any] = []
        self.words: list[str] = [str(self.dtype).removeprefix("torch.")]

    def choose(self, name: str, *options: str) -> str:
        found = self.random.choice(options)
        self.words.append(f"{name} {found}")
        return found

    def normal(self, *shape: int, scale: float = 1.0) -> int:
        return self.argument((torch.randn(shape, generator=self.generator) * scale).to(self.dtype))

    def argument(self, value: Any) -> int:
        self.args.append(value)
        return len(self.args) - 1


def program(seed: int, dtypes: tuple[torch.dtype, ...] = DTYPES, small: bool = False) -> Program:
    """The program that ``seed`` stands for."""
    drawn = _Drawn(seed, dtypes)
    draw = drawn.random
    sizes = SMALL if small else (TOKENS, EXPERTS, WIDTHS)
    tokens, experts, width, inner = (draw.choice(sizes[number]) for number in (0, 1, 2, 2))
    count = draw.randint(1, min(experts, 8))
    drawn.words.append(f"{tokens} tokens, {count} of {experts} experts, {width} by {inner}")
    x = drawn.normal(tokens, width)
    route = _router(drawn, x, tokens, experts, count, width)
    run = _experts(drawn, tokens, experts, count, width, inner)
    shared = _shared(drawn, width, inner)
    beside = drawn.choose("beside", "nothing", "nothing", "ends", "balance", "weights")

    def make(grouped: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            scores, weights, ids = route(args)
            result = run(args, args[x], weights.to(args[x].dtype), ids, grouped)
            if shared is not None:
                result = result + shared(args, args[x])
            if beside == "ends":
                return ids, result, _ends(ids.reshape(-1), experts)
            if beside == "balance":
                share = F.one_hot(ids, experts).float().mean((0, 1))
                return ids, result, experts * (share * scores.float().mean(0)).sum()
            return (ids, result, weights) if beside == "weights" else (ids, result)

        return function

    return Program(make, drawn.args, drawn.words)


Route = Callable[[Any], tuple[Any, Any, Any]]


def _router(drawn: _Drawn, x: int, tokens: int, experts: int, count: int, width: int) -> Route:
    """Scores, weights of the chosen, and their ids."""
    draw = drawn.random
    linear = drawn.dtype == torch.float32 and drawn.choose("logits", "argument", "linear") == "linear"
    if linear:
        router = drawn.normal(experts, width, scale=width**-0.5)
    else:
        order = torch.rand(tokens, experts, generator=drawn.generator).argsort(-1)
        given = drawn.argument(((order - experts / 2) * (4 / experts)).to(drawn.dtype))
    kind = drawn.choose("scores", "softmax", "softmax", "sigmoid", "sigmoid", "softplus", "logits")
    groups = draw.choice([n for n in (1, 2, 3, 4) if experts % n == 0])
    kept = draw.randint(1, groups)
    if count > kept * (experts // groups):
        groups = kept = 1
    two = experts // groups > 1 and draw.random() < 0.5
    drawn.words.append(f"{kept} of {groups} groups{' by two' if two else ''}" if groups > 1 else "no groups")
    bias = None
    if drawn.choose("bias", "none", "none", "of experts") != "none":
        bias = drawn.argument(torch.randn(experts, generator=drawn.generator) * 0.1)
    hidden = drawn.choose("hidden by", "masked_fill", "where", "product") if groups > 1 else ""
    mask = drawn.choose("mask by", "scatter_", "one_hot") if groups > 1 else ""
    unsorted = draw.random() < 0.5
    behind = drawn.choose("weights", "plain", "sum", "sum", "softmax")
    factor = draw.choice((1.0, 2.5))

    def route(args: Any) -> tuple[Any, Any, Any]:
        logits = F.linear(args[x], args[router]) if linear else args[given]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = {
            "softmax": lambda: torch.softmax(wide, -1),
            "sigmoid": wide.sigmoid,
            "softplus": lambda: F.softplus(wide).sqrt(),
            "logits": lambda: wide,
        }[kind]()
        choice = scores if bias is None else scores + args[bias].to(scores.dtype)
        if groups > 1:
            by_group = choice.view(-1, groups, experts // groups)
            of_group = by_group.topk(2, -1)[0].sum(-1) if two else by_group.amax(-1)
            chosen = torch.topk(of_group, kept, dim=-1, sorted=unsorted)[1]
            if mask == "scatter_":
                open_groups = torch.zeros_like(of_group).scatter_(1, chosen, 1)
            else:
                open_groups = F.one_hot(chosen, groups).sum(1)
            opened = open_groups.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
            if hidden == "masked_fill":
                choice = choice.masked_fill(~opened.bool(), float("-inf"))
            elif hidden == "where":
                choice = torch.where(opened > 0, choice, -100.0)
            else:
                choice = (choice + 10) * opened  # above 0, where closed groups are
        values, ids = torch.topk(choice, count, -1)
        weights = values if choice is scores else scores.gather(1, ids)
        if behind == "sum":
            weights = weights / (weights.abs().sum(-1, keepdim=True) + 1e-6)
        elif behind == "softmax":
            weights = torch.softmax(weights, -1)
        return scores, weights * factor if factor != 1 else weights, ids

    return route


Run = Callable[[Any, Any, Any, Any, Callable[..., Any]], Any]


@dataclass(frozen=True)
class _Experts:
    """What the experts of a mixture compute: positions of their arguments, and their sizes.

    Attributes:
        number, count: experts, and how many a token chooses.
        kind: of what stands between the two products.
    """

    number: int
    count: int
    width: int
    kind: str
    up: int
    down: int
    up_bias: int | None = None
    down_bias: int | None = None

    def rows(self, multiply: Callable[[Any, int], Any], bias: Callable[[int], Any], rows: Any) -> Any:
        """Both products by ``multiply``, of rows and an argument's matrices, with the bias that ``bias`` takes of an
        argument."""
        rows = multiply(rows, self.up)
        rows = self.between(rows if self.up_bias is None else rows + bias(self.up_bias))
        rows = multiply(rows, self.down)
        return rows if self.down_bias is None else rows + bias(self.down_bias)

    def between(self, rows: Any) -> Any:
        if self.kind == "swiglu":
            gate, value = rows.chunk(2, -1)
            return F.silu(gate) * value
        if self.kind == "clamped":
            gate, value = rows[..., ::2], rows[..., 1::2]
            gate, value = gate.clamp(max=1.5), value.clamp(-1.5, 1.5)
            return (value + 1) * gate * torch.sigmoid(gate * 1.702)
        return F.relu(rows).square() if self.kind == "relu" else F.gelu(rows)


def _experts(drawn: _Drawn, tokens: int, experts: int, count: int, width: int, inner: int) -> Run:
    """The weighted sum of the experts' rows, of tokens, weights and ids."""
    draw = drawn.random
    dispatch = drawn.choose("dispatch", "sorted", "sorted", "sorted", "padded", "one-hot", "by ids", "by ids", "loop")
    kind = drawn.choose("expert", "swiglu", "swiglu", "clamped", "relu", "gelu")
    halves = 2 if kind in ("swiglu", "clamped") else 1
    quantizable = dispatch in ("sorted", "by ids", "loop", "padded")
    format = drawn.choose("format", "dense", draw.choice(FORMATS)) if quantizable else "dense"

    def matrices(rows: int, columns: int) -> int:
        dense = torch.randn(experts, rows, columns, generator=drawn.generator) * columns**-0.5
        if format == "dense":
            return drawn.argument(dense.to(drawn.dtype))
        group = draw.choice((32, None)) if columns % 32 == 0 and "int" in format else None
        return drawn.argument(jitgen.quantize(dense.to(drawn.dtype), format, group_size=group))

    arguments = [matrices(halves * inner, width), matrices(width, inner)]
    if kind == "clamped" and dispatch != "one-hot":
        arguments += [drawn.normal(experts, halves * inner), drawn.normal(experts, width)]
    own = _Experts(experts, count, width, kind, *arguments)
    if dispatch == "by ids":
        return _by_ids(own, draw.random() < 0.5)
    if dispatch == "loop":
        return _loop(own)
    if dispatch == "one-hot":
        return _one_hot(own)
    if dispatch == "padded":
        capacity = draw.randint(1, max(1, 2 * tokens * count // experts))
        drawn.words.append(f"capacity {capacity}")
        return _padded(own, capacity)
    back = drawn.choose("sum", "ranks", "index_add_", "argsort")
    return _sorted(own, back, drawn.choose("ends", "histc", "compared", "bincount", "one_hot"))


def _by_ids(own: _Experts, repeats: bool) -> Run:
    def run(args: Any, x: Any, weights: Any, ids: Any, grouped: Any) -> Any:
        flat = ids.reshape(-1)
        rows = x[:, None].expand(-1, own.count, -1).reshape(-1, own.width)
        rows = x.repeat_interleave(own.count, 0) if repeats else rows

        def multiply(rows: Any, number: int) -> Any:
            return torch.bmm(args[number][flat], rows.unsqueeze(-1)).squeeze(-1)

        rows = own.rows(multiply, lambda number: args[number][flat], rows)
        return (rows.view(-1, own.count, own.width) * weights.unsqueeze(-1)).sum(1)

    return run


def _loop(own: _Experts) -> Run:
    def run(args: Any, x: Any, weights: Any, ids: Any, grouped: Any) -> Any:
        up_bias, down_bias = (None if n is None else args[n] for n in (own.up_bias, own.down_bias))
        result = torch.zeros_like(x)
        for expert in range(own.number):
            rows = F.linear(x, args[own.up][expert], None if up_bias is None else up_bias[expert])
            down = args[own.down][expert]
            rows = F.linear(own.between(rows), down, None if down_bias is None else down_bias[expert])
            result = result + rows * (weights * (ids == expert)).sum(-1, keepdim=True)
        return result

    return run


def _one_hot(own: _Experts) -> Run:
    def run(args: Any, x: Any, weights: Any, ids: Any, grouped: Any) -> Any:
        mask = F.one_hot(ids, own.number).to(x.dtype)
        rows = torch.einsum("tke,td->etd", mask, x)
        rows = own.between(torch.bmm(rows, args[own.up].transpose(1, 2)))
        rows = torch.bmm(rows, args[own.down].transpose(1, 2))
        return torch.einsum("etd,te->td", rows, torch.einsum("tke,tk->te", mask, weights))

    return run


def _padded(own: _Experts, capacity: int) -> Run:
    def run(args: Any, x: Any, weights: Any, ids: Any, grouped: Any) -> Any:
        mask = F.one_hot(ids.reshape(-1), own.number)
        place = ((mask.cumsum(0) - 1) * mask).sum(-1)
        inside = place < capacity
        slot = torch.where(inside, ids.reshape(-1) * capacity + place, own.number * capacity)
        buffer = x.new_zeros(own.number * capacity + 1, own.width)
        buffer = buffer.index_copy(0, slot, x.repeat_interleave(own.count, 0) * inside.unsqueeze(-1))
        rows = buffer[:-1].view(own.number, capacity, own.width)

        def multiply(rows: Any, number: int) -> Any:
            return torch.bmm(rows, args[number].transpose(1, 2))

        rows = own.rows(multiply, lambda number: args[number][:, None], rows).reshape(-1, own.width)
        rows = rows[slot.clamp(max=own.number * capacity - 1)] * (weights.reshape(-1) * inside).unsqueeze(-1)
        return rows.view(-1, own.count, own.width).sum(1)

    return run


def _sorted(own: _Experts, back: str, counted: str) -> Run:
    def run(args: Any, x: Any, weights: Any, ids: Any, grouped: Any) -> Any:
        ordered, order = torch.sort(ids.reshape(-1), stable=True)
        ends = _ends(ordered, own.number, counted)

        def multiply(rows: Any, number: int) -> Any:
            return grouped(rows, args[number].transpose(1, 2), ends)

        rows = own.rows(multiply, lambda number: args[number][ordered], x[order // own.count])
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        if back == "index_add_":
            return torch.zeros_like(x).index_add_(0, order // own.count, rows)
        if back == "argsort":
            return rows[order.argsort()].view(-1, own.count, own.width).sum(1)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(order.shape[0], device=order.device)
        return rows[ranks].view(-1, own.count, own.width).sum(1)

    return run


def _ends(ids: Any, experts: int, counted: str = "one_hot") -> Any:
    """The ends of experts among tokens that are sorted by them."""
    counts = {
        "histc": lambda: torch.histc(ids.float(), bins=experts, min=0, max=experts - 1),
        "compared": lambda: (ids[:, None] == torch.arange(experts, device=ids.device)).sum(0),
        "bincount": lambda: ids.new_zeros(experts).scatter_add_(0, ids, torch.ones_like(ids)),
        "one_hot": lambda: F.one_hot(ids, experts).sum(0),
    }[counted]()
    return torch.cumsum(counts, 0, dtype=torch.int32)


def _shared(drawn: _Drawn, width: int, inner: int) -> Callable[[Any, Any], Any] | None:
    kind = drawn.choose("shared", "none", "none", "plain", "gated")
    if kind == "none":
        return None
    up, down = (drawn.normal(*shape, scale=shape[1] ** -0.5) for shape in ((2 * inner, width), (width, inner)))
    gate = drawn.normal(1, width) if kind == "gated" else -1

    def run(args: Any, x: Any) -> Any:
        left, right = F.linear(x, args[up]).chunk(2, -1)
        rows = F.linear(F.silu(left) * right, args[down])
        return torch.sigmoid(F.linear(x, args[gate])) * rows if kind == "gated" else rows

    return run


# ------------------------------------------------------------------------------------------------------ what it gives

UNCLEAR = "unclear"
"""The verdict where roundings decide which expert a token chooses."""


def judged(
    drawn: Program, compile: Callable[[Callable[..., Any]], Callable[..., Any]], gradients: bool, device: str = "cpu"
) -> Verdict:
    """Compares a program, or its gradients, with float64: as far off as ``tests/programs.py`` allows.

    Args:
        compile: makes a function of jitgen, which is called with arguments on ``device``; all else is on the CPU.
    """
    exact_function, function = drawn.make(by_groups), drawn.make(torch._grouped_mm)
    size = max(torch.finfo(a.dtype).eps for a in drawn.args if a.is_floating_point() and a.dtype != torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)
    exact = _results(drawn, exact_function, drawn.exact_args(), gradients)
    perturbed = []
    for _ in range(RUNS):
        mode = _Rounded(size, generator) if gradients else _Perturbed(size, generator)
        noise = partial(_noise, size, generator)
        args = [noise(arg) if arg.is_floating_point() else arg for arg in drawn.exact_args()]
        with mode:
            perturbed.append(_results(drawn, exact_function, args, gradients, noise))
    eager = _results(drawn, function, [_in(arg, arg.dtype) for arg in drawn.args], gradients)
    if not all(torch.equal(run[0], exact[0]) for run in (*perturbed, eager)):
        return UNCLEAR, "ids"
    compiled = compile(function)
    try:
        found, again = (
            [result.cpu() for result in _results(drawn, compiled, [arg.to(device) for arg in drawn.args], gradients)]
            for _ in range(2)
        )
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    for number, (got, same, want) in enumerate(zip(found, again, eager, strict=True)):
        where = f"{'gradient' if gradients and number else 'result'} {number}"
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return "wrong", f"{where} is {got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
        if not torch.equal(got, same):
            return "wrong", f"{where} differs from call to call"
        runs = [run[number] for run in (*perturbed, eager)]  # a derivative's own differences cancel in eager torch too
        if got.is_floating_point():  # sums cancel: elements may be as far off as the others
            runs = [exact[number] + (run - exact[number]).abs().max() for run in runs]
        told = mistake(got, want, exact[number], runs, size)
        if told is not None:
            return "wrong", f"{where}: {told}"
    return "right", ""


def _noise(size: float, generator: torch.Generator, tensor: Tensor) -> Tensor:
    """``tensor``, every element of which is off by up to ``size`` of itself."""
    return tensor * (1 + size * (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1))


def _results(
    drawn: Program,
    function: Callable[..., Any],
    args: list[Any],
    gradients: bool,
    noise: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> list[Tensor]:
    """All results, or the ids and the gradients with respect to what may be differentiated.

    Args:
        noise: is added to what gradients start from.
    """
    if not gradients:
        with torch.no_grad():
            return list(function(*args))
    places = drawn.differentiable
    for place in places:
        args[place] = args[place].detach().clone().requires_grad_()
    ids, *results = function(*args)
    results = [result for result in results if result.requires_grad]
    with torch._C.DisableTorchFunction():
        generator = torch.Generator().manual_seed(1)
        starts = [torch.randn(result.shape, generator=generator).bfloat16().to(result.dtype) for result in results]
        starts = [noise(start.to(result.device)) for start, result in zip(starts, results, strict=True)]
    found = torch.autograd.grad(results, [args[place] for place in places], starts, allow_unused=True)
    with torch._C.DisableTorchFunction():
        return [
            ids,
            *(
                torch.zeros_like(args[place]) if gradient is None else gradient
                for place, gradient in zip(places, found, strict=True)
            ),
        ]


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    backend = sys.argv[3] if len(sys.argv) > 3 else "cpp"
    kinds: dict[str, int] = {}
    for seed in range(first, first + count):
        for gradients in (False, True):
            drawn = program(seed, small=backend == "triton")
            began = time.monotonic()
            print(f"{seed} {gradients}", end=" ", flush=True)
            try:
                kind, told = judged(drawn, jitgen.jit(backend=backend), gradients)
            except Exception as error:
                kind, told = "test", f"{type(error).__name__}: {error}"
            kinds[kind] = kinds.get(kind, 0) + 1
            took = time.monotonic() - began
            failed = f"{told[:600]}\n    {drawn}" if kind not in ("right", UNCLEAR) else ""
            print(kind, f"{took:.1f} s", failed, flush=True)
    print(kinds)


if __name__ == "__main__":
    main()
