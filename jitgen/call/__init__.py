"""Holds what a decorated function does when it is called: it finds the launch for its arguments, or makes one.

Imports point downwards::

    function         JitFunction: a call's path on one screen, methods, ``lower`` and the rest of the public face
    keywords         calls with keywords and ``out=``: arguments in order
    lower            the same for specs and for targets that are not here
    dispatch, plan   "same as the last call? launch"; outputs: which ``out=`` a plan accepts
    resolver         a call that is new: trace, lower, publish what was lowered (``events``), fetch, bind
    specialization   one trace, and the launchers bound from it
    arguments        leaves and structure; signature: what of them is compared
    table            what calls are looked up in, and how many of them it holds
    routing          backend, compiler and target
    opaque           what torch.compile leaves alone
    methods          what is remembered of each instance of a decorated method
    warm, plan_text  the text of generated functions

``eager_linear`` uses ``function`` for products with quantised weights outside ``jitgen.jit``.
"""
