"""How well tiles of a product fill a device: its output is computed in tiles, as many at once as there are units.

The last wave of tiles leaves units idle, and tiles that hang over the edge compute what nobody reads. Libraries choose
among tile sizes, and split the inner dimension where an output is too small for all units; the best choice counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 128, 0.8), (64, 64, 0.6))
"""Rows, columns, and the share of the largest tiles' speed that each reaches: smaller ones read more for each sum."""

SPLITS = ((1, 1.0), (2, 0.95), (4, 0.9))
"""Parts of the inner dimension that are summed apart, and the share of the speed that is left."""

SHORTEST = 256
"""The inner dimension that each part keeps at least."""

IDLE = 0.5
"""Share of a last wave's idle time that is lost: the rest goes to what runs next, or to uneven tiles."""


def filled(sizes: NDArray[np.float64], units: int) -> NDArray[np.float64]:
    """Return the share of a device's units that a product keeps busy with what is wanted.

    Args:
        sizes: rows, columns and inner dimension, in front.
        units: how many tiles the device computes at once.
    """
    rows, columns, inner = sizes
    best = np.zeros(np.shape(rows))
    for high, wide, speed in TILES:
        tiles = np.ceil(rows / high) * np.ceil(columns / wide)
        wanted = rows * columns / (high * wide)
        for parts, kept in SPLITS:
            waves = tiles * parts / units
            whole = np.ceil(waves)
            busy = wanted * parts / units / (whole - (1 - IDLE) * (whole - np.maximum(waves, 1.0)))
            best = np.maximum(best, np.where((parts == 1) | (inner / parts >= SHORTEST), speed * kept * busy, 0.0))
    return best
