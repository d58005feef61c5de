"""``QTensor``: a quantised weight that is a ``torch.Tensor`` of the dequantised weight's shape.

It consists of plain tensors (``tensors``) in one layout and a ``token`` that says which (``storage``). It may be used
wherever a weight is: in a ``Parameter``, a state dict, a checkpoint, ``F.linear``, ``x @ w.T``. The table in
``functions`` lists what torch may do with it; anything else is an ``UnsupportedError``, never a silent dequantisation.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._guards import TracingContext

from jitgen.errors import FormatError
from jitgen.quant import distributed, eager, exported, layouts, pickling
from jitgen.quant.formats import check_group_size, find
from jitgen.quant.functions import FUNCTIONS, METADATA, OPERATORS, refuse
from jitgen.quant.layouts import Tensors, portable
from jitgen.quant.storage import PORTABLE, StoredWeight, floating, settled
from jitgen.quant.token import Token, intern

_INNER_TENSOR = "export.access_subclass_inner_tensor.default"
"""The operator by which exported programs read one of the tensors of a weight."""


class QTensor(StoredWeight):
    """A quantised weight. Made by ``jitgen.quantize``.

    Attributes:
        tensors: (codes, scales) or (codes, scales, zeros): plain tensors in this tensor's layout.
        token: everything else about it; equal facts are the same object.
        stored: the two of them, read at once.
    """

    _flattened: list[str] | None = None
    """The names of the tensors of which torch made this weight; it knows them by these names."""

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
    ) -> QTensor:
        """A weight of tensors that exist: ``weight_shape`` is (N, K), ``dtype`` what ``dequantize`` returns by default.

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
        token = intern(row.name, group_size, layout, shape, floating(dtype), tensors[0].device, transposed, experts)
        made = QTensor._of(settled(tuple(tensors)), token)
        made._copies.is_checked = filled
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = _as_parameter(self._map(torch.clone), getattr(self, "_is_param", False))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        token = self.token
        tensors = self._tensors_in("portable", keep=False)
        facts = (token.format, token.group_size, token.weight_shape, token.dtype, token.transposed)
        return pickling.rebuild, (tensors, *facts, getattr(self, "_is_param", False), token.experts)

    # The protocol of a subclass that wraps several tensors: Module.to swaps such parameters in place.
    def __tensor_flatten__(self) -> tuple[list[str], Token]:
        if self._flattened is not None:
            is_portable = self._flattened[0].startswith(PORTABLE)  # whatever layout calls have converted it to since
            return self._flattened, self.token.replace(layout="portable") if is_portable else self.token
        if TracingContext.try_get() is not None and not torch.compiler.is_exporting():
            # torch.compile looks at the tensors now, and reads them again at each call: let them be what kernels read.
            self.relayout_(eager.kernels.layout_of(self))
            return list(find(self.token.format).tensor_names), self.token
        exported.let_be_saved()
        # An exported program reads them by name in other processes, and after calls that have converted the weight.
        return list(self.portable_names), self.token.replace(layout="portable")

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], token: Token, size: Any, stride: Any) -> QTensor:
        tensors = {name.removeprefix(PORTABLE): tensor for name, tensor in inner.items()}
        ordered = tuple(tensors[name] for name in find(token.format).tensor_names)
        made = QTensor._of(ordered, token.replace(device=ordered[0].device))
        made._flattened = list(inner)
        return made

    def _stable_hash_for_caching(self) -> str:
        """The name of this weight in torch.compile's cache."""
        return repr(self.token.facts())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        handler = FUNCTIONS.get(func) or OPERATORS.get(str(func))
        if handler is not None:
            return handler(func, args, kwargs or {})
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


def rebuild(
    tensors: Tensors,
    format: str,
    group_size: int | None,
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool = False,
    parameter: bool = False,
    experts: int | None = None,
) -> QTensor:
    """A ``QTensor`` from the arguments that its pickle stores. ``jitgen.quant.rebuild`` calls this."""
    # torch.save's older format has the numbers after the pickle: torch.load reads them when this has returned.
    facts = {"transposed": transposed, "experts": experts, "filled": False}
    made = QTensor(tuple(tensors), format, group_size, weight_shape, dtype, **facts)  # type: ignore[arg-type]
    exported.loaded()
    return _as_parameter(made, parameter)


def reduce_shared(weight: QTensor) -> tuple[Any, ...]:
    """How a weight travels to another process of this machine: its tensors as they are, in shared memory or on the GPU.

    They are those that the weight keeps. A copy in the portable layout, which other pickles have, would be freed, and
    its shared memory with it, before the other process has opened it.
    """
    stored = weight.stored
    return rebuild_shared, (stored.tensors, stored.token, getattr(weight, "_is_param", False))


def rebuild_shared(tensors: Tensors, token: Token, parameter: bool) -> QTensor:
    """The weight that ``reduce_shared`` has sent."""
    return _as_parameter(QTensor._of(tensors, token.replace(device=tensors[0].device)), parameter)


ForkingPickler.register(QTensor, reduce_shared)
distributed.let_be_broadcast()


def _as_parameter(tensor: QTensor, parameter: bool) -> QTensor:
    if parameter:
        tensor._is_param = True
    return tensor
