"""Connects jitgen to Hugging Face: a quantiser of ``transformers``, and layers for the ``kernels`` package.

``quantizer`` registers ``JitgenConfig`` with transformers when it is imported, and ``jitgen.JitgenConfig`` imports it.
``layers`` has what ``kernelize`` puts into models. Nothing else of jitgen imports this package, and ``quantizer`` alone
imports transformers.
"""
