"""Says what to do instead of a function of torch that a quantised weight does not take, by the kind of the function.

Errors call the weight ``w``.
"""

from __future__ import annotations

import re

from jitgen.quant.token import Token

_KINDS = {
    "join": "cat concat concatenate stack hstack vstack dstack row_stack column_stack block_diag",
    "piece": "__getitem__ narrow chunk split tensor_split index_select select unbind gather take diagonal",
    "shape": "view view_as reshape reshape_as flatten unflatten unsqueeze squeeze expand expand_as repeat tile permute "
    "transpose t T mT movedim broadcast_to unfold",
    "memory": "data_ptr storage typed_storage _typed_storage __dlpack__ __dlpack_device__ as_strided storage_type",
    "value": "numpy __array__ tolist item __float__ __int__ __bool__ __index__ __iter__ to_dense",
    "product": "linear matmul mm mv __matmul__ __rmatmul__ addmm bilinear",
    "contraction": "einsum tensordot bmm baddbmm dot inner outer chain_matmul multi_dot kron",
    "gradient": "backward grad retain_grad register_hook",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_LIKE = re.compile(r"(zeros|ones|full|rand|randn|randint)_like|new_(tensor|zeros|ones|full|empty|empty_strided)")
_IN_PLACE = re.compile(r"\w*[^_]_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")


def remedy(name: str, token: Token) -> str:
    """Returns what to do instead of the function ``name``, such as ``torch.Tensor.add_``, of a weight with this
    token."""
    names = name.split(".")
    leaf = names[1] if names[0] == "aten" and len(names) > 1 else names[-1]
    if names[-1] in ("__get__", "__set__") and len(names) > 1:
        leaf = names[-2]
    quantize = f"jitgen.quantize(..., {token.format!r}, {token.group_size})"
    if _IN_PLACE.fullmatch(leaf) or leaf in ("__setitem__", "data"):
        return f"its numbers cannot be changed one by one: quantise the new ones, w.copy_({quantize})"
    if _LIKE.fullmatch(leaf):
        return "make it from the facts: torch.zeros(w.shape, dtype=w.dtype, device=w.device), and so on"
    match _KIND_OF.get(leaf):
        case "product" | "contraction" | "piece" if token.experts is not None:
            return "use its matrices one by one, as F.linear(x, w[i])"
        case "join":
            return f"join the dense weights and quantise the result: {quantize} of torch.{leaf}([w.dequantize(), ...])"
        case "piece" if token.transposed:
            return "take rows or columns before it is transposed, or use w.dequantize()"
        case "piece":
            columns = f"whole groups of {token.group_size} columns, w[:, i:j]" if token.group_size else "all columns"
            return f"whole rows, w[i:j], and {columns}, are weights again; other elements are those of w.dequantize()"
        case "shape":
            return (
                "a quantised weight is a matrix (N, K), whose rows w.view(g, -1, K) divides among matrices: reshape "
                "the activation, or use w.dequantize()"
            )
        case "memory":
            return (
                "it consists of several tensors, w.tensors, and has no memory of its own: files are written by "
                "jitgen.save_quantized(state_dict, path) or torch.save, and w.dequantize() is one plain tensor"
            )
        case "value":
            return f"w.dequantize(){f'.{leaf}()' if leaf in ('numpy', 'tolist', 'item') else ''} has its numbers"
        case "product":
            return (
                "F.linear(x, w), x @ w.T and torch.addmm(bias, x, w.T) take one quantised weight, and activations that "
                "are plain tensors of floats: cast them, and dequantise the operand that is not the weight"
            )
        case "contraction":
            return "write the product as F.linear(x, w) or x @ w.T, which run a kernel, or use w.dequantize()"
        case "gradient":
            return "it takes no gradients: train parameters beside it, or the dense weight before it is quantised"
    return f"use w.dequantize(), a plain tensor, and {quantize} where the result is to be a quantised weight"
