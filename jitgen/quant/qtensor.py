"""``QTensor``: a quantised weight that is a ``torch.Tensor`` of the dequantised weight's shape.

It holds plain tensors (``parts``) in one layout and a ``token`` that says which. It stands where a weight stands: in a
``Parameter``, a state dict, a checkpoint, ``F.linear``, ``x @ w.T``. What torch may do with it is the table in
``functions``; anything else is an ``UnsupportedError``, never a quiet dequantisation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from jitgen import quant
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant import layouts
from jitgen.quant.formats import check_group_size, find
from jitgen.quant.layouts import Parts, portable
from jitgen.quant.token import Token, intern

_lock = threading.RLock()
"""Held while a weight's parts and token change together, or are read together."""


class Place:
    """Parts that a tensor holds, and their layout. Tensors themselves must have no weak references: ``Module.to`` swaps
    them, and torch swaps none that have."""

    __slots__ = ("__weakref__", "layout", "parts")

    def __init__(self, layout: str, parts: Parts):
        self.layout, self.parts = layout, parts


class Shared:
    """What tensors that are the same weight share: detached, transposed, of another nominal dtype or in another layout.

    Attributes:
        converted: parts by layout, kept for the next that asks.
        places: what these tensors hold, as long as they live.
    """

    __slots__ = ("converted", "places")

    def __init__(self) -> None:
        self.converted: dict[str, Parts] = {}
        self.places: weakref.WeakSet[Place] = weakref.WeakSet()


class QTensor(torch.Tensor):
    """A quantised weight. Made by ``jitgen.quantize``.

    Attributes:
        parts: (codes, scales) or (codes, scales, zeros): plain tensors in this tensor's layout.
        token: everything else about it; tensors alike have the same object.
    """

    parts: Parts
    token: Token
    _place: Place
    _shared: Shared
    _is_param: bool

    @staticmethod
    def __new__(
        cls,
        parts: Parts,
        format: str,
        group_size: int | None,
        weight_shape: tuple[int, int],
        dtype: torch.dtype,
        layout: str = "portable",
        transposed: bool = False,
    ) -> QTensor:
        """Of parts that exist already: ``weight_shape`` is (N, K), ``dtype`` what ``dequantize`` gives by default.

        Raises:
            FormatError: the parts do not fit.
        """
        row = find(format)
        check_group_size(group_size)
        shape = (int(weight_shape[0]), int(weight_shape[1]))
        if layout == "portable":
            portable.check(row, group_size, shape, parts)
        else:
            layouts.find(layout)
        if any(part.device != parts[0].device for part in parts):
            raise FormatError(f"parts on {', '.join(sorted({str(part.device) for part in parts}))}; move them to one")
        token = intern(row.name, group_size, layout, shape, _floating(dtype), parts[0].device, transposed)
        return QTensor._of(settled(tuple(parts)), token)

    @staticmethod
    def _of(parts: Parts, token: Token, shared: Shared | None = None) -> QTensor:
        """``shared``: of the tensors that this one is another view of."""
        rows, columns = token.shape
        strides = (1, rows) if token.transposed else (columns, 1)
        made = torch.Tensor._make_wrapper_subclass(
            QTensor, (rows, columns), strides=strides, dtype=token.dtype, device=token.device, requires_grad=False
        )
        made.parts = parts
        made.token = token
        made._shared = shared or Shared()
        made._hold(parts)
        return made

    def _hold(self, parts: Parts) -> None:
        self._place = Place(self.token.layout, parts)
        self._shared.places.add(self._place)

    # Python properties: torch's own would each take the way through __torch_function__.
    @property
    def format(self) -> str:
        return self.token.format

    @property
    def group_size(self) -> int | None:
        return self.token.group_size

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.token.layout

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
        """Of the parts, in this layout."""
        return sum(part.nbytes for part in self.parts)

    @property
    def codes(self) -> torch.Tensor:
        return self.parts[0]

    @property
    def scales(self) -> torch.Tensor:
        return self.parts[1]

    @property
    def zeros(self) -> torch.Tensor | None:
        return self.parts[2] if len(self.parts) > 2 else None

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as a plain tensor of this shape; ``dtype`` defaults to that of the weight it was made of."""
        from jitgen.quant.decode import decode

        token = self.token
        with torch.no_grad():
            parts = self._parts_in("portable", keep=False)
            weight = decode(
                find(token.format), token.group_size, token.weight_shape, parts, _floating(dtype or token.dtype)
            )
        return weight.t() if token.transposed else weight

    def with_layout(self, layout: str) -> QTensor:
        """The same weight in ``layout``. What is converted is kept, and given again by the next call."""
        if layout == self.token.layout:
            return self
        with _lock:
            parts = self._parts_in(layout, keep=True)
            return QTensor._of(parts, self.token.replace(layout=layout), self._shared)

    def relayout_(self, layout: str) -> QTensor:
        """This weight laid out anew, in place; what it was before is not kept."""
        with _lock:
            if layout != self.token.layout:
                # In this order: whoever sees the new token without the lock finds the parts that belong to it.
                self.parts = self._parts_in(layout, keep=False)
                self.token = self.token.replace(layout=layout)
                self._hold(self.parts)
            return self

    def _parts_in(self, layout: str, keep: bool) -> Parts:
        with _lock:
            token = self.token
            if layout == token.layout:
                return self.parts
            parts = self._shared.converted.get(layout)
            if parts is None:
                format = find(token.format)
                parts = layouts.convert(self.parts, token.layout, layout, format, token.group_size, token.weight_shape)
                parts = settled(parts)
                if keep:
                    self._shared.converted.setdefault(token.layout, self.parts)
                    parts = self._shared.converted.setdefault(layout, parts)
            return parts

    def _every_copy(self) -> list[tuple[str, Parts]]:
        """(layout, parts) of this weight wherever it lies: here, in converted copies, in other tensors that are it."""
        with _lock:
            held = [(place.layout, place.parts) for place in self._shared.places]
            found = [*self._shared.converted.items(), *held]
            return list({id(parts[0]): (layout, parts) for layout, parts in found}.values())

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> QTensor:
        """A tensor of its own: every part through ``function``."""
        parts = settled(tuple(map(function, self.parts)))
        return QTensor._of(parts, self.token.replace(device=parts[0].device, **changes))

    def _rows(self, rows: torch.Tensor) -> QTensor:
        """These rows (int64, on the CPU) of a weight that is not transposed, as a portable weight of its own."""
        token = self.token
        parts = self._parts_in("portable", keep=False)
        rows = rows.to(token.device)
        taken = settled(tuple(part.index_select(0, rows) for part in parts))
        shape = (len(rows), token.weight_shape[1])
        return QTensor._of(taken, token.replace(layout="portable", weight_shape=shape))

    def _alias(self, **changes: Any) -> QTensor:
        """A tensor that shares this one's parts."""
        with _lock:
            return QTensor._of(self.parts, self.token.replace(**changes), self._shared)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = _as_parameter(self._map(torch.clone), getattr(self, "_is_param", False))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        token = self.token
        parts = self._parts_in("portable", keep=False)
        facts = (token.format, token.group_size, token.weight_shape, token.dtype, token.transposed)
        return quant.rebuild, (parts, *facts, getattr(self, "_is_param", False))

    # What torch asks of a subclass that wraps several tensors: Module.to swaps such parameters in place.
    def __tensor_flatten__(self) -> tuple[list[str], Token]:
        return list(find(self.token.format).part_names), self.token

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], token: Token, size: Any, stride: Any) -> QTensor:
        parts = tuple(inner[name] for name in find(token.format).part_names)
        return QTensor._of(parts, token.replace(device=parts[0].device))

    def _stable_hash_for_caching(self) -> str:
        """What torch.compile's cache knows this weight by."""
        return repr(self.token.facts())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from jitgen.quant.functions import FUNCTIONS, METADATA, refuse

        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        handler = FUNCTIONS.get(func)
        if handler is None:
            return refuse(func, args)
        return handler(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._alias()
        from jitgen.quant.functions import refuse

        return refuse(func, args)


def settled(parts: Parts) -> Parts:
    """``parts``, written to the end.

    A kernel may fetch weights before the one ahead of it in the stream has ended (programmatic dependent launch), so
    whatever writes them has to be over when a tensor is made of them, and after they were changed in place.
    """
    if parts[0].is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(parts[0].device).synchronize()
    return parts


def rebuild(
    parts: Parts,
    format: str,
    group_size: int | None,
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool = False,
    parameter: bool = False,
) -> QTensor:
    """A tensor from what its pickle holds; ``jitgen.quant.rebuild`` is the name the pickle calls."""
    made = QTensor(tuple(parts), format, group_size, weight_shape, dtype, transposed=transposed)
    return _as_parameter(made, parameter)


def _as_parameter(tensor: QTensor, parameter: bool) -> QTensor:
    if parameter:
        tensor._is_param = True
    return tensor


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise UnsupportedError(f"a quantised weight has no dtype {dtype}; use a floating-point one, such as bfloat16")
    return dtype
