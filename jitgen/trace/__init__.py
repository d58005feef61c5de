"""From a Python function to a graph (``ir/graph.py``).

``tracer`` runs the function on ``proxy`` tensors and symbolic ``numbers``; ``guards`` records the conditions that the
run relied on, and ``captures`` finds what the function closes over. ``table`` finds the *row* of each torch function
that is called: a Python function that makes its nodes. Rows are in the modules of ``table.ROW_MODULES``.
"""
