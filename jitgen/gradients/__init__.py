"""Differentiates traced functions: the backward of a graph runs generated kernels as any function does.

::

    rules.py       for each pointwise operation, the gradient of every operand: one row
    structured.py  the same for reductions, products, views and the other operations that have attributes
    plan.py        which values of the forward a backward reads: which are inputs, saved, or computed again
    replay.py      nodes of a graph as torch calls
    backward.py    the backward of a graph in torch calls, each of which is a row that makes nodes of another graph

``call/derivative.py`` is the ``torch.autograd.Function`` that a call with gradients goes through. It imports the
backward as a graph (``trace/importing.py``), which is fused, stored, recorded and prewarmed as that of any function is,
and a second derivative is the backward of a backward.
"""
