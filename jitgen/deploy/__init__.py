"""Records which specialisations a program meets (``record``), and builds them before it is deployed (``prewarm``).

Between the two lies a ``manifest``; ``row_variants`` derives other numbers of rows from one recorded call, and the
``*_schema`` modules say what a manifest may hold.
"""
