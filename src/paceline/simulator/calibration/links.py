"""The level of a network, and curves of collectives, from what collectives took between the ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Measured
from paceline.cluster.fabric import Fabric, Level

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class FittedLink:
    """What a collective takes: `latency_s` + bytes of the whole tensor * `per_byte_s`.

    Attributes:
        residuals: by bytes, measured over estimated seconds, less 1.
    """

    latency_s: float
    per_byte_s: float
    residuals: Mapping[float, float]


def fit_link(points: Points) -> FittedLink:
    """Return the latency and the seconds of a byte that explain all sizes, by their relative errors."""
    from scipy.optimize import nnls  # which takes a while to load

    sizes, seconds = (np.array(values) for values in zip(*points, strict=True))
    (latency, per_byte), _ = nnls(np.column_stack([1 / seconds, sizes / seconds]), np.ones(len(sizes)))
    found = latency + per_byte * sizes
    ratios = {size: float(taken / guess - 1) for size, taken, guess in zip(sizes, seconds, found, strict=True)}
    return FittedLink(float(latency), float(per_byte), ratios)


def level_of(points: Mapping[str, Points], ranks: int, fabric: Fabric, source: str) -> Level:
    """Return the level over which ranks exchanged.

    A gathering sends each rank's part around a ring: its bytes say the bandwidth, and its smallest size the latency of
    one of its `ranks` - 1 turns.
    """
    link = fit_link(points["all_gather"])
    turns = max(ranks - 1, 1)
    smallest = points["all_gather"][0][1]
    bandwidth = turns / ranks / link.per_byte_s if link.per_byte_s else 1e12
    latency = link.latency_s or smallest
    return Level(
        name=fabric.value,
        fabric=fabric,
        devices=None,
        bandwidth=float(f"{bandwidth:.3g}"),
        latency_s=float(f"{latency / turns:.3g}"),
        source=source,
    )


def curves_of(points: Mapping[str, Points], ranks: int) -> tuple[Measured, ...]:
    """Return what a cluster file keeps of collectives."""
    return tuple(
        Measured(kind, ranks, tuple((float(size), float(f"{seconds:.4g}")) for size, seconds in of_kind))
        for kind, of_kind in points.items()
    )
