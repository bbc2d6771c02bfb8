"""What a described cluster says that collectives take, to stand beside what was measured."""

from __future__ import annotations

from paceline.bench.collectives.exchanges import Exchange, Kind
from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.files import load
from paceline.errors import ClusterError
from paceline.simulator.calibration.calibrate import default_path

AUTO, NONE = "auto", "none"


def expected_cluster(given: str) -> Cluster | None:
    """Return the cluster that is named or described in a file; for `auto`, what `paceline calibrate` wrote, if it did.

    Raises:
        ClusterError: there is no such cluster, or its file is refused.
    """
    if given == NONE:
        return None
    if given != AUTO:
        return load(given)
    try:
        path = default_path()
    except ClusterError:  # nothing is cached, so nothing was calibrated
        return None
    return load(path) if path.is_file() else None


def expected_seconds(cluster: Cluster, exchange: Exchange) -> float:
    """Return the seconds of a collective among neighbouring ranks of a cluster."""
    # Benchmarks count what a rank hands to an all-to-all, clusters what all ranks do.
    nbytes = exchange.size * (exchange.ranks if exchange.kind is Kind.ALL_TO_ALL else 1)
    return float(collective_seconds(cluster.of(exchange.ranks), exchange.kind.value, nbytes, exchange.ranks, 1))
