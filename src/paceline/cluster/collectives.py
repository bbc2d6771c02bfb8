"""What collectives take: the quickest of several algorithms, by which members of a group share a host, a leaf, a pod.

The whole of a cluster's communication is costed here, for many groups at once: all arguments are numbers or arrays and
are broadcast. See docs/clusters.md for the formulas.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.cluster import algorithms
from paceline.cluster.algorithms import Line, Priced
from paceline.cluster.cluster import Cluster
from paceline.cluster.fabric import Fabric
from paceline.cluster.incast import served
from paceline.cluster.measured import measured_seconds
from paceline.cluster.reach import Crossing, Groups, crossings
from paceline.errors import ClusterError, nearest

Numbers = NDArray[np.float64]

SERVER = "server"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", SERVER)


def collective_seconds(
    cluster: Cluster,
    kind: str,
    nbytes: ArrayLike,
    size: ArrayLike,
    stride: ArrayLike,
    *,
    sharing: ArrayLike | None = None,
) -> Numbers:
    """Return seconds of a collective.

    Args:
        cluster: where; its slowest links count.
        kind: one of `KINDS`; `send` is from each member to the next, `server` to one parameter server, which is no
            member, and back.
        nbytes: of the whole tensor: what an all-reduce sums, what an all-gather returns, what all members of an
            all-to-all send together, what is sent.
        size: members of the group.
        stride: how many ranks lie between a member and the next.
        sharing: how many such groups send through the links of one host at once; where it is absent, all that
            interleave, since in a step all ranks do the same.

    Raises:
        ClusterError: there is no such collective.
    """
    check_kind(kind)
    count, sizes, strides, shared = _broadcast(nbytes, size, stride, stride if sharing is None else sharing)
    distinct, which = _distinct(sizes, strides, shared)
    seconds = np.full_like(count, np.inf)
    for line in _lines(cluster, kind, *distinct):
        seconds = np.minimum(seconds, line.wait_s[which] + count * line.per_byte_s[which])
    seconds = measured_seconds(cluster, kind, count, sizes, strides, seconds)
    return np.where((sizes > 1) & (count > 0), seconds, 0.0)


def link_bytes(
    cluster: Cluster, kind: str, nbytes: ArrayLike, size: ArrayLike, stride: ArrayLike
) -> dict[str, Numbers]:
    """Return bytes that one rank sends into each level, by its name: the mean over the ranks of a group.

    Raises:
        ClusterError: there is no such collective.
    """
    check_kind(kind)
    count, sizes, strides = _broadcast(nbytes, size, stride)
    (members, apart), which = _distinct(sizes, strides)
    ones = np.ones_like(members)
    levels = crossings(cluster, Groups(members, apart, ones, ones))
    return {level: count * share[which] for level, share in _shares(kind, levels, members).items()}


def check_kind(kind: str) -> None:
    """Refuse what is no collective.

    Raises:
        ClusterError: it is none.
    """
    if kind not in KINDS:
        raise ClusterError(f"'{kind}' is no collective.{nearest(kind, KINDS)} Known: {', '.join(KINDS)}.")


def _lines(cluster: Cluster, kind: str, size: Numbers, stride: Numbers, sharing: Numbers) -> list[Line]:
    """Return what each algorithm takes, sent with a handshake and, where a level knows the difference, without."""
    if kind == SERVER:
        return [served(cluster, size, np.ones_like(size), stride, sharing)]
    peers = np.maximum(size - 1, 1.0) if kind == "all_to_all" else np.ones_like(size)
    crossed = crossings(cluster, Groups(size, stride, sharing, peers))
    lines = _algorithms(kind, [Priced(it, it.rate, it.level.latency_s + it.level.handshake_s) for it in crossed], size)
    if any(it.level.handshake_s for it in crossed):
        lines += _algorithms(kind, [Priced(it, it.rate * it.level.eager, it.level.latency_s) for it in crossed], size)
    start_s = algorithms.start(crossed)
    return [Line(line.wait_s + start_s, line.per_byte_s) for line in lines]


def _algorithms(kind: str, levels: list[Priced], size: Numbers) -> list[Line]:
    if kind == "all_to_all":
        return [algorithms.all_to_all(levels, size)]
    if kind == "broadcast":
        return [algorithms.chain(levels), algorithms.branches(levels)]
    if kind == "send":
        return [algorithms.send(levels)]
    is_memory = levels[0].crossing.level.fabric is Fabric.MEMORY
    gathering = [algorithms.ring(levels, size)] + ([algorithms.by_level(levels)] if is_memory else [])
    if kind != "all_reduce":
        return gathering
    trees = [algorithms.tree(levels)] + ([algorithms.reduced_by_level(levels)] if is_memory else [])
    sums = [algorithms.in_switch(levels)] if any(level.crossing.level.in_switch for level in levels) else []
    return [line.times(2) for line in gathering] + trees + sums


def _distinct(*columns: Numbers) -> tuple[list[Numbers], NDArray[np.int64]]:
    """Return the distinct rows of columns, and which of them each row is: layouts are many, their groups few."""
    code = np.zeros(columns[0].shape, dtype=np.int64)
    for column in columns:
        if column.size == 0 or np.all(column == column.flat[0]):
            continue
        index = column.astype(np.int64)
        if not np.array_equal(index, column):
            index = np.unique(column, return_inverse=True)[1].reshape(column.shape)
        code = code * (int(index.max()) + 1) + index
    values, which = np.unique(code, return_inverse=True)
    one_of = np.zeros(len(values), dtype=np.int64)
    one_of[which.ravel()] = np.arange(code.size)
    return [column.ravel()[one_of] for column in columns], which.reshape(code.shape)


def _broadcast(*given: ArrayLike) -> list[Numbers]:
    return [np.array(value, dtype=np.float64) for value in np.broadcast_arrays(*given)]


def _shares(kind: str, levels: list[Crossing], size: Numbers) -> dict[str, Numbers]:
    """Return by level which share of a tensor's bytes a member sends."""
    if kind in ("send", SERVER):
        return _farthest(levels)
    if kind == "all_to_all":
        return {it.level.name: (it.members - it.inside) / size**2 for it in levels}
    passes = 2.0 if kind == "all_reduce" else 1.0
    return {it.level.name: passes * (size - 1) / size * _share_of_ring(it, size) for it in levels}


def _share_of_ring(crossing: Crossing, size: Numbers) -> Numbers:
    """Return which share of the members sends into a level in a ring; the one that closes it goes the farthest."""
    closing = np.where(crossing.members == size, 1 / size, 0.0)
    return np.where(crossing.crossed, 1 / crossing.inside - 1 / crossing.members + closing, 0.0)


def _farthest(levels: list[Crossing]) -> dict[str, Numbers]:
    """Return 1 for the outermost level that is crossed, and 0 for all others."""
    found: dict[str, Numbers] = {}
    left = np.ones_like(levels[0].rate)
    for crossing in reversed(levels):
        found[crossing.level.name] = np.where(crossing.crossed, left, 0.0)
        left = np.where(crossing.crossed, 0.0, left)
    return {crossing.level.name: found[crossing.level.name] for crossing in levels}
