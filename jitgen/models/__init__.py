"""Compiles whole models by their repeated blocks, without Dynamo: ``jitgen.compile(model)``.

::

    model -> units                 the blocks of its lists, and what is left around them      units.py
    module -> State                what its forward may read: tensors, numbers, guarded values    state.py
    Comparison                     of what it reads by name with what that was                 comparison.py
    State -> template              a copy of the module, for a trace to run                    template.py
    call -> leaves, structure      of its arguments                                            structure.py
    Kind, Route                    modules of one structure share traces, programs, kernels    kinds.py
    caches of transformers         layers that a trace updates, and calls between two programs  caches.py
    GraphForward                   calls of the whole model as CUDA graphs                    graphs.py
    UnitForward, compile           what runs in place of a module's forward                    compile.py

The Python code of a unit runs once for each kind of unit and of call; ``docs/whole-models.md`` says what is compared at
every call, so that none is answered by a trace that is not its own.
"""
