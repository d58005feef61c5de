"""``jitgen bench``: the measured figures of README, and how to repeat them.

``suite`` names the groups of cases and runs them; ``timing`` is the one place where a clock is read; ``measurement``
is what a measurement is, and the environment it holds in. A group is a module with one function
``(Bench) -> iterator of Measurement``::

    streaming   kernels bound by memory, beside copy_ of as many bytes, eager torch and torch.compile
    intensity   a repeated multiply, from bound by memory to bound by arithmetic
    overhead    what a warm call costs the host
    coldstart   what a first call costs, with an empty store and from the store, in new processes

Peers run in the same process on the same data, in turn with jitgen. Outermost layer: only ``cli/bench.py`` imports it.
"""
