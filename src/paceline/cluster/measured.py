"""Collectives that were measured on the cluster itself, in the place of what its levels say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster, Measured

Numbers = NDArray[np.float64]


def measured_seconds(
    cluster: Cluster, kind: str, nbytes: Numbers, size: Numbers, stride: Numbers, modelled: Numbers
) -> Numbers:
    """Return measured seconds where groups of that size were measured, within the innermost level; else `modelled`."""
    found = modelled
    innermost = cluster.levels[0].devices or cluster.devices
    for curve in cluster.measured:
        if curve.kind == kind:
            applies = (size == curve.size) & (size * stride <= innermost)
            found = np.where(applies, at(curve, nbytes), found)
    return found


def at(curve: Measured, nbytes: Numbers) -> Numbers:
    """Return seconds for so many bytes.

    Between points it is a straight line over the logarithms of both; below the first it stays, and above the last it
    grows by what each further byte took between the last two.
    """
    sizes, seconds = np.array(curve.points).T
    between: Numbers = np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), np.log(sizes), np.log(seconds)))
    if len(sizes) == 1:
        above: Numbers = between * (np.maximum(nbytes / sizes[-1], 1.0) - 1.0)
    else:
        above = np.maximum(nbytes - sizes[-1], 0.0) * max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    return between + above
