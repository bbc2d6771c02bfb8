"""Medians of pairs: two who ran in the same round shared the noise of that round, so their ratio is freer of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of what the rounds gave."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return plain values."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of some values."""
    low, median, high = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of ours / theirs, round by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each round, the time of the slowest rank."""
    return [max(times) for times in zip(*ranks, strict=True)]
