"""Says what torch may do with a quantised weight: functions that read metadata, that copy and move, and matrix
products.

``FUNCTIONS`` maps a torch function to its handler ``(func, args, kwargs)``; torch runs those in ``METADATA`` unchanged.
A function in neither is refused by name. ``QTensor.__torch_function__`` reads both tables.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from jitgen.errors import UnsupportedError
from jitgen.quant import eager, fakes
from jitgen.quant.formats import find
from jitgen.quant.remedies import remedy
from jitgen.quant.weights import is_quantized

if TYPE_CHECKING:
    from jitgen.quant.qtensor import QTensor

_GETTERS = (
    *("shape", "dtype", "device", "ndim", "itemsize", "names", "requires_grad", "is_leaf", "grad", "grad_fn"),
    *("retains_grad", "output_nr", "_version", "_base", "_backward_hooks", "is_meta", "is_cuda", "is_cpu", "is_xpu"),
    *("is_mps", "is_xla", "is_vulkan", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("is_signed", "is_contiguous", "get_device", "is_inference", "is_pinned", "is_same_size", "has_names"),
    *("_is_view", "_is_zerotensor", "_use_count", "__dir__", "is_conj", "is_neg", "storage_offset"),
    "untyped_storage",  # empty; torch.compile reads it to see whether two tensors share memory
)
METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch._is_zerotensor]
    + [torch._has_compatible_shallow_copy_type]
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
FUNCTIONS: dict[Any, Handler] = {}


def refuse(func: Any, args: Any, kwargs: Any = None) -> NoReturn:
    """Raises UnsupportedError with the function, the first weight among its arguments, and what to do instead."""
    name = resolve_name(func) or getattr(func, "__name__", None) or str(func)
    weight = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_quantized(leaf)), None)
    if weight is None:
        raise UnsupportedError(f"{name} of a quantised weight is not supported; use w.dequantize()")
    raise UnsupportedError(f"{name} of a quantised weight, {weight!r}, is not supported; {remedy(name, weight.token)}")


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Enters a handler into the table."""

    def enter(handler: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return enter


T = torch.Tensor

# ------------------------------------------------------------------------------------------- aliases, copies, moves


handles(T.detach, T.data.__get__, T.contiguous, torch.detach)(  # type: ignore[attr-defined]
    lambda func, args, kwargs: args[0]._alias()
)
handles(T.clone, torch.clone)(lambda func, args, kwargs: args[0]._map(torch.clone))
handles(T.pin_memory)(lambda func, args, kwargs: args[0]._map(torch.Tensor.pin_memory))
handles(torch.empty_like)(
    lambda func, args, kwargs: args[0]._map(lambda tensor: torch.empty_like(tensor, device=kwargs.get("device")))
)


@handles(T.requires_grad_, T.requires_grad.__set__)  # type: ignore[attr-defined]
def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[1] if len(args) > 1 else kwargs.get("requires_grad", True):
        raise UnsupportedError(
            "a quantised weight takes no gradients; use requires_grad=False, as in Parameter(w, requires_grad=False), "
            "or model.requires_grad_(False) before loading into it"
        )
    return args[0]


@handles(T.grad.__set__)  # type: ignore[union-attr]
def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[1] is not None:
        refuse(func, args)


@handles(T.share_memory_, T.is_shared)
def _shared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [func(tensor) for tensor in args[0].tensors]
    return all(tensors) if func is T.is_shared else args[0]


@handles(T.to)
def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    copy = kwargs.pop("copy", False)
    tensor, *rest = args
    if len(rest) > 1 and type(rest[-1]) is bool and type(rest[-2]) is bool:
        *rest, copy = rest
    if rest and isinstance(rest[0], torch.Tensor):
        rest = [rest[0].device, rest[0].dtype, *rest[1:]]
    elif isinstance(kwargs.get("other"), torch.Tensor):
        other = kwargs.pop("other")
        rest = [other.device, other.dtype, *rest]
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **kwargs)
    return _moved(tensor, device, dtype, non_blocking, copy)


@handles(T.cuda, T.cpu)
def _to_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    if func is T.cpu:
        return _moved(args[0], torch.device("cpu"), None, False, False)
    device = args[1] if len(args) > 1 else kwargs.get("device")
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    if isinstance(device, int):
        device = torch.device("cuda", device)
    return _moved(args[0], torch.device(device), None, kwargs.get("non_blocking", False), False)


_CASTS = {T.half: torch.float16, T.bfloat16: torch.bfloat16, T.float: torch.float32, T.double: torch.float64}


@handles(*_CASTS)
def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    return _moved(args[0], None, _CASTS[func], False, False)


def _moved(
    tensor: QTensor, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool, copy: bool
) -> QTensor:
    dtype = tensor.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise UnsupportedError(f"{tensor!r} cannot be of {dtype}: its dtype is what .dequantize() gives by default")
    device = tensor.device if device is None else device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device == tensor.device and not copy:
        return tensor if dtype == tensor.dtype else tensor._alias(dtype=dtype)
    if device.type != tensor.device.type:  # kernels there read another layout
        tensor = tensor._portable()
    return tensor._map(lambda tensor: tensor.to(device, non_blocking=non_blocking, copy=copy), dtype=dtype)


@handles(T.copy_)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    if not (is_quantized(target) and is_quantized(source)):
        raise UnsupportedError(
            f"copying {_described(source)} into {_described(target)}: quantise the one with jitgen.quantize, or call "
            ".dequantize() on the other"
        )
    ours, theirs = target.token, source.token
    if (ours.format, ours.group_size, ours.weight_shape, ours.transposed, ours.experts) != (
        *(theirs.format, theirs.group_size, theirs.weight_shape, theirs.transposed, theirs.experts),
    ):
        raise UnsupportedError(
            f"copying {source!r} into {target!r}: they must have the same format, group size and shape"
        )
    with torch.no_grad():
        plain = tuple(tensor.to(target.device) for tensor in source._tensors_in("portable", keep=False))
        target.overwrite(plain)
    return target


def _described(value: Any) -> str:
    return repr(value) if is_quantized(value) else f"a plain tensor of {getattr(value, 'dtype', type(value))}"


# ------------------------------------------------------------------------------------------------------ transposing


@handles(T.t, torch.t, T.T.__get__, T.mT.__get__)  # type: ignore[attr-defined]
def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    if args[0].token.experts is not None and func != T.mT.__get__:  # type: ignore[attr-defined]
        refuse(func, args)
    return args[0]._alias(transposed=not args[0].transposed)


@handles(T.transpose, torch.transpose, T.permute, torch.permute, T.swapaxes, T.swapdims)
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    tensor, *dims = args
    dims = [*dims, *kwargs.values()]
    if len(dims) == 1:
        dims = list(dims[0])
    rank = tensor.dim()
    if not all(-rank <= dim < rank for dim in dims):
        raise IndexError(f"dimensions {dims} of a weight of {rank}")
    if tensor.token.experts is not None:
        if func in (T.permute, torch.permute) or sorted(dim % 3 for dim in dims) != [1, 2]:
            refuse(func, args)
        return tensor._alias(transposed=not tensor.transposed)
    order = [dim % 2 for dim in dims]
    permutes = func in (T.permute, torch.permute)
    if len(order) != 2 or (permutes and order[0] == order[1]):
        refuse(func, args)
    swapped = order == [1, 0] if permutes else order[0] != order[1]
    return tensor._alias(transposed=tensor.transposed != swapped)


@handles(T.view, T.reshape, torch.reshape, T.unflatten, torch.unflatten, T.flatten, torch.flatten)
def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    """Divides the rows of a weight among matrices, ``w.view(g, -1, K)``, and joins these again."""
    tensor, *rest = args
    if tensor.transposed or any(isinstance(one, torch.dtype) for one in (*rest, *kwargs.values())):
        refuse(func, args)
    shape = func(torch.empty(tensor.shape, device="meta"), *rest, **kwargs).shape
    if shape[-1:] != tensor.shape[-1:] or len(shape) not in (2, 3) or 0 in shape[:-1]:
        refuse(func, args)
    return tensor.of_experts(shape[0] if len(shape) == 3 else None)


# ------------------------------------------------------------------------------------------- matrices, rows, columns


_WHOLE = slice(None)


@handles(T.__getitem__)
def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    tensor = args[0]
    first, *others = _by_dimension(func, args)
    whole = all(_is_whole(other) for other in others)
    if _is_whole(first) and whole:
        return tensor._alias()
    if tensor.token.experts is None:
        if not isinstance(others[0], slice):
            refuse(func, args)
        rows = tensor if _is_whole(first) else _pieces(func, (tensor, first), kwargs)[0]
        return rows if whole else _pieces(func, (rows, (_WHOLE, *others)), kwargs)[0]
    matrices = _matrices(func, tensor, first)
    if not whole and matrices.token.experts is not None:
        refuse(func, args)
    return matrices if whole else _getitem(func, (matrices, tuple(others)), kwargs)


def _by_dimension(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Returns the index of each dimension of a weight, by a key that may leave some out or abbreviate them by ``...``;
    there is no new dimension."""
    tensor, key = args
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [number for number, one in enumerate(keys) if one is Ellipsis]
    left = len(tensor.token.shape) - len(keys) + len(dots)
    if len(dots) > 1 or left < 0 or any(one is None or isinstance(one, bool) for one in keys):
        refuse(func, args)
    at = dots[0] if dots else len(keys)
    return [*keys[:at], *[_WHOLE] * left, *keys[at + len(dots) :]]


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == _WHOLE


def _matrices(func: Any, tensor: QTensor, index: Any) -> QTensor:
    """Returns those of the matrices of ``tensor`` that ``index`` chooses: one for a number, else several."""
    if isinstance(index, torch.Tensor) and index.dtype in _IDS:
        if index.dim() > 1:
            raise UnsupportedError(
                f"matrices of a quantised weight by ids of {index.dim()} dimensions, outside of jitgen.jit; flatten "
                "them, w[ids.flatten()], and unflatten what the product returns"
            )
        if index.dim() == 1:
            return tensor.chosen(index)
        if fakes.is_symbolic(index):  # of torch.compile, which asks for the shape alone
            return tensor.chosen(index.reshape(1)).expert(0)
        return tensor.expert(int(index))
    if isinstance(index, Integral):
        return tensor.expert(int(index))
    numbers = torch.arange(tensor.token.experts or 0, device=tensor.device)[index]
    if numbers.dim() != 1:
        refuse(func, (tensor, index))
    return tensor.chosen(numbers)


_IDS = (torch.int64, torch.int32)
_DIM = {"select": 0, "narrow": 0, "index_select": 0, "unbind": 0, "chunk": 1, "split": 1, "tensor_split": 1}
"""Functions along one dimension, and where that is among the arguments behind the tensor."""


@handles(*(getattr(module, name) for name in _DIM for module in (T, torch)))
def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor | tuple[QTensor, ...]:
    """Returns the matrices, rows or columns of a weight that ``func`` selects, as new weights."""
    (tensor, *rest), count, name = args, args[0].token.experts, func.__name__
    if count is None:
        if name in ("select", "unbind"):  # a row of a matrix is no matrix
            refuse(func, args)
        pieces = _pieces(func, args, kwargs)
    else:
        at = _DIM[name]
        if (rest[at] if len(rest) > at else kwargs.get("dim", 0)) not in (0, -3):
            refuse(func, args)
        if name == "index_select":
            return tensor.chosen(_checked(kwargs["index"] if "index" in kwargs else rest[-1]))
        with fakes.with_numbers():
            shape = count, *(max(size, 1) for size in tensor.shape[1:])  # torch's errors name it
            numbers = _as_tuple(func(torch.arange(count).view(count, 1, 1).expand(shape), *rest, **kwargs))
            chosen = [piece[:, 0, 0].tolist() if piece.dim() == 3 else int(piece[0, 0]) for piece in numbers]
        pieces = tuple(
            tensor.expert(ids)
            if isinstance(ids, int)
            else tensor.chosen(torch.tensor(ids, device=tensor.device).long())
            for ids in chosen
        )
    return pieces[0] if name in ("select", "narrow", "index_select") else pieces


def _checked(index: torch.Tensor) -> torch.Tensor:
    """Returns the index of ``index_select`` as a vector, in which no number counts from the end."""
    if index.dtype not in _IDS or index.dim() > 1:
        raise IndexError(
            f"an index of index_select is a vector of int32 or int64, not of {index.dtype}, {index.dim()}D"
        )
    if index.is_cpu and fakes.have_numbers(index) and index.numel() and int(index.min()) < 0:
        raise IndexError(f"index_select takes no index below 0; got {int(index.min())}")
    return index.reshape(-1)


def _pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[QTensor, ...]:
    """Returns the whole rows or columns that ``func`` selects of a weight, as new weights, since layouts store
    tiles."""
    tensor, *rest = args
    rows, columns = tensor.token.weight_shape
    if tensor.transposed:
        refuse(func, args)
    shape = max(rows, 1), max(columns, 1)
    with fakes.with_numbers():
        of_rows = _as_tuple(func(torch.arange(shape[0]).unsqueeze(1).expand(shape), *rest, **kwargs))
        of_columns = _as_tuple(func(torch.arange(shape[1]).expand(shape), *rest, **kwargs))
        if any(row_numbers.dim() != 2 for row_numbers in of_rows):
            refuse(func, args)
        selected = [
            (row_numbers.shape, row_numbers[:rows, 0].tolist(), column_numbers[:1].flatten().tolist())
            for row_numbers, column_numbers in zip(of_rows, of_columns, strict=True)
        ]
    pieces = []
    for selection, row_numbers, column_numbers in selected:
        if selection[1] == shape[1]:
            pieces.append(tensor._rows(torch.tensor(row_numbers, dtype=torch.int64)))
            continue
        numbers = column_numbers if selection == (rows, len(column_numbers)) and rows else []
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            refuse(func, args)
        pieces.append(tensor._columns(numbers[0], numbers[-1] + 1))
    return tuple(pieces)


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


# ------------------------------------------------------------------------------------------------------- embeddings


@handles(F.embedding, torch.embedding)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns the rows of a quantised weight that ``input`` numbers, and only these, dequantised to the weight's dtype.
    A kernel gathers them, and torch does where it is compiling and where columns are in another order."""
    names = ("input", "weight") if func is F.embedding else ("weight", "input")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    input, weight = bound["input"], bound["weight"]
    if kwargs.get("max_norm") is not None or (func is F.embedding and len(args) > 3 and args[3] is not None):
        raise UnsupportedError("F.embedding with max_norm changes its weight, which is quantised: call it without")
    if (
        weight.transposed
        or weight.token.experts is not None
        or is_quantized(input)
        or input.dtype not in (torch.int64, torch.int32)
    ):
        refuse(func, args)
    rows = weight.token.weight_shape[0]
    plain = type(input) is torch.Tensor and (input.is_cpu or input.is_cuda) and input.device == weight.token.device
    simple = not (torch.compiler.is_compiling() or eager.dequantizes.get() or find(weight.token.format).ordered)
    if plain and simple:
        try:
            return eager.kernels.embedding(input, weight)
        except IndexError:
            raise _out_of_range(input, rows) from None
    index = input.reshape(-1).long()
    known = index.is_cpu and fakes.have_numbers(index)  # where torch traces, its own look-up checks the index
    if known and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise _out_of_range(index, rows)
    dense = weight.rows(index)
    return dense.view(*input.shape, dense.shape[-1])


def _out_of_range(index: torch.Tensor, rows: int) -> IndexError:
    low, high = (int(end) for end in index.aminmax())
    return IndexError(f"index out of range: rows {low} to {high} of an embedding of {rows} rows")


# -------------------------------------------------------------------------------------------------- matrix products


handles(F.linear)(lambda func, args, kwargs: _product(func, *args, **kwargs))
_OPERANDS = ("input", "self", "other", "mat2", "tensor2", "vec")


@handles(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.linalg.matmul, torch.mv, T.mv)
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    left, right = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
    for weight, other in ((right, left), (left, right)):
        if is_quantized(weight) and weight.token.experts is not None and not is_quantized(other):
            is_one = other.dim() == 2 or (other.dim() == 3 and other.shape[0] == 1)
            repeated = other.expand(weight.token.experts, *other.shape[-2:]) if is_one else other
            return _bmm(func, (repeated, weight) if weight is right else (weight, repeated), {})
    if is_quantized(right) and not is_quantized(left) and left.dim():
        return _product(func, left, right.t())
    if is_quantized(left) and not is_quantized(right) and right.dim() in (1, 2):
        if right.dim() == 1:
            return _product(func, right, left)
        return _product(func, right.t(), left).t().contiguous()
    return _dequantized(func, args, kwargs)


@handles(torch.bmm, T.bmm)
def _bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns ``x[e] @ w[e]`` for each matrix of a weight of three dimensions: a product per expert."""
    left, right = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
    if is_quantized(left) and not is_quantized(right) and right.dim() == 3:
        return _bmm(func, (right.mT, left.mT), {}).mT
    if is_quantized(left) or left.dim() != 3 or left.shape[0] != right.token.experts:
        refuse(func, (right, left))
    if not right.token.experts:
        return left @ left.new_zeros(right.shape)
    return torch.stack([left[index] @ right.expert(index) for index in range(left.shape[0])])


@handles(
    *(getattr(module, name) for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm")) if hasattr(module, name))
)
def _grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns, for each expert e that has rows, rows ``offs[e - 1]`` to ``offs[e]`` of ``x`` times ``w[e]``: by one
    kernel where one takes these, else by a product for each."""

    def grouped(input: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
        plain = is_quantized(weight) and not is_quantized(input) and input.dim() == 2
        if not plain or offs is None or bias is not None or weight.token.experts is None:
            refuse(func, (weight, input))
        if out_dtype in (None, input.dtype) and eager.takes_groups(input, weight, offs):
            return eager.kernels.grouped(input, weight, offs)
        result = input.new_zeros(input.shape[0], weight.shape[-1], dtype=out_dtype or input.dtype)
        if fakes.is_recorded():
            raise UnsupportedError(
                f"{resolve_name(func) or func} of quantised experts cannot be recorded in a graph, since the number of "
                "rows of an expert is data: use backend='jitgen' or 'eager' of torch.compile, or F.linear(x, w[i])"
            )
        if fakes.is_symbolic(offs):
            return result
        ends, rows = offs.tolist(), input.shape[0]
        if len(ends) != weight.token.experts or not all(
            0 <= first <= last for first, last in pairwise([0, *ends, rows])
        ):
            raise IndexError(
                f"{func.__name__}: offs are the ends of {weight.token.experts} groups of {rows} rows, which "
                f"ascend; got {ends}"
            )
        for index, (first, last) in enumerate(pairwise([0, *ends])):
            if last > first:
                result[first:last] = input[first:last] @ weight.expert(index)
        return result

    return grouped(*args, **kwargs)


OPERATORS: dict[str, Handler] = dict.fromkeys(
    ("transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default"), _grouped
)
"""Handlers of operators that other packages register, by name: transformers has its ``grouped_mm`` where torch's cannot
be compiled."""


@handles(torch.equal, T.equal)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether both are quantised weights of one format, group size and shape with equal codes, scales and
    zero-points.

    Layouts, devices' copies and nominal dtypes do not matter. Equal numbers by other codes are not equal.
    """
    left, right = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if not (is_quantized(left) and is_quantized(right)):
        return False
    ours, theirs = ((w.token.format, w.token.group_size, w.token.weight_shape, w.shape) for w in (left, right))
    if ours != theirs or left.transposed != right.transposed:
        return False
    pairs = zip(left._tensors_in("portable", keep=False), right._tensors_in("portable", keep=False), strict=True)
    return all(torch.equal(one, other.to(one.device)) for one, other in pairs)


handles(T.__rmatmul__)(lambda func, args, kwargs: _matmul(torch.matmul, (args[1], args[0]), {}))


@handles(torch.addmm, T.addmm)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    operands = [*args, *(kwargs[name] for name in ("mat1", "mat2") if name in kwargs)]
    plain = len(operands) == 3 and kwargs.get("beta", 1) == 1 and kwargs.get("alpha", 1) == 1 and "out" not in kwargs
    if plain and is_quantized(operands[2]) and not is_quantized(operands[1]) and operands[0].dim() == 1:
        return _product(func, operands[1], operands[2].t(), operands[0])
    return _dequantized(func, args, kwargs)


def _product(func: Any, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """Returns ``input @ weight.T + bias`` with a quantised weight."""
    if is_quantized(input) or is_quantized(bias) or not input.dtype.is_floating_point:
        refuse(func, (input, weight, bias))
    if weight.token.experts is not None:
        refuse(func, (input, weight, bias))
    if weight.transposed:
        eager.fallback("its weight is transposed", "quantise the transpose: a weight is (N, K), for x @ w.T")
        return eager.reference(input, weight, bias)
    return eager.linear(input, weight, bias)


def _dequantized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Calls the function itself, on the weight dequantised to the other operands' dtype."""
    operands = (*args, *kwargs.values())
    dtypes = {operand.dtype for operand in operands if isinstance(operand, torch.Tensor) and not is_quantized(operand)}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        refuse(func, operands)
    dtype = dtypes.pop()
    eager.fallback(f"{resolve_name(func) or func} of these operands is no F.linear", "call F.linear(x, weight, bias)")

    def plain(value: Any) -> Any:
        return value.dequantize(dtype) if is_quantized(value) else value

    return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
