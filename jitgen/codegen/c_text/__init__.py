"""Reads the text of a kernel that a user wrote in CUDA C++ or C++: its definition, its parameters and its hooks.

The text is divided into tokens, not parsed. That is enough to find a function and what its parameters are called, and
to say of a pointer that the function uses it in its hooks alone. Each module imports those above it:

- ``tokens``: names, marks, strings and directives; brackets that match
- ``types``: the dtypes of elements, and numbers
- ``definition``: a kernel's template, parameters and body
- ``hooks``: where rules may stand
- ``files``: what is included, where a text was read, flags

Neighbours: ``trace/kernels/c_kernel.py`` reads a user's file, ``families/launch/hooks.py`` rewrites the text.
"""
