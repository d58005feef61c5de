"""``python -m jitgen``: the same as the command ``jitgen``."""

from jitgen.cli import main

main()
