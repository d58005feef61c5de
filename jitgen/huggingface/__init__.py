"""Hugging Face: a quantiser of ``transformers``.

``quantizer`` registers ``JitgenConfig`` with transformers when it is imported, and ``jitgen.JitgenConfig`` imports it.
Nothing else of jitgen imports this package, and it alone imports transformers.
"""
