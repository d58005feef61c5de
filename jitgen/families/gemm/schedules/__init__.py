"""Holds the rules of each dialect.

``candidates(problem)`` gives schedules, ``cost(problem, candidate)`` their estimated times in microseconds, and
``prologue(computed, device)`` decides on fusion.
"""
