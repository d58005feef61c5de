"""torch's own operator tests, run through jitgen.

``torch.testing._internal.common_methods_invocations.op_db`` has sample arguments for every operator that torch tests
itself. ``python -m tests.conformance`` calls each of them decorated with ``jitgen.jit`` and in eager torch, and sorts
the samples into right, refused, wrong and crash:

    samples    the calls: operators, dtypes, a seeded choice of samples      judgement  one call, and what became of it
    tolerance  how far from float64 a result may be                          refusals   which operators jitgen refuses
    randomness whether random results have the distribution of eager torch's
    report     the figures of a run, as a table and as JSON

``refusals.txt`` names every operator that jitgen refuses as a whole, with the reason.
"""
