"""Which of many measured layouts to fit to: those that cover them best, whatever was measured there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def spread_out(points: NDArray[np.float64], count: int, start: int | None = None) -> list[int]:
    """Return the places of points so chosen that the farthest of all others is near one of them.

    This is the greedy k-center rule (Gonzalez 1985), at most twice as far as the best choice: from a first point on,
    each next one is the farthest from all chosen.

    Args:
        points: coordinates, one row each.
        count: how many to choose; all, where there are fewer.
        start: place of the first; None: the point nearest to the mean.
    """
    if start is None:
        start = int(np.argmin(np.sum((points - points.mean(axis=0)) ** 2, axis=1)))
    chosen = [start]
    distance = np.sum((points - points[start]) ** 2, axis=1)
    while len(chosen) < min(count, len(points)):
        distance[chosen[-1]] = -1.0  # its twins come before it
        farthest = int(np.argmax(distance))
        chosen.append(farthest)
        distance = np.minimum(distance, np.sum((points - points[farthest]) ** 2, axis=1))
    return chosen
