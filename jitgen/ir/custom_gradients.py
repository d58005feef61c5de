"""States gradients of values by a formula, where the derivative of what computes them is another.

torch differentiates many functions by a formula of their own. Where they are composed here, the derivative of the
composition is the same number at most points, but not at all of them: it is NaN where a branch that was not chosen
overflows, or where 0 is divided by 0. So a ``custom_gradient`` node states the formula.

Its inputs are the value, and then pairs of an operand and a slope: the gradient of the operand is that of the node
times the slope. No gradient flows to the value, nor to a slope, unless the backward itself is differentiated, which
reads the slopes. A reduction's value has sizes of 1 where its operands and slopes have elements.

Only graphs that are differentiated have such nodes; the value takes their place where a graph is lowered
(``gradients/plan.py``).
"""

from __future__ import annotations

from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

from jitgen.ir.graph import Node
from jitgen.ir.nodes import CUSTOM_GRADIENT, VIEW

DETACHED = ("detach",)
"""Attrs of a view through which no gradient flows: ``x.detach()``, and what is computed under ``no_grad``."""
UNTRACKED_VIEW = ("untracked_view",)
"""Attrs of such a view that torch makes a leaf which requires grad where its tensor does: a view under ``no_grad``."""
UNTRACKED_CONTIGUOUS = ("untracked_contiguous",)
"""Attrs of such a view of what ``contiguous()`` returns under ``no_grad``: the tensor itself, or a copy of it."""
SAVED_VIEW = ("saved",)
"""Attrs of a view that is its operand: a mark that the forward saves this value for its backward."""
SHARED_EXTREMUM = ("shared",)
"""Attrs of a view that is its operand: a mark that the NaNs of a row share the gradient of its extremum."""
PRODUCT_OF_ALL = ("product_of_all",)
"""Attrs of a view that is its operand: a mark that ``torch.prod(x)`` multiplies all its elements."""
EXCLUDED_BASE = ("excluded",)
"""Attrs of a view that is its operand: a mark that a scatter's base has the neutral number where values are combined
with it (``include_self=False``)."""
TRANSPARENT = (SAVED_VIEW, SHARED_EXTREMUM, PRODUCT_OF_ALL, EXCLUDED_BASE)
"""Attrs of the marks that gradients flow through."""


def is_detached(node: Node) -> bool:
    """Returns whether ``node`` is a value through which no gradient flows, by ``detach`` or ``no_grad``."""
    return node.kind is VIEW and node.attrs in (DETACHED, UNTRACKED_VIEW, UNTRACKED_CONTIGUOUS)


def differentiated(node: Node) -> range:
    """Returns the positions of the inputs of ``node`` that a gradient may flow to."""
    if node.kind is CUSTOM_GRADIENT:
        return range(1, len(node.inputs), 2)
    return range(len(node.inputs))


def with_gradient(value: Any, *pairs: Any) -> Any:
    """Gives ``value`` its gradients, in a trace. ``pairs`` are operands that it is computed from, each followed by its
    slope.

    A slope may be a number. An operand that is a number has no gradient.
    """
    assert has_torch_function((value, *pairs)), "with_gradient is a function of traced tensors"
    return handle_torch_function(with_gradient, (value, *pairs), value, *pairs)


def shared(value: Any) -> Any:
    """Marks ``value``, in a trace, as one whose extremum is taken: if that is NaN, the NaNs share its gradient, as
    those of ``torch.max(x)`` do. ``torch.amax`` gives the whole row a gradient of NaN."""
    assert has_torch_function((value,)), "shared is a function of traced tensors"
    return handle_torch_function(shared, (value,), value)


def saved(value: Any) -> Any:
    """Marks ``value``, in a trace, as one that a backward is given; other pointwise values it computes again."""
    assert has_torch_function((value,)), "saved is a function of traced tensors"
    return handle_torch_function(saved, (value,), value)
