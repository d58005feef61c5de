"""From bodies to source text: the template environment, and one printer per dialect."""
