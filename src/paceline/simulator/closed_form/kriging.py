"""What a closed form leaves over, near steps that were measured: kriging, or Gaussian process regression.

The logarithm of measured over estimated seconds is taken for a sum of two smooth functions: one of what a block does
(its size, `tp`, the tokens of a micro-batch), one of the whole layout. Near fitted rows an estimate is corrected by
what they show, and its spread is small; far from all of them nothing is corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Numbers, Workload

COORDINATES = ("width", "tp", "tokens", "pp", "replicas", "micro_batches", "recompute", "network")
"""Of a step: logarithms to base 2, but for `recompute`, which is the value of a `Recompute`.

`width` is the hidden size of a GPT whose layers have as many parameters; `tokens` are those of a micro-batch on a rank;
`network` is the bandwidth of the outermost level, in bytes per second and device.
"""


@dataclass(frozen=True)
class Kernel:
    """How alike residuals are.

    Attributes:
        deviation: standard deviation of what it explains.
        reach: for each coordinate, the distance at which correlation has fallen to 0.6.
    """

    deviation: float
    reach: tuple[float, ...]

    def __call__(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the covariance of each step on the left with each on the right."""
        a, b = left / self.reach, right / self.reach
        squares = np.sum(a * a, axis=1)[:, None] + np.sum(b * b, axis=1) - 2 * (a @ b.T)
        return np.asarray(self.deviation**2 * np.exp(-0.5 * np.maximum(squares, 0.0)))


BLOCKS = Kernel(0.07, (0.6, 0.8, 0.8, np.inf, np.inf, np.inf, 0.7, np.inf))
LAYOUTS = Kernel(0.1, (0.6, 0.8, 0.8, 1.5, 2.0, 2.0, 0.7, 1.0))
NOISE = 0.03
"""Standard deviation between two runs of one layout."""
DOUBTFUL = 0.4
"""A residual of this size or more is taken for what it exceeds it by as noise: one odd run says little of others."""


def coordinates(workload: Workload, layouts: Layouts, cluster: Cluster) -> NDArray[np.float64]:
    """Return the coordinates of each layout, one row each."""
    block = next((block for block in workload.blocks if block.repeats), workload.blocks[0])
    parameters = sum((np.asarray(piece.value, dtype=np.float64) for piece in block.parameters), start=np.zeros(()))
    columns = (
        0.5 * np.log2(np.maximum(parameters, 1.0) / 12),
        np.log2(layouts.tp),
        np.log2(layouts.micro_batch * np.asarray(workload.tokens) / layouts.sp),
        np.log2(layouts.pp),
        np.log2(layouts.replicas),
        np.log2(layouts.micro_batches),
        layouts.recompute,
        np.log2(cluster.levels[-1].bandwidth),
    )
    return np.stack([np.broadcast_to(column, len(layouts)).astype(np.float64) for column in columns], axis=1)


def kriged(points: NDArray[np.float64], fitted: Sequence[Sequence[float]]) -> tuple[Numbers, Numbers]:
    """Return the expected residual at each point and its standard deviation.

    Args:
        points: coordinates, one row each.
        fitted: coordinates and, last, the residual of each fitted row.
    """
    table = np.asarray(fitted, dtype=np.float64)
    known, residuals = table[:, :-1], table[:, -1]
    noise = NOISE + np.maximum(np.abs(residuals) - DOUBTFUL, 0.0)
    within = covariance(known, known) + np.diag(noise**2)
    some, which = _distinct(points)
    across = covariance(some, known)
    weights = np.linalg.solve(within, np.column_stack([residuals, np.eye(len(known))]))
    explained = np.sum((across @ weights[:, 1:]) * across, axis=1)
    variance = BLOCKS.deviation**2 + LAYOUTS.deviation**2 + NOISE**2 - explained
    return (across @ weights[:, 0])[which], np.sqrt(np.maximum(variance, NOISE**2))[which]


def _distinct(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return distinct points, and which of them each point is: layouts differ in much that no coordinate tells."""
    code = np.zeros(len(points), dtype=np.int64)
    for column in points.T:
        values, index = np.unique(column, return_inverse=True)
        code = code * len(values) + index
    values, which = np.unique(code, return_inverse=True)
    one_of = np.zeros(len(values), dtype=np.int64)
    one_of[which] = np.arange(len(points))
    return points[one_of], which


def covariance(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how residuals at two sets of points vary together."""
    return BLOCKS(left, right) + LAYOUTS(left, right)
