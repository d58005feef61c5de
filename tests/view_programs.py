"""Random small programs of views, updates in place and reads, as text; and what eager torch can tell of their results.

A program is written line by line, and each line is run as it is written: one that torch refuses is left out. Numbers
are whole and small, so that results are exact in any order.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Tensor = torch.Tensor


@torch.library.custom_op("view_programs::bump", mutates_args={"a"})
def bump(a: Tensor) -> None:
    a.add_(1)


@torch.library.custom_op("view_programs::swap", mutates_args={"a", "b"})
def swap(a: Tensor, b: Tensor) -> None:
    a.mul_(2)
    b.sub_(1)


@torch.library.custom_op("view_programs::doubled", mutates_args=())
def doubled(a: Tensor) -> Tensor:
    return a * 2


@doubled.register_fake
def _(a: Tensor) -> Tensor:
    return a * 2


doubled.register_autograd(lambda ctx, grad: grad * 2)


def raised(tensors: Sequence[Tensor], number: int = 1) -> list[Tensor]:
    """Adds ``number`` to each of a list of tensors, and returns a list of views of them."""
    for tensor in tensors:
        tensor.add_(number)
    return [tensor[..., :2] for tensor in tensors]


NAMES: dict[str, Any] = {"torch": torch, "F": F, "bump": bump, "swap": swap, "doubled": doubled, "raised": raised}

NEW = (
    "{a} + 1",
    "{a} * 2",
    "-{a}",
    "{a} - {b}",
    "{a}.clone()",
    "{a}.contiguous()",
    "{a}.reshape(-1)",
    "{a}.t().reshape(2, -1)",
    "torch.zeros_like({a})",
    "{a}.new_zeros(3, 4)",
    "torch.cat([{a}, {b}])",
    "{a}.sum(0)",
    "torch.relu({a})",
    "{a}.repeat(2, 1)",
    "doubled({a})",
    "torch.sort({a}, 0)[0]",
    "{a}.t() + {b}",
    "{a}.float()",
    "{a}.double()",
    "torch.where({a} > 0, {a}, {b})",
    "F.dropout({a}, 0.5, False)",
)
VIEWS = (
    "{a}[{i}]",
    "{a}[{i}:]",
    "{a}[:, {i}]",
    "{a}[:, {i}:]",
    "{a}[::2]",
    "{a}[..., None]",
    "{a}[{i}:, :2]",
    "{a}.t()",
    "{a}.T",
    "{a}.transpose(0, 1)",
    "{a}.permute(1, 0)",
    "{a}.view(-1)",
    "{a}.view(-1)[{i}:{i} + 3]",
    "{a}.reshape(-1)",
    "{a}.flatten()",
    "{a}.view(2, -1)",
    "{a}.diagonal()",
    "{a}.diagonal(1)",
    "{a}.as_strided((2, 2), (2, 1), {i})",
    "{a}.as_strided((3,), (2,))",
    "{a}.expand(2, *{a}.shape)",
    "{a}.unsqueeze({i})",
    "{a}.squeeze()",
    "{a}.select(0, {i})",
    "{a}.narrow(0, {i}, 1)",
    "{a}.unbind(0)[{i}]",
    "{a}.chunk(2)[{i}]",
    "{a}.chunk(2, -1)[{i}]",
    "{a}.split(2)[{i}]",
    "{a}.tensor_split(2)[{i}]",
    "{a}.detach()",
    "{a}.unfold(0, 2, 1)",
    "{a}.movedim(0, -1)",
    "{a}.swapaxes(0, 1)",
    "{a}.view_as({a})",
    "torch.broadcast_tensors({a}, {b})[{i}]",
    "{a}.to(torch.float32)",
    "{a}.contiguous()",
    "torch.atleast_2d({a})",
    "{a}.as_strided((2, 3), (1, 1), {i})",
    "{a}.diagonal(-1)[{i}:]",
    "torch.linalg.diagonal({a})",
    "torch.einsum('ij->ji', {a})",
    "torch.einsum('ii->i', {a})",
    "{a}.view(torch.int32)",
    "{a}.view(torch.float32)",
    "{a}.view(torch.int16)",
)
UPDATES = (
    "{a}.add_(1)",
    "{a}.mul_(2)",
    "{a}.copy_({b})",
    "{a}.zero_()",
    "{a}.fill_(3)",
    "{a}.sub_({b})",
    "{a} += 1",
    "{a} += {b}",
    "{a} *= {b}",
    "{a}[{i}] = 3",
    "{a}[{i}:] = {b}",
    "{a}[:, {i}] = 5",
    "{a}[:, {i}] += 1",
    "{a}[{i}].mul_(2)",
    "{a}.view(-1)[{i}:3] = 4",
    "{a}.diagonal().add_(2)",
    "{a}.fill_diagonal_(7.0)",
    "{a}.t().add_({b})",
    "{a}.unbind(0)[{i}].sub_(1)",
    "{a}.masked_fill_({a} > 2, 1)",
    "{a}.index_copy_(0, torch.tensor([{i}]), {b}[:1])",
    "{a}.index_add_(0, torch.tensor([{i}, 0]), {b}[:2])",
    "{a}.clamp_(-9, 9)",
    "{a}.transpose(0, 1)[{i}].copy_({b}[{i}])",
    "{a}.as_strided((2,), (3,)).add_(1)",
    "bump({a})",
    "bump({a}[{i}])",
    "swap({a}, {b})",
    "F.relu({a}, inplace=True)",
    "F.leaky_relu({a}, 0.5, True)",
    "torch.add({a}, 1, out={b})",
    "torch._foreach_add_([{a}, {b}], 1)",
    "torch.ops.aten.mul_.Tensor({a}, 2)",
    "torch.ops.view_programs.bump({a})",
    "{a}.diagonal(1).mul_({b}.diagonal(1))",
    "torch.diagonal({a}, -1).copy_({b}[0, 1:])",
    "{a}[{i}:].fill_diagonal_(2)",
    "{a}.fill_diagonal_(2, wrap=True)",
    "{a}.as_strided((2, 2), (1, 1)).copy_({b}[:2, :2])",
    "{a}.view(torch.int32).bitwise_and_(1 << 30)",
    "torch.mul({a}, {b}, out={b})",
    "torch.sub({b}, {a}, out={a}[{i}:])",
    "torch.sum({a}, 0, out={b}[{i}])",
    "raised([{a}, {b}])",
    "raised({a}.unbind(0), 2)[{i}].mul_(3)",
    "for piece in {a}.chunk(2, -1): piece.mul_(2).sub_(1)",
    "torch._foreach_mul_(list({a}.unbind(0)), 2)",
    "torch._foreach_copy_(list({a}.unbind(0)), list({b}.unbind(0)))",
    "{a}[:, ::2], {a}[:, 1::2] = {a}[:, 1::2].clone(), {b}[:, ::2]",
    "{a}[{i}], {b}[{i}] = {b}[{i}], {a}[{i}]",
    "{a}.unfold(0, 2, 2).add_(1)",
    "{a}.view(2, -1).t()[{i}:].mul_(2)",
    "{a}.t()[{i}].view(2, -1).sub_(1)",
    "{a}.split([1, {a}.shape[0] - 1])[1].copy_({b}[1:])",
    "{a}.narrow(0, {i}, 2).transpose(0, 1).add_({b}.narrow(0, {i}, 2).t())",
    "{a}.expand(1, *{a}.shape)[0].add_(1)",
    "{a}.permute(1, 0).unsqueeze(0)[0, {i}].fill_(2)",
    "{a}.data.add_(1)",
    "{a}[{i}].copy_({a}[1 - {i}])",
    "{a}.index_put_((torch.tensor([{i}, 1]),), {b}[:2], accumulate=True)",
    "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.int64), {b})",
)
AUTOCAST = (
    "with torch.autocast('cpu', torch.bfloat16): {made} = {a} @ {b}",
    "with torch.autocast('cpu', torch.bfloat16): {made} = F.linear({a}, {b}) + {a}[:, :1]",
    "with torch.autocast('cpu', torch.bfloat16): {made} = torch.mm({a}.t(), {b}.float())",
    "with torch.autocast('cpu', torch.bfloat16): {a}.add_({a} @ {b})",
    "with torch.autocast('cpu', torch.bfloat16): {a}.copy_(F.relu({a} @ {b}.t()))",
    "with torch.autocast('cpu', torch.bfloat16), torch.autocast('cpu', enabled=False): {made} = {a} @ {b}",
    "with torch.autocast('cpu', torch.bfloat16): {made} = torch.cat([{a} @ {b}, {a}]).sum(0)",
    "with torch.autocast('cpu', torch.bfloat16): {made} = F.softmax({a} * 0, 0)",
    "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16): {made} = ({a} @ {b}).t()",
)
_STATEMENT = re.compile("=|^for ")
LAYOUTS = ("{a}.t_()", "{a}.unsqueeze_(0)", "{a}.squeeze_()")
INPUTS = (
    "apart",
    "apart",
    "a row of another",
    "one and its transpose",
    "overlapping slices",
    "slices that do not overlap",
    "columns of one buffer",
    "transposed",
)


def inputs_of(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Three arguments, and the buffers that they lie in; equal at every call."""
    numbers = torch.arange(24.0).remainder(7) - 3
    one, other = numbers[:16].clone().reshape(4, 4), numbers[8:24].clone().reshape(4, 4)
    rows = numbers[4:16].clone().reshape(3, 4)
    if kind == "a row of another":
        return [one, one[1:3], other], [one, other]
    if kind == "one and its transpose":
        return [one, one.t(), other], [one, other]
    wide = numbers.clone().reshape(6, 4)
    if kind == "overlapping slices":
        return [wide[:4], wide[1:5], other], [wide, other]
    if kind == "slices that do not overlap":
        return [wide[:3], wide[3:], other], [wide, other]
    if kind == "columns of one buffer":
        return [wide[:, :2], wide[:, 2:], other], [wide, other]
    return [one.t() if kind == "transposed" else one, other, rows], [one, other, rows]


@dataclass(frozen=True)
class ViewProgram:
    """A random program: its text, the function, and the kind of its inputs."""

    text: str
    kind: str
    function: Callable[..., Any]


def view_program(
    seed: int, length: int = 9, breaks: bool = False, layouts: bool = False, grad: bool = False
) -> ViewProgram:
    """The program of ``seed``.

    Args:
        length: lines, at most.
        breaks: whether Dynamo's graph may end within.
        layouts: whether sizes of a tensor may change in place.
        grad: whether every line is run with inputs that require grad.
    """
    draw = random.Random(seed)
    kind = draw.choice(INPUTS)
    scope: dict[str, Any] = dict(zip("xyz", _with_grad(inputs_of(kind)[0], grad), strict=True))
    lines: list[str] = []
    for _ in range(length * 4):
        if len(lines) >= length:
            break
        if breaks and lines and draw.random() < 0.1 and "graph_break" not in lines[-1]:
            lines.append("torch._dynamo.graph_break()")
            continue
        names = list(scope)
        recent = names[-4:] if draw.random() < 0.7 else names
        a, b, i = draw.choice(recent), draw.choice(names), draw.randrange(2)
        group = draw.choice((NEW, VIEWS, VIEWS, UPDATES, UPDATES))
        if layouts and draw.random() < 0.1:
            group = LAYOUTS
        if not grad and draw.random() < 0.1:
            group = AUTOCAST
        text = draw.choice(group).format(a=a, b=b, i=i, made=f"v{len(lines)}")
        if grad and ("as_strided" in text or "view(torch" in text or ".data." in text):
            continue  # beyond its view, where torch.compile refuses it, of bits, or behind the back of a backward
        made = f"v{len(lines)}"
        is_new = group in (NEW, VIEWS) or (group is UPDATES and draw.random() < 0.2 and not _STATEMENT.search(text))
        line = f"{made} = {text}" if is_new else text
        trial = _run([*lines, line], kind, grad)
        if trial is None or any(isinstance(v, Tensor) and v.numel() > 64 for v in trial.values()):
            continue
        lines.append(line)
        scope = {name: value for name, value in trial.items() if isinstance(value, Tensor)}
    names = list(scope)
    chosen = [draw.choice(names) for _ in range(draw.randrange(1, 5))]
    text = _text(lines, f"return {', '.join(chosen)},")
    return ViewProgram(text, kind, _function(text))


def _with_grad(tensors: Sequence[Tensor], grad: bool) -> list[Tensor]:
    return [tensor.requires_grad_() * 1 if grad else tensor for tensor in tensors]


def _text(lines: Sequence[str], last: str) -> str:
    return "\n".join(["def program(x, y, z):", *(f"    {line}" for line in (*lines, last))])


def _function(text: str) -> Callable[..., Any]:
    names = dict(NAMES)
    exec(compile(text, "<view program>", "exec"), names)
    function: Callable[..., Any] = names["program"]
    return function


def _run(lines: Sequence[str], kind: str, grad: bool) -> dict[str, Any] | None:
    """The variables after ``lines``, or None where torch refuses one of them."""
    text = _text([line for line in lines if "graph_break" not in line], "return locals()")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is deprecated, such as out= of another size
            leaves = inputs_of(kind)[0]
            found: dict[str, Any] = _function(text)(*_with_grad(leaves, grad))
        if grad:
            differentiable = [v for v in found.values() if isinstance(v, Tensor) and v.requires_grad]
            torch.autograd.grad(sum(v.sum() for v in differentiable), leaves, allow_unused=True)
    except (RuntimeError, IndexError, ValueError, TypeError, Warning):
        return None
    return found


def layout(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Sizes, strides, dtype and offset of each tensor, and the number of the first that shares its memory."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (tuple(tensor.shape), _strides(tensor), tensor.dtype, storages.index(storage))
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


def _strides(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(stride if size > 1 else None for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def updated_one_after_another(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
    """All of ``tensors`` and ``buffers`` after each tensor in turn was updated in place, as far as torch allows it."""
    seen = []
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            try:
                tensor.add_(number + 1)
            except RuntimeError:  # elements that share memory
                continue
            seen += [each.clone() for each in (*tensors, *buffers)]
    return seen


def layers_of(count: int) -> Callable[[fx.Node], str]:
    """Returns a stand-in for ``cut.layer_of`` by which so many nodes of a graph in a row are a layer."""
    return lambda node: str(list(node.graph.nodes).index(node) // count)
