"""Estimates how many tiles groups of rows take, of which a launch knows the number and the rows of all together.

Which rows a group has only the device knows. Experts of a model are chosen neither evenly nor by one law, so the model
takes the distribution that is the least sure of all with a mean: a group has k rows with a probability that falls by
the same factor from each k to the next (Jaynes, 1957). It lies between an even division and a Zipf law of exponent 1.2.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Groups:
    """Holds ``rows`` rows, which are divided among ``count`` groups; where ``even``, each has as many."""

    rows: int
    count: int
    even: bool = False

    def tiles(self, height: int) -> float:
        """Returns the expected number of tiles of ``height`` rows, which are of one group each; of even groups a last
        tile is half full."""
        if self.even:
            return self.count * max(1.0, self.rows / self.count / height + 0.5)
        falling = self.rows / (self.rows + self.count)
        return max(1.0, self.count * falling / (1 - falling**height))

    def share_of_short(self, most: int) -> float:
        """Returns the expected share of tiles of which the last of a group has at most ``most`` rows, which are fewer
        than those of a tile; 0 of even groups."""
        return 0.0 if self.even else 1 - (self.rows / (self.rows + self.count)) ** most

    @property
    def used(self) -> float:
        """Returns the expected number of groups that have rows."""
        return float(self.count) if self.even else max(1.0, self.count * self.rows / (self.rows + self.count))
