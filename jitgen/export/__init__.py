"""Makes packages of AOTInductor that run without Python: ``jitgen.package``.

::

    package(exported program) -> model.pt2                                        package.py
        each node of jitgen's -> Program: its graph, and the tensors it reads     nodes.py
        Program, at every size -> Table: launches, and the integers they take     table.py
        tables, kernels -> C++ -> one object that registers torch operators       source.py, build.py
        the exported program with these operators -> torch._inductor

Nothing else imports this package. ``operators.hpp`` is the static part of the C++: it runs what the tables say.
"""
