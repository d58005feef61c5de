"""Launches kernels: on a GPU through the CUDA driver, on the CPU through their C ABI, and Triton's in its interpreter
for tests.

``launcher`` writes the function that a warm call runs; ``cuda``, ``cpu``, ``torch_operator`` and ``interpreter`` load
kernels for it; ``guards`` and ``overlap`` check its tensors.
"""
