"""Compilers: a kernel source in, an artifact out. Each has ``toolchain`` and ``compile``; none needs a device."""
