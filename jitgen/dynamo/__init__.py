"""torch.compile, both ways.

::

    torch.compile(f)                          a decorated function within it is an operator           region.py
    torch.compile(model, backend="jitgen")    the model's graph is cut into programs of kernels       backend.py
        Dynamo's graph -> segments            what has rows, and what stays with torch, by layer      cut.py
        segment -> Program                    a decorated function; equal layers share one            program.py
        report                                shares of nodes, FLOPs and time in generated kernels    report.py

Importing this imports Dynamo, and registers the backend ``"jitgen"``. Where jitgen is installed, torch finds it by its
entry point without that.
"""
from torch._dynamo.backends import registry

from jitgen.dynamo.backend import backend

__all__ = ["backend"]

if "jitgen" not in registry._COMPILER_FNS:
    registry.register_backend(backend, name="jitgen")
