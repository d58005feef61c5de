"""Random programs: a few statements of torch over a few tensors, as a source text, and what they must give.

A program is built one statement at a time. Each is run in eager torch at once, on operands that are drawn from all the
values so far; one that torch rejects is dropped, so that every program is one that eager torch runs. Operations that
jump (comparisons, ``argmax``, rounding) take *exact* operands alone: arguments, and what is made of them without a
rounding. Then no rounding decides a result.

The reference runs in float64. How far a result may be off is measured and not guessed: the reference is run again with
every operand and every result of an operation wrong by a random rounding of the program's coarsest dtype (stochastic
arithmetic; Vignes, "A stochastic arithmetic for reliable scientific computation", 1993), and ``MARGIN`` times the
largest deviation is allowed. So the bound grows with the operations, and where they cancel.

A program with one result may have an ``out=``: any strides, in new memory or in that of an argument, over it or beside.
"""

from __future__ import annotations

import itertools
import linecache
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from jitgen.errors import InternalError, TraceError, UnsupportedError

Choose = Callable[[Sequence[Any]], Any]
"""Draws one of a sequence."""

MARGIN, RUNS = 16, 6
"""Deviations that a result may be off by, and the perturbed runs in which they are measured."""
MOST_ELEMENTS = 4096
FLOATS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"i64": torch.int64, "i32": torch.int32, "u8": torch.uint8}
DTYPES = FLOATS | INTEGERS | {"b": torch.bool}
SIZES = (1, 2, 3, 5, 8)

# What a statement's text may refer to: {a}, {b}, {c} are earlier values, {d} a dimension of {a}.
POINTWISE = (
    *("torch.sin({a})", "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.silu({a})", "torch.exp({a}) * 0.5"),
    *("torch.log1p({a}.abs())", "torch.sqrt({a}.abs() + 0.5)", "{a} / (1 + {b}.abs())", "{a} * 0.75 - {b}", "1 - {a}"),
    *("{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.lerp({a}, {b}, 0.25)", "torch.addcmul({a}, {b}, {c})"),
    # torch squares atan2's operands in their own dtype for gradients, so that small integers overflow: not jitgen's
    *("torch.square({a})", "torch.atan2({a} * 1.0, {b}.abs() + 1)", "F.softplus({a})", "torch.rsqrt({a} * {a} + 1)"),
)
EXACT = (  # rounds nothing: exact where the operands are
    *("-{a}", "{a}.abs()", "F.relu({a})", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "{a}.clamp(-0.5, 0.5)"),
    *("torch.zeros_like({a})", "torch.full_like({a}, 2)", "{a}.masked_fill(torch.ones_like({a}, dtype=b), 1)"),
    *(
        "{a}.T",
        "{a}.mT",
        "{a}.transpose(0, -1)",
        "{a}.unsqueeze({d})",
        "{a}.squeeze()",
        "{a}[:1]",
        "{a}[1:]",
        "{a}[::2]",
    ),
    *("{a}[..., 1:]", "{a}[..., ::2]", "{a}[None]", "{a}[..., None]", "{a}.flip({d})", "{a}.reshape(-1)", "{a}[0]"),
    *("{a}.reshape(-1, {a}.shape[-1])", "{a}.flatten(0, 1)", "{a}.movedim(0, -1)", "{a}.contiguous()", "{a}.clone()"),
    *(
        "{a}.expand_as({b})",
        "{a}.expand(3, *{a}.shape)",
        "{a}.roll(1)",
        "{a}.roll(1, {d})",
        "{a}.repeat(2, *[1] * {a}.ndim)",
    ),
    *("torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "{a}.chunk(2, {d})[0]", "{a}.split(2, {d})[-1]"),
    *("{a}.tril()", "{a}.triu(1)", "{a}.diag()", "F.pad({a}, (1, 1))", "{a}.narrow({d}, 0, 1)", "{a}.select({d}, 0)"),
    *("{a}.amax({d})", "{a}.amin({d}, keepdim=True)", "{a}.amax()", "{a}.cummax({d}).values", "{a}.double()"),
    *(
        "{a}.max({d}).values",
        "{a}.min()",
        "torch.where({a} > 0, {a}, {b})",
        "{a} * torch.arange({a}.shape[-1], device={a}.device)",
    ),
    *(
        "{a} + torch.arange({a}.shape[0], device={a}.device)[:, None]",
        "{a}.to(f32)",
        "{a}.to(f64)",
        "{a}.unflatten(-1, (-1, 2))",
    ),
)
JUMPS = (
    *("{a} > {b}", "{a} <= 0.25", "{a} == {b}", "{a}.argmax({d})", "{a}.argmin()", "{a}.floor()", "{a}.round()"),
    *("{a}.long()", "{a}.sign()", "({a} > 0).any({d})", "({a} > -0.5).all()", "({a} != 0).sum({d})", "{a}.to(b)"),
    *("torch.where({a} > {b}, {a}, {b})", "{a}.cummax({d}).indices", "{a} // 1", "{a} % 0.75", "{a}.logical_not()"),
)
ROUNDING = (
    *("{a}.sum()", "{a}.sum({d})", "{a}.sum({d}, keepdim=True)", "{a}.mean()", "{a}.mean({d})", "{a}.mean((0, 1))"),
    *(
        "{a}.sum((0, -1), keepdim=True)",
        "{a}.var({d})",
        "{a}.std()",
        "{a}.norm()",
        "{a}.logsumexp({d})",
        "{a}.prod({d})",
    ),
    *(
        "torch.softmax({a}, {d})",
        "torch.log_softmax({a}, {d})",
        "F.layer_norm({a}, {a}.shape[-1:])",
        "{a} - {a}.mean()",
    ),
    *(
        "F.layer_norm({a}, {a}.shape[1:])",
        "F.rms_norm({a}, {a}.shape[-1:], eps=1e-3)",  # without it, the dtype's, and the reference has another
        "F.group_norm({a}, 1)",
        "{a} / ({a}.norm() + 1)",
    ),
    *("{a} - {a}.mean((0, 1), keepdim=True)", "F.mse_loss({a}, {b})", "F.cosine_similarity({a}, {b}, {d})"),
    *("{a}.cumsum({d})", "{a}.cumprod({d})", "{a}.logcumsumexp({d})", "{a}.flip({d}).cumsum({d})"),
    *("{a} @ {b}", "{a} @ {b}.mT", "F.linear({a}, {b})", "F.linear({a}, {a})", "{a}.mT @ {a}", "({a} @ {b}) * {c}"),
    *("torch.einsum('...i,...i->...', {a}, {b})", "torch.softmax({a} @ {b}, -1)", "torch.addmm({a}, {b}, {c})"),
    *(
        "({a} @ {b}).sum({d})",
        "{a} @ {b} + {c} @ {b}",
        "F.relu(F.linear({a}, {b})) @ {b}",
        "{a}.to(bf16)",
        "{a}.to(f16)",
    ),
)
INTEGRAL = (  # of integers and bools alone
    *(
        "{a} & {b}",
        "{a} | {b}",
        "{a} ^ {b}",
        "~{a}",
        "{a} // 3",
        "{a} % 3",
        "{a} << 1",
        "{a} * 2 - {b}",
        "{a}.sum({d})",
    ),
    *("{a}.cumsum({d})", "{a}.prod()", "{a} @ {b}", "{a}.to(i32)", "{a}.to(u8)", "{a}.float()", "{a}.amax({d})"),
)
GATHERS = (  # {i} are integers, which become indices within bounds
    *("{a}[{i} % {a}.shape[0]]", "{a}.gather({d}, {i} % {a}.shape[{d}])", "F.embedding({i} % {a}.shape[0], {a})"),
    *("{a}.index_select({d}, ({i} % {a}.shape[{d}]).reshape(-1))", "{a}[:, {i} % {a}.shape[1]]"),
    *("torch.take_along_dim({a}, {i} % {a}.shape[{d}], {d})", "F.one_hot({i} % 5, 5)", "{a}[..., {i} % 2]"),
    *("{a}.scatter({d}, {i} % {a}.shape[{d}], 1.5)", "{a}.index_fill({d}, ({i} % {a}.shape[{d}]).reshape(-1), 0.5)"),
)
IN_PLACE = (
    *(
        "{a}.add_({b})",
        "{a}.mul_({b})",
        "{a}.clamp_(-0.5, 0.5)",
        "{a}.zero_()",
        "{a}.copy_({b})",
        "{a}.fill_({b}.amax())",
    ),
    *(
        "{a}.sub_({a}.mean())",
        "{a}.neg_()",
        "{a}.div_({b}.abs() + 1)",
        "{a}.sigmoid_()",
        "{a}.masked_fill_({a} > 0, 1)",
    ),
)


@dataclass
class Value:
    """A name of the program.

    Attributes:
        exact: whether no rounding has gone into it.
    """

    name: str
    tensor: torch.Tensor
    exact: bool


@dataclass(frozen=True)
class Out:
    """The ``out=`` of a call: a tensor in the memory of argument ``owner``, or in new memory where that is None."""

    owner: int | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def among(self, arguments: list[torch.Tensor]) -> torch.Tensor:
        if self.owner is None:
            needed, device = self.offset + reach(self.sizes, self.strides), arguments[0].device
            whole = torch.empty(needed, dtype=self.dtype, device=device)
            whole.fill_(1 if self.dtype == torch.bool else 77)
            return whole.as_strided(self.sizes, self.strides, self.offset)
        return arguments[self.owner].as_strided(self.sizes, self.strides, self.offset)


@dataclass
class Program:
    """A program and its arguments.

    Attributes:
        text: its source, a function ``program(x0, x1, ...)``.
        arguments: the tensors it is called with; ``run`` leaves them as they are.
        dtypes: of all its values.
        out: what a second kind of call writes into.
    """

    text: str
    arguments: list[torch.Tensor]
    dtypes: set[torch.dtype] = field(default_factory=set)
    out: Out | None = None

    @property
    def path(self) -> str:
        return f"<program {zlib.crc32(self.text.encode()):08x}>"

    def on(self, device: str) -> Program:
        """The program with its arguments on ``device``."""
        return replace(self, arguments=[copied(argument, argument.dtype, device) for argument in self.arguments])

    def function(self) -> Callable[..., Any]:
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
        return self._compiled(self.text, {})

    def exact_function(self) -> Callable[..., Any]:
        """The program where every floating dtype is float64. A conversion that makes a copy still makes one, so that
        the same tensors share memory."""
        conversions = _Conversions()
        with conversions:
            self.run(self.function())
        copies = iter(conversions.copies)
        text = CONVERSION.sub(lambda call: call[0] + (".clone()" if next(copies) else ""), self.text)
        text = text.replace(".float()", ".double()")
        return self._compiled(text, dict.fromkeys(FLOATS, torch.float64))

    def _compiled(self, text: str, names: dict[str, Any]) -> Callable[..., Any]:
        names = {"torch": torch, "F": F} | DTYPES | names
        exec(compile(text, self.path, "exec"), names)
        function: Callable[..., Any] = names["program"]
        return function

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """What ``function`` gives, and then the arguments as it leaves them."""
        arguments = [copied(argument, argument.dtype) for argument in self.arguments]
        return [*pytree.tree_leaves(function(*arguments)), *arguments]

    def run_exactly(self, exact_function: Callable[..., Any]) -> list[Any]:
        """The same in float64, where ``exact_function`` is the program's."""
        arguments = [copied(a, torch.float64 if a.is_floating_point() else a.dtype) for a in self.arguments]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # to which integers are promoted
        try:
            return [*pytree.tree_leaves(exact_function(*arguments)), *arguments]
        finally:
            torch.set_default_dtype(before)

    def without(self, number: int) -> Program | None:
        """The program without its statement ``number``; None where others need that, or nothing would be returned."""
        first, *statements, last = self.text.splitlines()
        name = statements.pop(number).split()[0]
        returned = [each for each in last.removeprefix("    return ").split(", ") if each != name]
        if not returned or re.search(rf"\b{name}\b", "\n".join(statements)):
            return None
        text = "\n".join([first, *statements, f"    return {', '.join(returned)}", ""])
        return replace(self, text=text, out=None)

    def __repr__(self) -> str:
        described = [f"{a.dtype} {tuple(a.shape)} strides {a.stride()}" for a in self.arguments]
        return "\n".join([*described, *([str(self.out)] if self.out else []), self.text])


def reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first one of a tensor to the last one, both included."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def copied(tensor: torch.Tensor, dtype: torch.dtype, device: str | torch.device | None = None) -> torch.Tensor:
    """A copy in memory of its own, with the strides of ``tensor``, on its device or on ``device``."""
    device = device or tensor.device
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    whole = torch.zeros(reach(tensor.shape, tensor.stride()), dtype=dtype, device=device)
    copy = whole.as_strided(tensor.shape, tensor.stride())
    distinct = tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())
    copy[distinct].copy_(tensor[distinct])
    return copy


# ------------------------------------------------------------------------------------------------------- drawing one


def draw(choose: Choose) -> Program:
    """A program of at most eight statements."""
    generator = torch.Generator().manual_seed(choose(range(2**16)))
    mixed = choose((False, False, True))
    dtype = choose((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16))
    arguments = []
    for _ in range(choose((1, 2, 2, 3))):
        kind = choose((*[dtype] * 4, torch.int64, torch.bool)) if not mixed else choose(tuple(DTYPES.values()))
        arguments.append(_argument(choose, kind, generator))
    values = [Value(f"x{index}", copied(tensor, tensor.dtype), True) for index, tensor in enumerate(arguments)]
    names = ", ".join(value.name for value in values)
    lines: list[str] = []
    for _ in range(choose(range(1, 9))):
        statement = _statement(choose, values)
        if statement is not None:
            lines.append(statement)
    made = values[len(arguments) :] or values
    results = [choose(made) for _ in range(choose((1, 1, 2, 3)))]
    returned = ", ".join(dict.fromkeys([values[-1].name, *(value.name for value in results)]))
    text = "\n".join([f"def program({names}):", *(f"    {line}" for line in lines), f"    return {returned}", ""])
    dtypes = {value.tensor.dtype for value in values} | {a.dtype for a in arguments}
    dtypes |= {DTYPES[name] for name in re.findall(r"\b(?:f16|bf16)\b", text)}
    single = "," not in returned and not re.search(r"\w_\(", text)  # none is updated in place
    out = _out(choose, values[-1].tensor, arguments) if single and choose((True, True, False)) else None
    return Program(text, arguments, dtypes, out)


def _out(choose: Choose, result: torch.Tensor, arguments: list[torch.Tensor]) -> Out:
    """Memory for a result like ``result``: no two of its elements are one."""
    strides = [0] * result.ndim
    stride = choose((1, 1, 1, 2))
    for dim in choose(list(itertools.permutations(range(result.ndim)))):
        strides[dim] = stride
        stride *= max(result.shape[dim], 1)
    needed = reach(result.shape, strides)
    sizes = [reach(argument.shape, argument.stride()) for argument in arguments]
    owners = [i for i, a in enumerate(arguments) if a.dtype == result.dtype and sizes[i] >= needed]
    owner = choose((*owners, *owners, None))
    offset = choose(range(4)) if owner is None else choose(range(sizes[owner] - needed + 1))
    return Out(owner, tuple(result.shape), tuple(strides), offset, result.dtype)


def _argument(choose: Choose, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A tensor of up to three dimensions that lies in memory in any way."""
    rank = choose((0, 1, 2, 2, 2, 3, 3))
    sizes = [choose(SIZES) for _ in range(rank)]
    if choose(range(40)) == 0 and rank:
        sizes[choose(range(rank))] = 0
    steps = [choose((1, 1, 1, 2)) for _ in sizes]
    order = choose(list(itertools.permutations(range(rank))))
    whole = [sizes[dim] * steps[dim] for dim in order]
    base = (torch.rand(whole, generator=generator) * 2 - 1).mul(8 if not dtype.is_floating_point else 1)
    base = base.abs() if dtype == torch.uint8 else base
    base = (base > 0) if dtype == torch.bool else base.to(dtype)
    tensor = base.permute([order.index(dim) for dim in range(rank)])
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    if rank and choose(range(6)) == 0:
        dim = choose(range(rank))
        tensor = tensor.narrow(dim, 0, min(1, sizes[dim])).expand(sizes)
    return tensor


def _statement(choose: Choose, values: list[Value]) -> str | None:
    """A statement that eager torch runs, whose result has become the last of ``values``; None where none was found."""
    for _ in range(8):
        kind = choose(
            (
                *("pointwise", "pointwise", "exact", "exact", "exact", "rounding", "rounding"),
                *("jumps", "integral", "place", "gathers"),
            )
        )
        texts = {"pointwise": POINTWISE, "exact": EXACT, "rounding": ROUNDING, "jumps": JUMPS}
        text = choose((texts | {"integral": INTEGRAL, "place": IN_PLACE, "gathers": GATHERS})[kind])
        indices = [value for value in values if value.tensor.dtype in INTEGERS.values()]
        if "{i}" in text and not indices:
            continue
        operands = {name: choose(indices if name == "i" else values) for name in "abci" if f"{{{name}}}" in text}
        used = list(operands.values())
        exact = all(value.exact for value in used)
        floating = any(value.tensor.is_floating_point() for value in used)
        if (kind == "jumps" and not exact) or (kind == "integral" and floating):
            continue
        if not exact and ("where" in text or "> 0" in text):
            continue
        rank = operands.get("a", used[0]).tensor.ndim
        names = {name: value.name for name, value in operands.items()}
        if "i" in names:
            names["i"] += ".long()"
        call = text.format(**names, d=choose(range(max(rank, 1))))
        try:
            result = eval(call, {"torch": torch, "F": F} | DTYPES, {value.name: value.tensor for value in values})
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            continue
        if (
            not isinstance(result, torch.Tensor)
            or result.dtype not in DTYPES.values()
            or result.numel() > MOST_ELEMENTS
        ):
            continue
        rounds = kind in ("pointwise", "rounding") or (kind == "place" and floating)
        exact_result = exact and not (rounds and result.is_floating_point()) and kind != "place"
        if kind == "exact" and floating and "arange" in text:
            exact_result = False
        if kind == "place":
            for value in values:  # and whatever shares its memory
                value.exact = value.exact and not _shares(value.tensor, operands["a"].tensor)
        values.append(Value(f"v{len(values)}", result, exact_result))
        return f"{values[-1].name} = {call}"
    return None


def _shares(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


# ----------------------------------------------------------------------------------------------------- what it gives


_ROUND_NOTHING = frozenset(re.findall(r"[.](\w+)\(", " ".join((*EXACT, *GATHERS)))) - {"arange"} | {
    "neg",
    "histc",  # of integers
    "float",  # likewise
    "__getitem__",
}


_VARIANCES = ("var", "std")


class _Perturbed(TorchFunctionMode):
    """Every floating result of an operation that rounds is off by up to ``size`` of itself; a variance by that of the
    mean, too, which of equal elements is the whole of it."""

    def __init__(self, size: float, generator: torch.Generator):
        super().__init__()
        self.size, self.generator = size, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _ROUND_NOTHING:
            return result
        with torch._C.DisableTorchFunction():
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and all(tensor.stride()):
                    noise = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
                    tensor.mul_(1 + self.size * noise.to(tensor.device))
                    if getattr(func, "__name__", "") in _VARIANCES and args[0].numel():
                        mean = float(args[0].double().abs().amax()) * self.size
                        tensor.add_(mean**2 if func.__name__ == "var" else mean)
        return result


CONVERSION = re.compile(r"[.](?:to[(]\w+[)]|(?:double|float)[(][)])")


class _Conversions(TorchFunctionMode):
    """Which of the conversions of a program (``CONVERSION``), in their order, make a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.to, torch.Tensor.double, torch.Tensor.float):
            self.copies.append(result is not args[0])
        return result


def reference(program: Program) -> tuple[Program, list[Any]]:
    """``program`` and what eager torch gives: on the CPU where eager torch lacks an operation of it on the device, as
    CUDA's lacks products of integers."""
    try:
        return program, program.run(program.function())
    except NotImplementedError:
        there = program.on("cpu")
        return there, there.run(there.function())


def on_device(values: list[Any], program: Program) -> list[Any]:
    """``values``, with the tensors among them on the device of ``program``."""
    device = program.arguments[0].device
    return [each.to(device) if isinstance(each, torch.Tensor) else each for each in values]


Verdict = tuple[str, str]
"""("right" | "refused" | "wrong" | "crash", what was found)."""


def verdict(program: Program, function: Callable[..., Any]) -> Verdict:
    """Of ``function``, the program decorated."""
    whole, eager = reference(program)
    eager = on_device(eager, program)
    try:
        found = program.run(function)
        again = program.run(function)
    except Exception as error:
        return failure(program, error)
    exact_function = whole.exact_function()
    exact = on_device(whole.run_exactly(exact_function), program)
    size = max(torch.finfo(dtype).eps for dtype in program.dtypes | {torch.float64} if dtype.is_floating_point)
    generator = torch.Generator().manual_seed(0)
    perturbed = []
    for _ in range(RUNS):
        with _Perturbed(size, generator):
            run = whole.run_exactly(exact_function)
        perturbed.append(on_device(run, program))

    def found_in(number: int, got: torch.Tensor) -> str | None:
        return mistake(got, eager[number], exact[number], [run[number] for run in perturbed], size)

    for number, (got, same, want) in enumerate(zip(found, again, eager, strict=True)):
        where = f"result {number}"
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return "wrong", f"{where} is {got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
        if not torch.equal(torch.nan_to_num(got.double()), torch.nan_to_num(same.double())):
            return "wrong", f"{where} differs from call to call"
        if (found_mistake := found_in(number, got)) is not None:
            return "wrong", f"{where}: {found_mistake}"
    return (
        _verdict_with_out(program, function, lambda got: found_in(0, got)) if program.out is not None else ("right", "")
    )


def _verdict_with_out(
    program: Program, function: Callable[..., Any], found_in: Callable[[torch.Tensor], str | None]
) -> Verdict:
    """The same of calls with ``out=``: the result is there, and the memory around it as it was."""
    assert program.out is not None
    for _ in range(2):  # the second call is warm
        arguments = [copied(argument, argument.dtype) for argument in program.arguments]
        out = program.out.among(arguments)
        wholes = [_whole(tensor) for tensor in (*arguments, out)]
        before = [whole.clone() for whole in wholes]
        try:
            if function(*arguments, out=out) is not out:
                return "wrong", "a call with out= returns another tensor"
        except Exception as error:
            return failure(program, error)
        if (found_mistake := found_in(out)) is not None:
            return "wrong", f"out=: {found_mistake}"
        for whole, old in zip(wholes, before, strict=True):
            if whole.data_ptr() == _whole(out).data_ptr():
                old.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(out)
            if not torch.equal(torch.nan_to_num(whole.double()), torch.nan_to_num(old.double())):
                return "wrong", "a call with out= writes to other memory"
    return "right", ""


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of the tensor's storage."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def failure(program: Program, error: Exception) -> Verdict:
    """Whether an error refuses the program by name and line, or is another."""
    if not isinstance(error, (TraceError, UnsupportedError)) or isinstance(error, InternalError):
        return "crash", f"{type(error).__name__}: {error}"
    located = program.path in str(error) or "argument" in str(error) or "out=" in str(error)
    return ("refused" if located else "crash"), str(error)


def mistake(
    got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, perturbed: list[torch.Tensor], size: float
) -> str | None:
    """What is wrong with a result: it may be off by ``MARGIN`` times what perturbed runs are, or be eager torch's."""
    if not got.is_floating_point():
        return None if torch.equal(got, eager) else f"{got} for {eager}"
    exact, actual = exact.double(), got.double()
    deviation = torch.stack([(run.double() - exact).abs() for run in perturbed]).amax(0) if perturbed else 0
    limits = torch.finfo(got.dtype)
    allowed = MARGIN * deviation + MARGIN * size * exact.abs() + limits.tiny
    fine = ((actual - exact).abs() <= allowed) | (actual == exact.to(got.dtype).double()) | (actual == eager.double())
    fine |= (actual.isnan() & (exact.isnan() | eager.isnan())) | ~torch.isfinite(allowed)
    fine |= actual.isinf() & (exact.abs() * (1 + MARGIN * size) >= limits.max)
    if fine.all():
        return None
    place = tuple((~fine).nonzero()[0].tolist())
    return f"{int((~fine).sum())} of {fine.numel()} off, at {place} {actual[place]:.9g} for {exact[place]:.9g}"
