"""Gradients of random programs (``tests/programs.py``) against those of float64.

The bound is measured as for results: the float64 program runs again with its arguments, the result of every operation,
the gradient of each and those it starts from wrong by random roundings, and ``MARGIN`` times the largest deviation of a
gradient's elements is allowed. An operation that is wrong by a factor passes on gradients that are wrong by the same
factor.
Normalizations and cosines run as their parts (``PARTS``): their gradients are differences of what is rounded within.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tests.programs import RUNS, Program, Verdict, copied, failure, mistake, on_device, reference

NONE = "none"
"""The verdict where eager torch computes no gradients of a program, or where it has no floating argument."""
UNCLEAR = "unclear"
"""The verdict where a gradient is another and may be: eager torch and jitgen round 16-bit values at other places, and
the gradient jumps where two values are equal."""
KINKS = re.compile(r"abs|relu|clamp|max|min|norm|prod|% |fmod|atan2")
"""Operations whose gradients jump, or have a pole."""


def _cosine_similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)

    def normal(x: torch.Tensor) -> torch.Tensor:
        norm = x.double().norm(dim=dim, keepdim=True)
        return x / (norm + (norm.clamp(min=eps) - norm).detach())  # torch clamps it where no gradient sees it

    return (normal(x1) * normal(x2)).sum(dim)


def _layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: None = None, bias: None = None, eps: float = 1e-5
) -> torch.Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    return _rms_norm(input - input.mean(dims, keepdim=True), normalized_shape, eps=eps)


def _group_norm(
    input: torch.Tensor, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5
) -> torch.Tensor:
    groups = input.reshape(input.shape[0], num_groups, input[:1].numel() // num_groups)
    return _layer_norm(groups, groups.shape[-1:], eps=eps).reshape(input.shape)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: None = None, eps: float = 1e-3
) -> torch.Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    return input * (input.square().mean(dims, keepdim=True) + eps).rsqrt()


PARTS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    F.cosine_similarity: _cosine_similarity,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.rms_norm: _rms_norm,
}
"""Operations, as programs call them, in terms of their parts. A gradient of one may be 0 as a difference of equal
terms, as that of a row of one element is; rounded, the terms differ."""


_ROUNDS_NOTHING = re.compile(r"[^_]_$|^(histc|float)$")
"""Names of functions in place, and of those that count integers or convert them."""


class _Rounded(TorchFunctionMode):
    """Every floating result of an operation that is not in place is wrong by up to ``size`` of itself."""

    def __init__(self, size: float, generator: torch.Generator):
        super().__init__()
        self.size, self.generator = size, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PARTS:
            with self:
                return PARTS[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or _ROUNDS_NOTHING.search(name):
            return result
        with torch._C.DisableTorchFunction():
            # A view stays one: what is updated through it later is the program's.
            return result if result._is_view() else self._rounded_both_ways(result)

    def _rounded_both_ways(self, result: torch.Tensor) -> torch.Tensor:
        """``result`` with noise, and its gradient with other noise: that of a normalization hides the first, since it
        is the same for all multiples of a row, and in float32 the terms that cancel are rounded."""
        rounded, noise = result * self.noise(result), self.noise(result)

        def round_gradient(gradient: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return gradient * noise

        if rounded.requires_grad:
            rounded.register_hook(round_gradient)
        return rounded

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(like.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        return (1 + self.size * drawn).to(like.device)


def gradient_verdict(program: Program, function: Callable[..., Any]) -> Verdict:
    """Of the gradients of ``function``, the program decorated."""
    try:
        whole, _ = reference(program)
        exact_function = whole.exact_function()
        eager = on_device(_gradients(whole, whole.function()), program)
        exact = on_device(_exact_gradients(whole, exact_function), program)
    except RuntimeError:
        return NONE, "eager torch has no gradients"
    if all(gradient is None for gradient in eager):
        return NONE, "no argument has a gradient"
    try:
        found = _gradients(program, function)
    except Exception as error:
        return failure(program, error)
    size = max(torch.finfo(dtype).eps for dtype in program.dtypes | {torch.float64} if dtype.is_floating_point)
    generator = torch.Generator().manual_seed(0)
    perturbed = [
        on_device(_exact_gradients(whole, exact_function, _Rounded(size, generator)), program) for _ in range(RUNS)
    ]
    for number, (got, want) in enumerate(zip(found, eager, strict=True)):
        where = f"gradient {number}"
        if (got is None) != (want is None):
            # No gradient and a gradient of zeros are one; NaN is 0 times an infinite derivative.
            only = got if want is None else want
            if only is not None and bool((only.nan_to_num(0.0) != 0).any()):
                return "wrong", f"{where} is {'there' if want is None else 'None'}, eager torch's is not"
            continue
        if got is None or want is None:
            continue
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return "wrong", f"{where} is {got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
        # Elements of a gradient that cancel lose as much as those that do not: the largest deviation is all elements'.
        deviations = [(run[number] - exact[number]).abs() for run in perturbed]
        widened = [exact[number] + each.amax() if each.numel() else exact[number] for each in deviations]
        told = mistake(got, want, exact[number], widened, size)
        if told is not None:
            jumps = size >= torch.finfo(torch.bfloat16).eps / 16 and KINKS.search(program.text)
            return UNCLEAR if jumps else "wrong", f"{where}: {told}"
    return "right", ""


def _gradients(program: Program, function: Callable[..., Any]) -> list[torch.Tensor | None]:
    leaves = [copied(a, a.dtype).requires_grad_(a.is_floating_point()) for a in program.arguments]
    return _differentiated(function, leaves, _updates(program), None)


def _exact_gradients(
    program: Program, exact_function: Callable[..., Any], rounded: _Rounded | None = None
) -> list[Any]:
    leaves = [copied(a, torch.float64 if a.is_floating_point() else a.dtype) for a in program.arguments]
    for leaf in leaves:
        if leaf.is_floating_point():
            if rounded is not None and all(leaf.stride()):
                leaf.mul_(rounded.noise(leaf))
            leaf.requires_grad_()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # to which integers are promoted
    try:
        if rounded is None:
            return _differentiated(exact_function, leaves, _updates(program), None)
        with rounded:
            return _differentiated(exact_function, leaves, _updates(program), rounded)
    finally:
        torch.set_default_dtype(before)


def _updates(program: Program) -> bool:
    """Whether something is updated in place."""
    return re.search(r"\w_\(", program.text) is not None


def _differentiated(
    function: Callable[..., Any], leaves: list[torch.Tensor], updates: bool, rounded: _Rounded | None
) -> list[torch.Tensor | None]:
    """The gradients with respect to the floating leaves of all floating results, from the same random ones."""
    # Torch updates no leaf in place; a copy has the strides of dense memory alone, but its gradient is the leaf's.
    arguments = [leaf.clone() if updates and leaf.requires_grad else leaf for leaf in leaves]
    tensors = [t for t in pytree.tree_leaves(function(*arguments)) if isinstance(t, torch.Tensor)]
    results = {number: tensor for number, tensor in enumerate(tensors) if tensor.requires_grad}
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not results or not floating:
        return [None] * len(floating)
    starts = []
    for number, result in results.items():
        with torch._C.DisableTorchFunction():
            generator = torch.Generator().manual_seed(number)
            # In the coarsest dtype, so that all start from the same numbers.
            start = (torch.rand(result.shape, generator=generator, dtype=torch.float32) * 2 - 1).bfloat16()
            start = start.to(result.device, result.dtype)
            starts.append(start if rounded is None else start * rounded.noise(start))
    return list(torch.autograd.grad(list(results.values()), floating, starts, allow_unused=True))
