"""The rule of each dialect by which ``schedule`` chooses: ``choose(problem) -> GemmSchedule``."""
