"""Flows that switches place by a hash: how full the fullest of equal links gets.

Balls into bins, by Levin, A representation for multinomial cumulative distribution functions, 1981: loads of links are
independent Poisson numbers, given that they add up to the flows. Few flows are counted exactly, of many the sum is
taken to be normal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

Numbers = NDArray[np.float64]

_COUNTED = 64
"""Up to so many flows are counted exactly."""


def fullest(flows: Numbers, links: Numbers) -> Numbers:
    """Return the expected number of flows on the fullest of so many links; both arrays are broadcast and rounded."""
    pairs = np.broadcast_arrays(np.maximum(np.round(flows), 1.0), np.maximum(np.round(links), 1.0))
    stacked = np.stack([pair.ravel() for pair in pairs])
    distinct, where = np.unique(stacked, axis=1, return_inverse=True)
    found = np.array([_fullest(int(count), int(among)) for count, among in distinct.T])
    return found[where.ravel()].reshape(pairs[0].shape)


def _fullest(flows: int, links: int) -> float:
    """Add up the probabilities that the fullest link has more than 0, 1, 2, ... flows."""
    if links == 1:
        return float(flows)
    mean = flows / links
    least = int(np.ceil(mean))  # the fullest has never less
    most = min(flows, int(np.ceil(mean + 8 * np.sqrt(mean) + 30)))
    limits = np.arange(least, most)
    if flows <= _COUNTED:
        none_above = np.array([_counted(flows, links, int(limit)) for limit in limits])
    else:
        none_above = _approximated(flows, links, limits.astype(np.float64))
    return float(least + np.sum(1 - np.clip(none_above, 0.0, 1.0)))


def _counted(flows: int, links: int, limit: int) -> float:
    """Return the probability that no link has more than `limit`."""
    loads = np.arange(limit + 1)
    each = np.exp(special.xlogy(loads, flows / links) - special.gammaln(loads + 1) - flows / links)
    together, power, left = np.ones(1), each, links
    while left:
        if left % 2:
            together = np.convolve(together, power)[: flows + 1]
        power = np.convolve(power, power)[: flows + 1]
        left //= 2
    return float(together[flows] / _all(flows)) if len(together) > flows else 0.0


def _approximated(flows: int, links: int, limits: Numbers) -> Numbers:
    """Return the same for many flows: what links have that are kept below the limit adds up to a normal number."""
    mean = flows / links
    below = special.pdtr(limits, mean)
    first = mean * special.pdtr(limits - 1, mean) / below
    second = np.where(limits >= 2, mean**2 * special.pdtr(np.maximum(limits - 2, 0), mean) / below, 0.0)
    spread = links * np.maximum(second + first - first**2, 1e-12)
    density = np.exp(-((flows - links * first) ** 2) / (2 * spread)) / np.sqrt(2 * np.pi * spread)
    found: Numbers = below**links * density / _all(flows)
    return found


def _all(flows: int) -> float:
    """Return the probability that a Poisson number is the mean that it has."""
    return float(np.exp(special.xlogy(flows, flows) - flows - special.gammaln(flows + 1)))
