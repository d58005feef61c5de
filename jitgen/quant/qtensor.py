"""Defines ``QTensor``, a quantised weight that is a ``torch.Tensor`` of the dequantised weight's shape.

It holds plain tensors in one layout and a ``token`` that says which (``storage``). It may be used wherever a weight is:
in a ``Parameter``, a state dict, a checkpoint, ``F.linear``, ``x @ w.T``. The table in ``functions`` lists what torch
may do with it; anything else is an ``UnsupportedError``, never a silent dequantisation.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext

from jitgen.errors import FormatError, UnsupportedError
from jitgen.fingerprint import folders_digest
from jitgen.forks import Lock
from jitgen.frames import run_as_it_is
from jitgen.quant import distributed, exported, fakes, layouts, slices
from jitgen.quant.activations import check_activation
from jitgen.quant.decode import decode
from jitgen.quant.eager import kernels
from jitgen.quant.formats import EXTRAS, TENSOR_NAMES, check_group_size, find
from jitgen.quant.functions import FUNCTIONS, METADATA, OPERATORS, refuse
from jitgen.quant.layouts import Tensors, portable
from jitgen.quant.storage import Copies, Stored, settled
from jitgen.quant.token import Token, intern

BLOCK_ROWS = 16
"""The rows of a block, in every layout but the portable one."""
DEVICE_LAYOUTS = {"cpu": "cpu", "cuda": "mma"}
"""The layout that kernels of the default backend read, by type of device."""
PORTABLE = "portable_"
"""Begins the names of a weight's tensors in the portable layout, such as ``portable_codes``."""

_lock = Lock()
"""Locked while a weight is converted, and while what its views share changes."""
_INNER_TENSOR = "export.access_subclass_inner_tensor.default"
"""The operator by which exported programs read one of the tensors of a weight."""


class LayoutName(str):
    """Represents the name of a layout. It equals ``torch.strided``, by which programs tell that a tensor is not sparse:
    safetensors then asks for its memory, and meets the error that says how a weight is written."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is torch.strided or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class QTensor(torch.Tensor):
    """Represents a quantised weight. Made by ``jitgen.quantize``.

    Attributes:
        tensors: (codes, scales) or (codes, scales, zeros): plain tensors in this tensor's layout.
        token: everything else about it; equal facts are the same object.
        stored: the pair of them. Whoever needs both reads this once: another thread may convert the weight meanwhile.
    """

    stored: Stored
    _copies: Copies
    _is_param: bool
    _flattened: list[str] | None = None
    """The names by which torch knows the tensors of this weight, if torch made it (``__tensor_unflatten__``)."""
    _is_compiled = False
    """Whether torch.compile has looked at the tensors: torch 2.11 asks for their names again at each call."""

    @staticmethod
    def __new__(
        cls,
        tensors: Tensors,
        format: str,
        group_size: int | None,
        weight_shape: tuple[int, int],
        dtype: torch.dtype,
        layout: str = "portable",
        transposed: bool = False,
        experts: int | None = None,
        filled: bool = True,
        activation: str | None = None,
    ) -> QTensor:
        """Makes a weight of existing tensors: ``weight_shape`` is (N, K), and ``dequantize`` returns ``dtype`` by
        default.

        ``filled``: whether the tensors have their numbers already. Otherwise these are checked when the weight is first
        converted to another layout.

        Raises:
            FormatError: the tensors do not fit the format, the group size or the shape.
        """
        row = find(format)
        group_size = check_group_size(group_size, row)
        shape = (int(weight_shape[0]), int(weight_shape[1]))
        if layout == "portable":
            portable.check(row, group_size, shape, tensors)
            filled = filled and fakes.have_numbers(*tensors)
            if filled:
                portable.check_finite(row, tensors)
        else:
            layouts.find(layout)
        if any(tensor.device != tensors[0].device for tensor in tensors):
            raise FormatError(
                f"tensors on {', '.join(sorted({str(tensor.device) for tensor in tensors}))}; move them to one"
            )
        if experts is not None and (experts < 0 or shape[0] % max(experts, 1)):
            raise FormatError(f"{shape[0]} rows are not divided among {experts} matrices")
        activation = check_activation(activation, row, group_size, shape[1])
        facts = row.name, group_size, layout, shape, floating(dtype), tensors[0].device, transposed, experts
        token = intern(*facts, activation)
        made = QTensor.wrap(settled(tuple(tensors)), token)
        made._copies.is_checked = filled
        return made

    @classmethod
    def wrap(cls, tensors: Tensors, token: Token, copies: Copies | None = None) -> QTensor:
        """Makes a weight of ``tensors``, which are not checked. A view of another weight shares its ``copies``."""
        kernels.prepare()
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
        """Returns (codes, scales) or (codes, scales, zeros): plain tensors in this tensor's layout."""
        return self.stored.tensors

    @property
    def token(self) -> Token:
        """Returns everything else about the weight; equal facts are the same object."""
        return self.stored.token

    @property
    def is_argument(self) -> bool:
        """Returns whether the weight, or what this is a view of, is an argument of a graph that torch traces."""
        return self._copies.is_argument

    # Python properties, because each of torch's own would call __torch_function__.
    @property
    def format(self) -> str:
        return self.token.format

    @property
    def group_size(self) -> int | None:
        return self.token.group_size

    @property
    def activation(self) -> str | None:
        """Returns how products quantise what they multiply with this weight; None where they leave it as it is."""
        return self.token.activation

    @property
    def layout(self) -> LayoutName:  # type: ignore[override]
        return LayoutName(self.token.layout)

    @property
    def transposed(self) -> bool:
        """Returns whether this is the transpose of a weight: of shape (K, N), with groups along K."""
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
        """Returns the size of its tensors in this layout, in bytes."""
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

    @property
    def smoothing(self) -> torch.Tensor | None:
        """Returns what an activation's columns are multiplied by before anything else, float32 (1, K); None for
        nothing."""
        return self._named("smoothing")

    @property
    def input_scale(self) -> torch.Tensor | None:
        """Returns the scale of activations, float32 (1, 1); None where each row or block has its own."""
        return self._named("input_scale")

    def _named(self, name: str) -> torch.Tensor | None:
        names = find(self.token.format).tensor_names
        return self.tensors[names.index(name)] if name in names else None

    @property
    def portable_names(self) -> tuple[str, ...]:
        """Returns the names of the tensors in the portable layout, such as ``portable_codes``, whatever its own layout
        is."""
        return tuple(PORTABLE + name for name in find(self.token.format).tensor_names)

    def with_activation(self, activation: str | None) -> QTensor:
        """Returns a weight that shares the tensors of this one, and whose products quantise activations so, or leave
        them as they are (None).

        Raises:
            FormatError: there is no such kind, or no kernel for it with weights of this format.
        """
        token = self.token
        columns = token.weight_shape[1]
        return self._alias(activation=check_activation(activation, find(token.format), token.group_size, columns))

    def with_input_scale(self, scale: float | torch.Tensor) -> QTensor:
        """Returns a weight like this one, whose products quantise activations with ``scale``, the size of one step of
        their codes: of format ``"int8.static"``, for instance. Values beyond the largest code saturate.

        Raises:
            FormatError: this weight's products quantise no activations, or ``scale`` is no number above 0.
        """
        token = self.token
        if token.activation is None:
            raise FormatError(f"{self!r} leaves activations as they are; take .with_activation('int8') first")
        try:
            value = torch.as_tensor(scale, dtype=torch.float32, device=token.device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise FormatError(f"a scale of activations is one number above 0, not {scale!r:.80}") from None
        if value.numel() != 1:
            raise FormatError(f"a scale of activations is one number, not a tensor of shape {tuple(value.shape)}")
        return self._with_extra("static", value.reshape(1, 1).clone())

    def with_smoothing(self, smoothing: torch.Tensor | None) -> QTensor:
        """Returns a weight whose columns are those of this one times ``smoothing`` (K numbers above 0), and whose
        products multiply the columns of activations by it first: of format ``"int8.smoothed"``, for instance. Quantise
        ``weight / smoothing``, and call this on the result. None takes such factors away.

        Raises:
            FormatError: ``smoothing`` is not K numbers above 0.
        """
        if smoothing is None:
            return self._with_extra("smoothed", None) if self.smoothing is not None else self
        columns = self.token.weight_shape[1]
        if not isinstance(smoothing, torch.Tensor) or smoothing.numel() != columns:
            shape = f"a tensor of shape {tuple(smoothing.shape)}" if isinstance(smoothing, torch.Tensor) else smoothing
            raise FormatError(f"a factor for each of {columns} columns is expected, in a tensor; got {shape!s:.80}")
        value = smoothing.detach().to(self.token.device, torch.float32).reshape(1, columns)
        return self._with_extra("smoothed", value.clone(memory_format=torch.contiguous_format))

    def _with_extra(self, qualifier: str, value: torch.Tensor | None) -> QTensor:
        """Makes a weight of the format with ``qualifier``, one of ``EXTRAS``, or without it, and its tensor."""
        token, format = self.token, find(self.token.format)
        names = [word for word in format.name.split(".") if word != qualifier]
        changed = find(".".join(names if value is None else [*names, qualifier]))
        named: dict[str, Any] = dict(zip(format.tensor_names, self._tensors_in("portable", keep=False), strict=True))
        named[EXTRAS[qualifier]] = value
        facts = {"transposed": token.transposed, "experts": token.experts, "activation": token.activation}
        tensors = tuple(named[name] for name in changed.tensor_names)
        return QTensor(tensors, changed.name, token.group_size, token.weight_shape, token.dtype, **facts)  # type: ignore

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight as a plain tensor of this shape; ``dtype`` defaults to that of the weight it was made
        of."""
        token = self.token
        with torch.no_grad():
            tensors = self._tensors_in("portable", keep=False)
            weight = decode(
                find(token.format), token.group_size, token.weight_shape, tensors, floating(dtype or token.dtype)
            )
        if token.experts is not None:
            weight = weight.unflatten(0, (max(token.experts, 1), -1))[: token.experts]
        return weight.mT if token.transposed else weight

    def expert(self, index: int) -> QTensor:
        """Returns matrix ``index`` of a weight of three dimensions. Where it has whole blocks of 16 rows it shares the
        memory of this weight, which is converted to the layout that kernels on its device read.

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
                known._copies.is_matrix = True
                self._copies.matrices.setdefault(index % count, weakref.WeakSet()).add(known._copies)
                self._copies.experts[index % count, token] = known
            return known

    def _expert(self, index: int, rows: int) -> QTensor:
        token = self.token.replace(experts=None, weight_shape=(rows, self.token.weight_shape[1]))
        format = find(token.format)
        if rows % BLOCK_ROWS == 0 and format.scale_rows == 1:
            per_row = 1 if token.layout in ("portable", "rows", "blocks") else BLOCK_ROWS
            first, last = index * rows // per_row, (index + 1) * rows // per_row
            shared = ("tensor_scale", *format.extra_names) if token.layout == "portable" else format.extra_names
            named = zip(format.tensor_names, self.tensors, strict=True)
            return QTensor.wrap(
                tuple(tensor if name in shared else tensor[first:last] for name, tensor in named), token
            )
        whole = self._alias(experts=None, transposed=False)
        matrix = whole._rows(torch.arange(index * rows, (index + 1) * rows))
        return matrix._alias(transposed=True) if token.transposed else matrix

    def chosen(self, ids: torch.Tensor) -> QTensor:
        """Returns the matrices of a weight of three dimensions that ``ids`` (one dimension) choose, as a new weight. An
        id of no matrix chooses the first one on a GPU, as in kernels.

        Raises:
            IndexError: an id on the CPU is of no matrix.
        """
        token, count = self.token, self.token.experts or 0
        rows = token.weight_shape[0] // max(count, 1)
        if ids.is_cpu and ids.shape[0] and fakes.have_numbers(ids):
            low, high = (int(end) for end in ids.aminmax())
            if low < -count or high >= count:
                raise IndexError(f"ids from {low} to {high} of a weight of {count} matrices")
        numbers = ids.long() if ids.shape[0] else ids.new_zeros(1, dtype=torch.int64)  # no matrices store one
        numbers = torch.where((numbers >= -count) & (numbers < count), numbers, 0).remainder(max(count, 1))
        index = (numbers.unsqueeze(1) * rows + torch.arange(rows, device=ids.device)).flatten()
        matrices = self._alias(experts=None, transposed=False)._rows(index).of_experts(ids.shape[0])
        return matrices._alias(transposed=True) if token.transposed else matrices

    def of_experts(self, count: int | None) -> QTensor:
        """Returns the weight of three dimensions whose ``count`` matrices lie one below another in this one; the matrix
        of all of them for None."""
        return self._alias(experts=count)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the rows with these numbers (int64, one dimension) as a plain tensor of the weight's dtype.

        This weight is not transposed. Its tensors in the portable layout are kept for the next call.
        """
        token = self.token
        with torch.no_grad():
            tensors = self._tensors_in("portable", keep=True)
            row = find(token.format)
            return slices.dense_rows(row, token.group_size, token.weight_shape, tensors, index, token.dtype)

    def portable_tensors(self) -> Tensors:
        """Returns its tensors in the portable layout, its own if they are."""
        return self._tensors_in("portable", keep=False)

    def with_layout(self, layout: str) -> QTensor:
        """Returns the same weight in ``layout``. The conversion is remembered: the next call returns the same
        tensors."""
        with _lock:
            if layout == self.token.layout:
                return self
            stored = self.stored_in(layout)
            return QTensor.wrap(stored.tensors, stored.token, self._copies)

    def stored_in(self, layout: str) -> Stored:
        """Returns what ``with_layout(layout)`` holds."""
        with _lock:
            return Stored(self._tensors_in(layout, keep=True), self.token.replace(layout=layout))

    def relayout_(self, layout: str) -> QTensor:
        """Converts this weight to ``layout`` in place; the tensors of its former layout are released."""
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
                    if not self._copies.is_checked and fakes.have_numbers(*self.tensors):
                        portable.check_finite(facts[0], self.tensors)
                        self._copies.is_checked = True
                    tensors = settled(layouts.convert(self.tensors, token.layout, layout, *facts))
                if keep:
                    self._copies.converted.setdefault(token.layout, self.tensors)
                    tensors = self._copies.converted.setdefault(layout, tensors)
            return tensors

    def overwrite(self, plain: Tensors) -> None:
        """Writes ``plain``, portable tensors of such a weight, to every copy of this one: in any layout, in its other
        tensors, and in its matrices.

        Raises:
            UnsupportedError: this is one matrix of a weight of three dimensions.
        """
        token, format = self.token, find(self.token.format)
        if self._copies.is_matrix:
            raise UnsupportedError(
                f"writing to one matrix of a quantised weight of three dimensions, {self!r}: write to the whole weight"
            )
        rows, columns = token.weight_shape
        with _lock:
            self._copies.write(format, token.group_size, token.weight_shape, plain)
            for index, copies_of_matrix in self._copies.matrices.items():
                height = rows // (token.experts or 1)
                taken = slices.rows(format, plain, torch.arange(index * height, (index + 1) * height))
                for copies in list(copies_of_matrix):
                    copies.write(format, token.group_size, (height, columns), taken)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> QTensor:
        """Makes a new weight by applying ``function`` to each of its tensors."""
        stored = self.stored
        tensors = settled(tuple(map(function, stored.tensors)))
        return QTensor.wrap(tensors, stored.token.replace(device=tensors[0].device, **changes))

    def _rows(self, rows: torch.Tensor) -> QTensor:
        """Makes a new portable weight of these rows (int64, on the CPU); this weight is not transposed.

        Raises:
            UnsupportedError: some of the rows share scales with others that are left out.
        """
        token = self.token
        tensors = self._tensors_in("portable", keep=False)
        taken = settled(slices.rows(find(token.format), tensors, rows))
        shape = (len(rows), token.weight_shape[1])
        return QTensor.wrap(taken, token.replace(layout="portable", weight_shape=shape))

    def _columns(self, first: int, last: int) -> QTensor:
        """Makes a new portable weight of the columns from ``first`` to before ``last``; this weight is not transposed.

        Raises:
            UnsupportedError: they are not whole groups.
        """
        token = self.token
        tensors = self._tensors_in("portable", keep=False)
        taken = settled(slices.columns(find(token.format), token.group_size, token.weight_shape, tensors, first, last))
        shape = (token.weight_shape[0], last - first)
        return QTensor.wrap(taken, token.replace(layout="portable", weight_shape=shape))

    def _portable(self) -> QTensor:
        """Makes a new weight in the portable layout, on the same device."""
        return QTensor.wrap(self._tensors_in("portable", keep=False), self.token.replace(layout="portable"))

    def _alias(self, **changes: Any) -> QTensor:
        """Makes a weight that shares the tensors of this one."""
        with _lock:  # a copy that copy_ does not know yet would miss what it writes
            stored = self.stored
            return QTensor.wrap(stored.tensors, stored.token.replace(**changes), self._copies)

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = _as_parameter(self._map(torch.clone), getattr(self, "_is_param", False))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        token = self.token
        tensors = self._tensors_in("portable", keep=False)
        facts = (token.format, token.group_size, token.weight_shape, token.dtype, token.transposed)
        # ``torch.load(weights_only=True)`` knows this function of the package before it reads any checkpoint.
        more = getattr(self, "_is_param", False), token.experts, token.activation
        return sys.modules[__package__].rebuild, (tensors, *facts, *more)

    # The protocol of a subclass that wraps several tensors: Module.to swaps such parameters in place.
    def __tensor_flatten__(self) -> tuple[list[str], Token]:
        if self._flattened is not None:
            is_portable = self._flattened[0].startswith(PORTABLE)  # whatever layout calls have converted it to since
            return self._flattened, self.token.replace(layout="portable") if is_portable else self.token
        if TracingContext.try_get() is not None and not torch.compiler.is_exporting():
            # torch.compile looks at the tensors now, and reads them again at each call: let them be what kernels read.
            self.relayout_(kernels.layout_of(self))
            self._is_compiled = True
        if self._is_compiled and not torch.compiler.is_exporting():
            return list(find(self.token.format).tensor_names), self.token
        exported.let_be_saved()
        # An exported program reads them by name in other processes, and after calls that have converted the weight.
        return list(self.portable_names), self.token.replace(layout="portable")

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], token: Token, size: Any, stride: Any) -> QTensor:
        tensors = {name.removeprefix(PORTABLE): tensor for name, tensor in inner.items()}
        ordered = tuple(tensors[name] for name in find(token.format).tensor_names)
        made = QTensor.wrap(ordered, token.replace(device=ordered[0].device))
        made._flattened, made._copies.is_argument = list(inner), True
        return made

    def _stable_hash_for_caching(self) -> str:
        """Returns the name of this weight in torch.compile's cache, whose graphs are what this code made of it."""
        return f"{_code_digest()} {self.token.facts()}"

    @classmethod
    @run_as_it_is
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        handler = FUNCTIONS.get(func) or OPERATORS.get(str(func))
        if handler is not None:
            named = dict(kwargs or {})
            if not args and "input" in named:  # as torch calls the first argument of its functions
                args = (named.pop("input"),)
            return handler(func, args, named)
        if str(func) == _INNER_TENSOR:
            return getattr(args[0], args[1])
        return refuse(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._alias()
        if func is torch.ops.aten.clone.default:  # torch.export keeps copies of what it traced with
            return args[0]._map(torch.clone)
        return refuse(func, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        token = self.token
        parameter = ", Parameter" if getattr(self, "_is_param", False) else ""
        transposed = ", transposed" if token.transposed else ""
        activation = f", activation={token.activation!r}" if token.activation else ""
        return (
            f"QTensor({token.format}, group_size={token.group_size}, shape={token.shape}, layout={token.layout!r}, "
            f"dtype={token.dtype}, device={str(token.device)!r}{activation}{transposed}{parameter})"
        )

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __len__(self) -> int:
        return self.token.shape[0]


def _in_portable_layout(name: str) -> property:
    def read(weight: QTensor) -> torch.Tensor:
        names = find(weight.token.format).tensor_names
        return weight._tensors_in("portable", keep=True)[names.index(name)]

    return property(read)


for _name in TENSOR_NAMES:
    setattr(QTensor, PORTABLE + _name, _in_portable_layout(_name))


def rebuild(
    tensors: Tensors,
    format: str,
    group_size: int | None,
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool = False,
    parameter: bool = False,
    experts: int | None = None,
    activation: str | None = None,
) -> QTensor:
    """Rebuilds a ``QTensor`` from the arguments that its pickle stores. ``jitgen.quant.rebuild`` calls this."""
    # torch.save's older format has the numbers after the pickle: torch.load reads them when this has returned.
    facts = {"transposed": transposed, "experts": experts, "filled": False, "activation": activation}
    made = QTensor(tuple(tensors), format, group_size, weight_shape, dtype, **facts)  # type: ignore[arg-type]
    exported.loaded()
    return _as_parameter(made, parameter)


def reduce_shared(weight: QTensor) -> tuple[Any, ...]:
    """Sends a weight to another process of this machine: its tensors as they are, in shared memory or on the GPU.

    They are those that the weight keeps. A copy in the portable layout, which other pickles have, would be freed, and
    its shared memory with it, before the other process has opened it.
    """
    stored = weight.stored
    return rebuild_shared, (stored.tensors, stored.token, getattr(weight, "_is_param", False))


def rebuild_shared(tensors: Tensors, token: Token, parameter: bool) -> QTensor:
    """Rebuilds the weight that ``reduce_shared`` has sent."""
    return _as_parameter(QTensor.wrap(tensors, token.replace(device=tensors[0].device)), parameter)


ForkingPickler.register(QTensor, reduce_shared)
distributed.let_be_broadcast()


def _as_parameter(tensor: QTensor, parameter: bool) -> QTensor:
    if parameter:
        tensor._is_param = True
    return tensor


@cache
def _code_digest() -> str:
    """Returns the sha256 over the modules that say what a graph does with a weight."""
    return folders_digest(Path(__file__).parent)


def _lasting() -> AbstractContextManager[Any]:
    """Enters a context for what a weight keeps: tensors made within ``inference_mode`` would fit no later call with
    gradients."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def floating(dtype: torch.dtype) -> torch.dtype:
    """Returns ``dtype`` if it is a floating-point one; UnsupportedError otherwise."""
    if not dtype.is_floating_point:
        raise UnsupportedError(f"a quantised weight has no dtype {dtype}; use a floating-point one, such as bfloat16")
    return dtype
