"""Writes once what every kernel family spells alike: operands in memory, parameters, launches, work, the frame of a
source. Families stand above this package, and it knows none of them."""
