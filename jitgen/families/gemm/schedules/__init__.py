"""The rules of each dialect: ``choose(problem)`` gives a schedule, ``prologue(computed, target)`` decides on fusion."""
