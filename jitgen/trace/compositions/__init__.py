"""Writes torch functions in other torch functions, which the trace follows in their place.

A module here reads as PyTorch code on the user's tensors; the checks at the head of a function are those of torch's C++
functions, whose dtypes and shapes its operations alone would not refuse. Where torch raises an error for *elements* of
a tensor (a class that does not exist, a probability above 1), a kernel cannot; the result is NaN then.
"""
