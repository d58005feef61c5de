"""Compiles kernels: each module turns a ``KernelSource`` into an ``Artifact`` (``jitgen/spec.py``) without a device.
Each module turns a ``KernelSource`` into an ``Artifact`` (``jitgen/spec.py``); none needs a device.

A compiler module has ``toolchain`` (which versions this machine has), ``prepare`` (adds the compiler's own flags to a
source) and ``compile``. ``routes`` chooses the module for a backend.
"""
