"""Reads checkpoints of other programs as quantised weights: ``jitgen.load_quantized``.

::

    load.py                what users call; puts weights into a model
    experts.py             matrices of experts become the one parameter of three dimensions that the model has
    files.py, gguf_file    opens a path: safetensors, GGUF, shards, pickles
    source.py              tensors by name, and what a reader is
    table.py               the readers, in the order in which they are asked
    gptq  awq  hqq  bitsandbytes  compressed_tensors  scaled  modelopt  quark  torchao  gguf  native
                           a reader each: how weights of that kind are found, unpacked, and whose numbers are equal
    label.py               what a config says of one weight, compared with its tensors
    weight.py              codes, scales and zero-points become a ``QTensor``
"""
