"""Decides which tensors a kernel can read: arguments and captured tensors alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from jitgen.errors import UnsupportedError
from jitgen.quant.fakes import is_traced

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that kernels take; a subclass may mean anything by its elements."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of numbers that torch knows as symbols while it traces."""

TANGENT = (
    "a dual tensor of forward-mode AD (torch.autograd.forward_ad): kernels compute no tangents; call the function "
    "outside of dual_level(), or the undecorated one within it"
)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Returns whether eager torch would propagate a tangent of ``tensor``. Outside of ``dual_level()`` no tensor has
    one, which one comparison tells; within, each tensor takes some 10 us."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    if is_functorch_wrapped_tensor(tensor) and any(
        transform.key() == TransformType.Jvp for transform in get_interpreter_stack() or ()
    ):
        return True  # of torch.func.jvp, jacfwd and the like: what varies there has one
    with torch._C._DisableFuncTorch():
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_tangents(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raises UnsupportedError if one of ``tensors`` is a dual tensor, of which a kernel would read the primal alone."""
    if forward_ad._current_level >= 0 and any(map(has_tangent, tensors)):
        raise UnsupportedError(f"{name}: {TANGENT}")


def any_traced(leaves: Iterable[Any]) -> bool:
    """Returns whether some argument stands for a value that torch will have later, or for a batch of values: a fake
    tensor, a tensor within a transform of ``torch.func``, a symbolic size."""
    return any(is_traced(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, SYMBOLIC) for leaf in leaves)


def why_unreadable(tensor: torch.Tensor) -> str | None:
    """Explains why a kernel cannot read the elements of ``tensor`` at its address, and what to do; None if it can.

    Some tensors of torch have no address, or one that is 0: those within ``torch.func.vmap``, zero tensors of forward
    derivatives, tensors whose storage has been freed.
    """
    if isinstance(tensor, FakeTensor):
        return (
            "a fake tensor has no memory, which a plan (bind) and out= need; call the function itself. lower() and "
            "source() take jitgen.TensorSpec(x.shape, x.dtype) in its place"
        )
    if type(tensor) not in TENSORS:
        return f"tensors of type {type(tensor).__name__} are not supported"
    if is_functorch_wrapped_tensor(tensor):
        return "a tensor within a torch.func transform (vmap, grad, jvp) has no memory; call the function outside of it"
    if is_legacy_batchedtensor(tensor):
        return (
            "a batch of gradients (is_grads_batched=True, or vectorize=True); call torch.autograd.grad for one after "
            "another, or pass vectorize=False"
        )
    if has_tangent(tensor):
        return TANGENT
    if tensor.is_nested:
        return "a nested tensor; only strided ones are supported, such as .to_padded_tensor(0)"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}; only strided ones are supported, such as .to_dense()"
    if tensor.is_neg() or tensor.is_conj():
        return "a view whose elements are not those in memory (of .imag or .conj()); pass x.resolve_neg()"
    try:
        has_memory = bool(tensor.data_ptr()) or not tensor.numel() or tensor.is_meta
    except RuntimeError as error:
        return f"a tensor without memory ({error})"
    return None if has_memory else "a tensor without memory (a zero tensor, or its storage was freed); pass a clone"
