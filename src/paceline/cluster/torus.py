"""A torus: chips joined to their neighbours along axes, as TPUs are.

Ranks run along the first axis, then the second. Rates follow Austin et al., How to Scale Your Model, 2025: rings are
used in both directions, several axes at once, and an axis closes to a ring where its length is a multiple of 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Ways:
    """What a group has of a torus, for each group.

    Attributes:
        links: links of each chip that its collectives use.
        hops: links on the way between the two chips farthest from each other.
        crowding: of an all-to-all, by how much longer it takes than through one link: the longest axis decides.
    """

    links: Numbers
    hops: Numbers
    crowding: Numbers


def shape(devices: int, axes: int) -> tuple[int, ...]:
    """Return the lengths of the axes of a slice with so many chips: as equal as its factors allow."""
    lengths = [1] * axes
    for factor in reversed(_factors(devices)):
        shortest = lengths.index(min(lengths))
        lengths[shortest] *= factor
    return tuple(sorted(lengths))


def ways(devices: int, axes: int, size: Numbers, stride: Numbers) -> Ways:
    """Return what groups of `size` ranks, `stride` apart, have of a slice of `devices` chips."""
    links, hops = np.zeros_like(size), np.zeros_like(size)
    crowding = np.ones_like(size)
    began = 1
    for length in shape(devices, axes):
        extent = np.minimum(began * length, stride * size) / np.maximum(began, stride)
        extent = np.maximum(np.floor(extent), 1.0)
        is_ring = (extent == length) & (length % 4 == 0)
        links += np.where(extent > 1, np.where(is_ring, 2.0, 1.0), 0.0)
        hops += np.where(is_ring, np.floor(extent / 2), extent - 1)
        crowding = np.maximum(crowding, np.where(is_ring, extent / 8, extent / 4))
        began *= length
    return Ways(np.maximum(links, 1.0), np.maximum(hops, 1.0), crowding)


def _factors(number: int) -> list[int]:
    """Return the prime factors, ascending."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found + ([number] if number > 1 else [])
