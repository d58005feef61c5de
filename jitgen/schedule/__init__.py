"""Defines what a schedule is and how one is chosen: declared values, records of chips, measured choices."""
