"""Says what to write in place of functions that jitgen has no row for, where other functions do the same.

Neighbours: ``Trace`` of ``trace/tracer.py`` ends its errors with these lines. Each is tried by a test.
"""

from __future__ import annotations

ANY = "compute it outside the decorated function, or write it with supported operations"
COMPLEX = ("view_as_complex", "view_as_real", "complex", "polar", "real", "imag")
"""Functions of complex numbers."""
READS = ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__complex__")
"""Functions that read elements of a tensor as Python values."""
VALUE = "keep it a tensor, or compute it outside the decorated function and pass it as an argument"

_SIZE = "the size of its result depends on data: "
REMEDIES = {
    "allclose": "torch.isclose(a, b).all() is a tensor of it; its value is known outside of the decorated function",
    "argwhere": f"{_SIZE}torch.nonzero_static(x, size=n) has n rows",
    "as_strided_copy": "write torch.as_strided(x, size, stride).clone()",
    "as_strided_scatter": "write x.flatten().index_copy(0, at.flatten(), source.flatten()).view(x.shape), "
    "where at = torch.arange(x.numel()).as_strided(size, stride)",
    "bincount": f"{_SIZE}for numbers below n write "
    "torch.zeros(n, dtype=torch.int64).index_add(0, x, torch.ones_like(x, dtype=torch.int64))",
    "embedding_renorm_": "rescale the weight before the call, and pass max_norm=None",
    "empty_permuted": "write torch.empty of the shape in memory, and permute it",
    "empty_strided": "write torch.empty of the shape in memory, and transpose or slice it",
    "equal": "(a == b).all() is a tensor of it; its value is known outside of the decorated function",
    "histogram": "the counts are torch.histc(x, bins, low, high), and the edges torch.linspace(low, high, bins + 1)",
    "masked_select": f"{_SIZE}"
    "keep the shape with torch.where(mask, x, 0), or call it outside of the decorated function",
    "new_empty_strided": "write x.new_empty of the shape in memory, and transpose or slice it",
    "resize_": "slice it, or join it to zeros with torch.cat",
    "resize_as_": "slice it, or join it to zeros with torch.cat",
    "unique": f"{_SIZE}"
    "after ordered = x.flatten().sort()[0], ordered[1:] != ordered[:-1] says where a new number begins",
    "unique_consecutive": f"{_SIZE}x[1:] != x[:-1] says where a new number begins",
}


def remedy(name: str) -> str:
    """Returns what to write in place of the function ``name``, which jitgen has no row for."""
    last = name.rpartition(".")[2]
    return REMEDIES.get(last, VALUE if last in READS else ANY)
