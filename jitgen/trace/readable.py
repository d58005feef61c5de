"""Which tensors a kernel can read: arguments and captured tensors alike."""

from __future__ import annotations

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that kernels take; a subclass may mean anything by its elements."""


def is_traced_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` stands for one that torch will have when it runs what it traces, or for a batch of them."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or is_functorch_wrapped_tensor(tensor)


def why_unreadable(tensor: torch.Tensor) -> str | None:
    """What keeps a kernel from reading the elements of ``tensor`` at its address, and what to do; None if nothing does.

    Some tensors of torch have no address, or one that is 0: those within ``torch.func.vmap``, zero tensors of forward
    derivatives, tensors whose storage has been freed.
    """
    if type(tensor) not in TENSORS:
        return f"tensors of type {type(tensor).__name__} are not supported"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor within a torch.func transform (vmap, grad, jvp) has no memory; call the function outside of it"
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
