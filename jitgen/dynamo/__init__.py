"""Connects jitgen to torch.compile, both ways.

::

    torch.compile(f)                          a decorated function within it is an operator           region.py
    torch.compile(model, backend="jitgen")    the model's graph is cut into programs of kernels       backend.py
        Dynamo's graph -> segments            what has rows, and what stays with torch, by layer      cut.py
        fake storages of values               what is new, and what a view, which torch makes         aliasing.py
        segment -> Program                    a decorated function; equal layers share one            program.py
        report                                shares of nodes, FLOPs and time in generated kernels    report.py

Torch finds the backend by its entry point. Where jitgen is on the path and not installed, ``import
jitgen.dynamo.registration`` registers it.
"""
