"""Parameter servers: many workers send to few servers at once, and all wait for what the servers receive through.

Beside the shared link there is incast: where switches drop packets (TCP), more senders than a port's buffer has room
for lose whole windows, and a push waits for a retransmission timeout (Phanishayee et al., Measurement and analysis of
TCP throughput collapse in cluster-based storage systems, FAST 2008). Other fabrics only share the link.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.cluster.cluster import Cluster
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.reach import Groups, crossings

Numbers = NDArray[np.float64]

WINDOW_BYTES = 10 * 1460
"""What a TCP sender sends before it hears anything: ten segments (RFC 6928)."""
TIMEOUT_S = 0.2
"""The shortest retransmission timeout of Linux (TCP_RTO_MIN)."""


def push_seconds(
    cluster: Cluster, nbytes: ArrayLike, workers: ArrayLike, servers: ArrayLike = 1, stride: ArrayLike = 1
) -> Numbers:
    """Return seconds until `servers` have got `nbytes` from each of the workers, an equal part each.

    Workers are `stride` ranks apart, and nobody between them sends; each server is a device of its own that receives as
    fast as one device can.
    """
    transfer, stall = _push(cluster, nbytes, workers, servers, stride)
    return transfer + stall


def server_seconds(
    cluster: Cluster, nbytes: ArrayLike, workers: ArrayLike, servers: ArrayLike = 1, stride: ArrayLike = 1
) -> Numbers:
    """Return seconds until workers have pushed `nbytes` of gradients and pulled as many bytes of parameters.

    What servers send meets no incast: each worker has a port of its own.
    """
    transfer, stall = _push(cluster, nbytes, workers, servers, stride)
    return 2 * transfer + stall


def _push(
    cluster: Cluster, nbytes: ArrayLike, workers: ArrayLike, servers: ArrayLike, stride: ArrayLike
) -> tuple[Numbers, Numbers]:
    """Return seconds of sending and receiving, and those of waiting for timeouts."""
    given = (np.asarray(value, dtype=np.float64) for value in (workers, nbytes, servers, stride))
    senders, each, among, apart = np.broadcast_arrays(*given)
    transfer, stall = np.zeros(senders.shape), np.zeros(senders.shape)
    # A server is one more member of the group: where there is one worker, two take part.
    groups = Groups(senders + 1, apart, np.ones_like(senders), among)
    slowest = max(group.link_slowdown for group in cluster.groups)
    for crossing in crossings(cluster, groups):
        level = crossing.level
        sending = each * crossing.inside / crossing.rate
        receiving = each * senders / among / (level.alone * level.efficiency / slowest)
        through = level.start_s + level.latency_s + np.maximum(sending, receiving)
        takes_part = crossing.crossed & (each > 0)
        transfer = np.where(takes_part, through, transfer)
        stall = np.where(takes_part, _stall(level, senders), stall)
    return transfer, stall


def _stall(level: Level, senders: Numbers) -> Numbers:
    """Return seconds that senders wait because a port's buffer has no room for what all send first."""
    if level.fabric is not Fabric.TCP or level.port_buffer is None:
        return np.zeros(senders.shape)
    return np.where(senders * WINDOW_BYTES > level.port_buffer, TIMEOUT_S, 0.0)
