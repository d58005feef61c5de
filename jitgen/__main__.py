"""Runs the command ``jitgen`` as ``python -m jitgen``."""

from jitgen.cli import main

if __name__ == "__main__":  # worker processes import this module under another name
    main()
