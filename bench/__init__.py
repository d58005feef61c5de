"""``jitgen bench``: the benchmarks behind the figures of README.

``suite`` lists the groups of cases and runs them; only ``timing`` reads a clock; ``measurement`` defines what a
measurement is and records its environment. A group is a module with a function ``run(Bench) -> iterator of
Measurement``::

    streaming   kernels bound by memory, compared with copy_ of as many bytes, eager torch and torch.compile
    rows        reductions of rows, in the shapes that models have
    columns     reductions over a dimension other than the last
    reductions  reductions of very short rows, of few long rows and of all elements
    products    matrix products with quantised and dense weights
    batched     batched products
    intensity   a repeated multiply, from bound by memory to bound by arithmetic
    overhead    the time that a warm call takes on the host
    sweep       matrix products and attention of random sizes; only where it is named
    formats     products with weights of every format, beside int4; only where it is named
    packing     quantising weights into the layout that kernels read; only where it is named
    coldstart   the time of a first call in a new process, with an empty store and from the store

What models and rules are fitted to, and what else docs/measured has, comes from modules that are run by themselves, as
``python -m bench.gemm_timings``. Each runs on a GPU, but for the last two::

    gemm_timings         candidates of products, launched by themselves
    schedule_timings     schedules of Triton's products and of ``simt``, through whole calls
    split_k_timings      numbers of ranges of K
    row_timings          threads of a row
    attention_schedules  attention under other schedules than the chosen one
    attention_caches     a decoder's step over caches
    attention_training   forward and backward of attention
    llama_block          decoder blocks of Llama in plain PyTorch; on a CPU, too
    quantized_activations  products that quantise their activations
    cpu_quantised_results  kernels of layers of 8-bit products, and what one less could gain

``sizes`` draws, and ``records`` writes JSON. Peers run in the same process on the same data, alternating with jitgen.
``command`` is the command; ``jitgen/cli`` runs it where jitgen is imported from this checkout. The wheel has none of
it.
"""

GROUPS = (
    "streaming",
    "rows",
    "columns",
    "reductions",
    "products",
    "batched",
    "attention",
    "intensity",
    "overhead",
    "coldstart",
)
"""The groups that run where nothing is named."""
NOT_BY_DEFAULT = ("sweep", "formats", "packing", "compiles")
"""The groups that run only where they are named."""
