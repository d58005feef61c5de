"""Compilers: a kernel source in, an artifact out. Each module has ``toolchain`` and ``compile``; none needs a device."""
