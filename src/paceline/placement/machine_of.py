"""The solver's figures of a described cluster: rates of its slowest devices, and links by the axes of a mesh.

So placements are weighed by the same description that estimates and simulations read.
"""

from __future__ import annotations

from math import prod

from paceline.cluster.cluster import Cluster, Device, Group
from paceline.cluster.collectives import collective_seconds
from paceline.placement.machine import Curve, Link, Links, Machine, constant
from paceline.placement.redistribute import Collective
from paceline.plan import Mesh

_SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SMALL, _LARGE = 4096.0, float(64 << 20)
"""Bytes between which a collective is taken to be a straight line."""
_LATENCY_S = 1e-9
"""A link has a latency, however small; so say the files in which links are kept."""


def machine_of(cluster: Cluster, mesh: Mesh) -> Machine:
    """Return what a rank of the cluster can do in a mesh.

    All ranks are in a group of each axis, and all groups of an axis send at the same time.
    """
    group = cluster.slowest
    rates = group.device.rates
    return Machine(
        per_call=rates.launch_s + rates.gap_s,
        products=_products(group, "float32"),
        half_products=_products(group, "bfloat16"),
        touching=constant(group.device.bandwidth * rates.memory / group.slowdown),
        axes={axis: _links(cluster, mesh, axis) for axis, parts in mesh.axes if parts > 1},
    )


def _products(group: Group, dtype: str) -> Curve:
    """Rates of products of square matrices, which small ones reach less of."""
    rates = group.device.rates
    peak = _peak(group.device, dtype) * rates.matmul / group.slowdown
    points = []
    for side in _SIDES:
        fill = (1 + rates.m_half / side) * (1 + rates.n_half / side) * (1 + rates.k_half / side)
        points.append((2.0 * side**3, peak / fill))
    return Curve(tuple(points))


def _peak(device: Device, dtype: str) -> float:
    return device.peak.get(dtype) or max(device.peak.values())


def _links(cluster: Cluster, mesh: Mesh, axis: str) -> Links:
    stride = prod(size for _, size in mesh.axes[mesh.names.index(axis) + 1 :])
    return {kind: _link(cluster, kind, mesh[axis], stride) for kind in Collective}


def _link(cluster: Cluster, kind: Collective, size: int, stride: int) -> Link:
    small, large = collective_seconds(cluster, kind.value, [_SMALL, _LARGE], size, stride)
    per_byte = max(0.0, float(large - small)) / (_LARGE - _SMALL)
    return Link(max(_LATENCY_S, float(small) - per_byte * _SMALL), per_byte)
