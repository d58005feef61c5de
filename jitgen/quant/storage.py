"""The tensors a quantised weight consists of, and their conversion between layouts.

``StoredWeight`` is what ``QTensor`` is made of: everything that needs no table of torch functions. ``functions`` has
that table, over ``StoredWeight``; ``qtensor`` joins the two. So imports point one way: storage <- functions <- qtensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from jitgen.errors import UnsupportedError
from jitgen.forks import Lock
from jitgen.quant import eager, fakes, layouts, slices
from jitgen.quant.formats import TENSOR_NAMES, Format, find
from jitgen.quant.layouts import Tensors, portable
from jitgen.quant.stored import Stored
from jitgen.quant.token import Token

W = TypeVar("W", bound="StoredWeight")

BLOCK_ROWS = 16
"""The rows of a block, in every layout but the portable one."""
DEVICE_LAYOUTS = {"cpu": "cpu", "cuda": "mma"}
"""The layout that kernels of the default backend read, by type of device."""
PORTABLE = "portable_"
"""Begins the names of a weight's tensors in the portable layout, such as ``portable_codes``."""

_lock = Lock()
"""Locked while a weight is converted, and while what its views share changes."""


class Copies:
    """What tensors that are the same weight share: detached, transposed, of another nominal dtype or in another layout.

    Attributes:
        converted: tensors by layout, remembered for the next request.
        experts: the matrices of a weight of three dimensions that were asked for, by index and token.
        living: what these tensors refer to, as long as they live. Only these objects are referred to weakly:
            ``Module.to`` swaps tensors, and torch swaps none that have weak references.
        parts: by index, what the tensors of such a matrix share, as long as it lives.
        is_part: whether these tensors are such a matrix.
        is_checked: whether the numbers are known to be finite; otherwise they are checked when they are converted.
    """

    __slots__ = ("__weakref__", "converted", "experts", "is_checked", "is_part", "living", "parts")

    def __init__(self) -> None:
        self.converted: dict[str, Tensors] = {}
        self.experts: dict[tuple[int, Token], StoredWeight] = {}
        self.living: weakref.WeakSet[Stored] = weakref.WeakSet()
        self.parts: dict[int, weakref.WeakSet[Copies]] = {}
        self.is_part = False
        self.is_checked = True

    def every(self) -> list[tuple[str, Tensors]]:
        """(layout, tensors) of every copy: converted, and in the tensors of this weight that live."""
        living = [(stored.token.layout, stored.tensors) for stored in self.living]
        found = [*self.converted.items(), *living]
        return list({id(tensors[0]): (layout, tensors) for layout, tensors in found}.values())


class LayoutName(str):
    """The name of a layout. It equals ``torch.strided`` too, by which other programs tell that a tensor is not sparse:
    safetensors then asks for its memory, and meets the error that says how a weight is written."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is torch.strided or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class StoredWeight(torch.Tensor):
    """The data of a quantised weight; ``QTensor`` is its one subclass.

    Attributes:
        stored: its tensors and token. Who needs both reads this once, and the two from what was read.
    """

    stored: Stored
    _copies: Copies
    _is_param: bool

    @classmethod
    def _of(cls: type[W], tensors: Tensors, token: Token, copies: Copies | None = None) -> W:
        """``copies``: of the tensors that this one is another view of."""
        eager.kernels.prepare()
        *batch, rows, columns = token.shape
        strides: tuple[int, ...] = (1, rows) if token.transposed else (columns, 1)
        strides = (rows * columns, *strides) if batch else strides
        made = torch.Tensor._make_wrapper_subclass(
            cls, token.shape, strides=strides, dtype=token.dtype, device=token.device, requires_grad=False
        )
        made._copies = copies or Copies()
        made._store(Stored(tensors, token))
        return made

    def _store(self, stored: Stored) -> None:
        self._copies.living.add(stored)
        self.stored = stored

    @property
    def tensors(self) -> Tensors:
        """(codes, scales) or (codes, scales, zeros): plain tensors in this tensor's layout."""
        return self.stored.tensors

    @property
    def token(self) -> Token:
        """Everything else about it; equal facts are the same object."""
        return self.stored.token

    # Python properties, because each of torch's own would call __torch_function__.
    @property
    def format(self) -> str:
        return self.token.format

    @property
    def group_size(self) -> int | None:
        return self.token.group_size

    @property
    def layout(self) -> LayoutName:  # type: ignore[override]
        return LayoutName(self.token.layout)

    @property
    def transposed(self) -> bool:
        """Whether this is the transpose of a weight: of shape (K, N), with groups along K."""
        return self.token.transposed

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.token.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.token.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.token.device

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size of its tensors in this layout, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def codes(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def scales(self) -> torch.Tensor:
        return self.tensors[1]

    @property
    def zeros(self) -> torch.Tensor | None:
        return self._named("zeros")

    @property
    def tensor_scale(self) -> torch.Tensor | None:
        return self._named("tensor_scale")

    @property
    def order(self) -> torch.Tensor | None:
        return self._named("order")

    def _named(self, name: str) -> torch.Tensor | None:
        names = find(self.token.format).tensor_names
        return self.tensors[names.index(name)] if name in names else None

    @property
    def portable_names(self) -> tuple[str, ...]:
        """The names of the tensors in the portable layout, such as ``portable_codes``, whatever its own layout is."""
        return tuple(PORTABLE + name for name in find(self.token.format).tensor_names)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as a plain tensor of this shape; ``dtype`` defaults to that of the weight it was made of."""
        from jitgen.quant.decode import decode

        token = self.token
        with torch.no_grad():
            tensors = self._tensors_in("portable", keep=False)
            weight = decode(
                find(token.format), token.group_size, token.weight_shape, tensors, floating(dtype or token.dtype)
            )
        if token.experts is not None:
            weight = weight.unflatten(0, (token.experts, -1)) if token.experts else weight.unsqueeze(0)[:0]
        return weight.mT if token.transposed else weight

    def expert(self: W, index: int) -> W:
        """The matrix number ``index`` of a weight of three dimensions. Where it has whole blocks of 16 rows it shares
        the memory of this weight, which is converted to the layout that kernels on its device read.

        Raises:
            IndexError: there is no such one.
        """
        count = self.token.experts or 0
        if not -count <= index < count:
            raise IndexError(f"index {index} of a weight of {count} matrices")
        rows = self.token.weight_shape[0] // count
        if rows % BLOCK_ROWS == 0 and find(self.token.format).scale_rows == 1:
            self.relayout_(DEVICE_LAYOUTS.get(self.token.device.type, "portable"))
        with _lock, _lasting():
            token = self.token
            known = self._copies.experts.get((index % count, token))
            if known is None:
                known = self._expert(index % count, rows)
                known._copies.is_part = True
                self._copies.parts.setdefault(index % count, weakref.WeakSet()).add(known._copies)
                self._copies.experts[index % count, token] = known
            return known  # type: ignore[return-value]

    def _expert(self: W, index: int, rows: int) -> W:
        token = self.token.replace(experts=None, weight_shape=(rows, self.token.weight_shape[1]))
        format = find(token.format)
        if rows % BLOCK_ROWS == 0 and format.scale_rows == 1:
            per_row = 1 if token.layout == "portable" else BLOCK_ROWS
            first, last = index * rows // per_row, (index + 1) * rows // per_row
            shared = ("tensor_scale", "order") if token.layout == "portable" else ("order",)
            parts = zip(format.tensor_names, self.tensors, strict=True)
            return type(self)._of(tuple(part if name in shared else part[first:last] for name, part in parts), token)
        whole = self._alias(experts=None, transposed=False)
        found = whole._rows(torch.arange(index * rows, (index + 1) * rows))
        return found._alias(transposed=True) if token.transposed else found

    def of_experts(self: W, count: int) -> W:
        """The weight of three dimensions whose ``count`` matrices lie one below another in this one."""
        return self._alias(experts=count)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The rows with these numbers (int64, one dimension) as a plain tensor of the weight's dtype.

        This weight is not transposed. Its tensors in the portable layout are kept for the next call.
        """
        token = self.token
        with torch.no_grad():
            tensors = self._tensors_in("portable", keep=True)
            row = find(token.format)
            return slices.dense_rows(row, token.group_size, token.weight_shape, tensors, index, token.dtype)

    def portable_tensors(self) -> Tensors:
        """Its tensors in the portable layout; those that it has itself, where that is its layout."""
        return self._tensors_in("portable", keep=False)

    def with_layout(self: W, layout: str) -> W:
        """The same weight in ``layout``. The conversion is remembered: the next call returns the same tensors."""
        with _lock:
            if layout == self.token.layout:
                return self
            stored = self.stored_in(layout)
            return type(self)._of(stored.tensors, stored.token, self._copies)

    def stored_in(self, layout: str) -> Stored:
        """What ``with_layout(layout)`` holds."""
        with _lock:
            return Stored(self._tensors_in(layout, keep=True), self.token.replace(layout=layout))

    def relayout_(self: W, layout: str) -> W:
        """Convert this weight to ``layout`` in place; the tensors of its layout until now are released."""
        with _lock:
            if layout != self.token.layout:
                self._copies.experts.clear()
                self._store(Stored(self._tensors_in(layout, keep=False), self.token.replace(layout=layout)))
            return self

    def _tensors_in(self, layout: str, keep: bool) -> Tensors:
        with _lock:
            token = self.token
            if layout == token.layout:
                return self.tensors
            tensors = self._copies.converted.get(layout)
            if tensors is None:
                facts = find(token.format), token.group_size, token.weight_shape
                with _lasting(), fakes.real(self.tensors):
                    if not self._copies.is_checked and _have_numbers(self.tensors):
                        portable.check_finite(facts[0], self.tensors)
                        self._copies.is_checked = True
                    tensors = settled(layouts.convert(self.tensors, token.layout, layout, *facts))
                if keep:
                    self._copies.converted.setdefault(token.layout, self.tensors)
                    tensors = self._copies.converted.setdefault(layout, tensors)
            return tensors

    def overwrite(self, plain: Tensors) -> None:
        """Write ``plain``, tensors of such a weight in the portable layout, to every copy of this one in any layout, to
        those in other tensors of this weight, and to its matrices.

        Raises:
            UnsupportedError: this is one matrix of a weight of three dimensions.
        """
        token, format = self.token, find(self.token.format)
        if self._copies.is_part:
            raise UnsupportedError(
                f"writing to one matrix of a quantised weight of three dimensions, {self!r}: write to the whole weight"
            )
        rows, columns = token.weight_shape
        with _lock:
            _write(self._copies, format, token.group_size, token.weight_shape, plain)
            for index, parts in self._copies.parts.items():
                height = rows // (token.experts or 1)
                taken = slices.rows(format, plain, torch.arange(index * height, (index + 1) * height))
                for part in list(parts):
                    _write(part, format, token.group_size, (height, columns), taken)

    def _map(self: W, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> W:
        """A new weight, with ``function`` applied to each of its tensors."""
        stored = self.stored
        tensors = settled(tuple(map(function, stored.tensors)))
        return type(self)._of(tensors, stored.token.replace(device=tensors[0].device, **changes))

    def _rows(self: W, rows: torch.Tensor) -> W:
        """A new portable weight of these rows (int64, on the CPU); this weight is not transposed.

        Raises:
            UnsupportedError: some of the rows share scales with others that are left out.
        """
        token = self.token
        tensors = self._tensors_in("portable", keep=False)
        taken = settled(slices.rows(find(token.format), tensors, rows))
        shape = (len(rows), token.weight_shape[1])
        return type(self)._of(taken, token.replace(layout="portable", weight_shape=shape))

    def _columns(self: W, first: int, last: int) -> W:
        """A new portable weight of the columns from ``first`` to before ``last``; this weight is not transposed.

        Raises:
            UnsupportedError: they are not whole groups.
        """
        token = self.token
        tensors = self._tensors_in("portable", keep=False)
        taken = settled(slices.columns(find(token.format), token.group_size, token.weight_shape, tensors, first, last))
        shape = (token.weight_shape[0], last - first)
        return type(self)._of(taken, token.replace(layout="portable", weight_shape=shape))

    def _portable(self: W) -> W:
        """A new weight in the portable layout, on the same device."""
        return type(self)._of(self._tensors_in("portable", keep=False), self.token.replace(layout="portable"))

    def _alias(self: W, **changes: Any) -> W:
        """A weight that shares the tensors of this one."""
        with _lock:  # a copy that copy_ does not know yet would miss what it writes
            stored = self.stored
            return type(self)._of(stored.tensors, stored.token.replace(**changes), self._copies)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        token = self.token
        parameter = ", Parameter" if getattr(self, "_is_param", False) else ""
        transposed = ", transposed" if token.transposed else ""
        return (
            f"QTensor({token.format}, group_size={token.group_size}, shape={token.shape}, layout={token.layout!r}, "
            f"dtype={token.dtype}, device={str(token.device)!r}{transposed}{parameter})"
        )

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __len__(self) -> int:
        return self.token.shape[0]


def _in_portable_layout(name: str) -> property:
    def read(weight: StoredWeight) -> torch.Tensor:
        names = find(weight.token.format).tensor_names
        return weight._tensors_in("portable", keep=True)[names.index(name)]

    return property(read)


for _name in TENSOR_NAMES:
    setattr(StoredWeight, PORTABLE + _name, _in_portable_layout(_name))


def _write(copies: Copies, format: Format, group_size: int | None, shape: tuple[int, int], plain: Tensors) -> None:
    """Write ``plain``, in the portable layout, to all of ``copies``."""
    for layout, tensors in copies.every():
        packed = layouts.find(layout).pack(format, group_size, shape, plain)
        for tensor, values in zip(tensors, packed, strict=True):
            tensor.copy_(values)
        settled(tensors)


def _have_numbers(tensors: Tensors) -> bool:
    """Whether these are tensors of numbers, which no mode of torch's records."""
    return type(tensors[0]) is torch.Tensor and not torch._C._len_torch_dispatch_stack()


def _lasting() -> AbstractContextManager[Any]:
    """A context for what a weight keeps: within ``inference_mode`` it would be of tensors that no later call with
    gradients takes."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def settled(tensors: Tensors) -> Tensors:
    """``tensors``, after every write to them has ended.

    A kernel may fetch weights before the previous kernel of its stream has ended (programmatic dependent launch). So a
    weight must be written completely before a tensor is made of it, and after it was changed in place.
    """
    if tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tensors


def floating(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` where it is a floating-point one; UnsupportedError otherwise."""
    if not dtype.is_floating_point:
        raise UnsupportedError(f"a quantised weight has no dtype {dtype}; use a floating-point one, such as bfloat16")
    return dtype
