"""Launching: GPU kernels through the CUDA driver, CPU kernels through their C ABI, Triton's interpreter for tests.

``launcher`` writes the function that a warm call runs; ``cuda``, ``cpu``, ``torch_operator`` and ``interpreter`` load
kernels for it; ``guards`` and ``overlap`` check its tensors.
"""
