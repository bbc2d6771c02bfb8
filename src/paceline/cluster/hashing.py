"""Flows that switches place by a hash: how full the fullest of equal links gets.

Balls into bins. The links' loads are taken to be independent, each the binomial that it is; what is so found for the
fullest is within 4 % of the exact expectation (Raab and Steger, 1998, say how it grows).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

Numbers = NDArray[np.float64]


def fullest(flows: Numbers, links: Numbers) -> Numbers:
    """Return the expected number of flows on the fullest of so many links; both arrays are broadcast and rounded."""
    pairs = np.broadcast_arrays(np.maximum(np.round(flows), 1.0), np.maximum(np.round(links), 1.0))
    stacked = np.stack([pair.ravel() for pair in pairs])
    distinct, where = np.unique(stacked, axis=1, return_inverse=True)
    found = np.array([_fullest(int(count), int(among)) for count, among in distinct.T])
    return found[where.ravel()].reshape(pairs[0].shape)


def _fullest(flows: int, links: int) -> float:
    """Sum the probabilities that the fullest link has more than 0, 1, 2, ... flows."""
    if links == 1:
        return float(flows)
    mean = flows / links
    least = np.ceil(mean)  # the fullest has never less
    most = min(flows, np.ceil(mean + 8 * np.sqrt(mean) + 30))
    at_most = special.bdtr(np.arange(least, most), flows, 1 / links)
    return float(least + np.sum(1 - at_most**links))
