"""How a schedule is chosen: records of chips, measured choices, and the choice among a family's candidates."""
