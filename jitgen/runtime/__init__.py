"""Launching: CUDA kernels through the driver, CPU kernels through their C ABI, Triton's interpreter for tests."""
