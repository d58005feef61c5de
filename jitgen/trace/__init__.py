"""Traces a Python function to a graph (``ir/graph.py``).

``run`` runs the function on ``proxy`` tensors and symbolic ``numbers``, and ``tracer`` takes their calls. ``guards``
records what the run relied on, ``captures`` finds what the function closes over, and ``traced`` is what is left.
``importing`` runs functions of jitgen's own, with which nothing of that can happen: what Dynamo recorded.
``table`` finds the *row* of each torch function that is called: a Python function that makes its nodes. Rows are in the
modules of ``table.ROW_MODULES``.
"""
