"""Parameter servers: many workers send to few servers at once, and all wait for what the servers receive through.

Beside the shared link there is incast: where switches drop packets (TCP), more senders than a port's buffer has room
for lose whole windows, and a push waits for a retransmission timeout (Phanishayee et al., Measurement and analysis of
TCP throughput collapse in cluster-based storage systems, FAST 2008). Other fabrics only share the link.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.cluster.algorithms import Line
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
    each, senders, among, apart = _broadcast(nbytes, workers, servers, stride)
    transfer, stall_s = _push(cluster, senders, among, apart, np.ones_like(senders))
    return np.where(each > 0, transfer.wait_s + stall_s + each * transfer.per_byte_s, 0.0)


def server_seconds(
    cluster: Cluster, nbytes: ArrayLike, workers: ArrayLike, servers: ArrayLike = 1, stride: ArrayLike = 1
) -> Numbers:
    """Return seconds until workers have pushed `nbytes` of gradients and pulled as many bytes of parameters."""
    each, senders, among, apart = _broadcast(nbytes, workers, servers, stride)
    line = served(cluster, senders, among, apart, np.ones_like(senders))
    return np.where(each > 0, line.wait_s + each * line.per_byte_s, 0.0)


def served(cluster: Cluster, workers: Numbers, servers: Numbers, stride: Numbers, sharing: Numbers) -> Line:
    """Return a push and a pull, for each group of workers, `sharing` of which use the links of one host at once.

    What servers send meets no incast: each worker has a port of its own.
    """
    transfer, stall_s = _push(cluster, workers, servers, stride, sharing)
    return Line(2 * transfer.wait_s + stall_s, 2 * transfer.per_byte_s)


def _push(
    cluster: Cluster, workers: Numbers, servers: Numbers, stride: Numbers, sharing: Numbers
) -> tuple[Line, Numbers]:
    """Return sending and receiving, and the seconds of waiting for timeouts."""
    wait_s = per_byte_s = stall_s = np.zeros(workers.shape)
    # A server is one more member of the group: where there is one worker, two take part.
    groups = Groups(workers + 1, stride, sharing, servers)
    slowest = max(group.link_slowdown for group in cluster.groups)
    for crossing in crossings(cluster, groups):
        level = crossing.level
        sending = crossing.inside / crossing.rate
        receiving = workers / servers / (level.alone * level.efficiency / slowest)
        wait_s = np.where(crossing.crossed, level.start_s + level.latency_s, wait_s)
        per_byte_s = np.where(crossing.crossed, np.maximum(sending, receiving), per_byte_s)
        stall_s = np.where(crossing.crossed, _stall(level, workers), stall_s)
    return Line(wait_s, per_byte_s), stall_s


def _stall(level: Level, senders: Numbers) -> Numbers:
    """Return seconds that senders wait because a port's buffer has no room for what all send first."""
    if level.fabric is not Fabric.TCP or level.port_buffer is None:
        return np.zeros(senders.shape)
    return np.where(senders * WINDOW_BYTES > level.port_buffer, TIMEOUT_S, 0.0)


def _broadcast(*given: ArrayLike) -> list[Numbers]:
    return [np.array(value, dtype=np.float64) for value in np.broadcast_arrays(*given)]
