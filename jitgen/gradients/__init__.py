"""Differentiates traced functions: the backward of a graph runs generated kernels as any function does.

::

    rules.py       for each pointwise operation, the gradient of every operand: one row
    structured.py  the same for reductions, products, views and the other operations that have attributes
    plan.py        which values of the forward a backward reads: which are inputs, saved, or computed again
    values.py      what rules compute with: nodes of the backward, and torch's functions of them
    replay.py      nodes of the forward as values of the backward
    backward.py    the graph of a backward

``call/derivative.py`` is the ``torch.autograd.Function`` that a call with gradients goes through. A backward is fused,
stored, recorded and prewarmed as the graph of any function is, and a second derivative is the backward of a backward.
"""
