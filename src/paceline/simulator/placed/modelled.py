"""Times of calls and collectives on a described cluster: what its devices and links can do, by the rates they reach.

Products saturate with their dimensions, attention and elementwise work reach a share of the device's peaks. Chains of
elementwise calls that a compiler makes one kernel of touch memory at their ends only.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from paceline.cluster.cluster import Cluster, Device
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.fabric import Fabric
from paceline.plan import Axis, Mesh, Plan
from paceline.program.work import CallKind, CallWork, work_of
from paceline.simulator.closed_form.demands import Products
from paceline.simulator.closed_form.device_seconds import peak_of, product_seconds, wide_of
from paceline.simulator.placed.times import Times

_HOST_COMPUTES = (Fabric.MEMORY,)


def modelled_times(cluster: Cluster, mesh: Mesh, plan: Plan) -> Times:
    """Return the times of calls and collectives of a plan on a cluster.

    Args:
        cluster: its slowest devices count; slower groups are told to the simulator as slow ranks.
        mesh: of all ranks, those of a pipeline too; ranks stand in the cluster in its order.
        plan: whether graphs are compiled.
    """
    device = cluster.groups[0].device
    shares = cluster.levels[0].fabric in _HOST_COMPUTES
    rates = device.rates
    return Times(
        operators=ModelledOperators(device, fuses=plan.compile, launch_s=rates.launch_s if shares else 0.0),
        collectives=ModelledCollectives(cluster, mesh),
        launch_s=0.0 if shares else rates.launch_s,
        overlap=not shares,
        shares_memory=shares,
        constant_s=rates.step_s,
        source=f"modelled for {device.name} in '{cluster.name}'",
    )


def slow_ranks(cluster: Cluster, ranks: int) -> dict[int, float]:
    """Return the ranks whose devices are slower than those of the first group, and by how much."""
    first, found, begun = cluster.groups[0], dict[int, float](), 0
    for group in cluster.groups:
        factor = group.slowdown * _speed(first.device) / _speed(group.device)
        if factor != 1:
            found.update(dict.fromkeys(range(begun, min(begun + group.devices, ranks)), factor))
        begun += group.devices
    return found


def _speed(device: Device) -> float:
    """Return what a device reaches in products, in bfloat16 where it has that."""
    return device.peak.get("bfloat16", max(device.peak.values())) * device.rates.matmul


class ModelledOperators:
    """Times of calls on a device.

    Args:
        device: with the rates that it reaches.
        fuses: chains of elementwise calls are one kernel.
        launch_s: seconds that each call takes beside, where host and device are one.
    """

    def __init__(self, device: Device, *, fuses: bool = False, launch_s: float = 0.0) -> None:
        self._device = device
        self._fuses = fuses
        self._launch_s = launch_s
        self._known: dict[Hashable, float] = {}

    def seconds(self, node: Node) -> float:
        """Return the seconds of a call."""
        work = work_of(node)
        if work.view:
            return 0.0
        nbytes = self._touched(node, work)
        if self._fuses and not nbytes and not work.flops:
            return 0.0
        device, rates = self._device, self._device.rates
        seconds = nbytes / (device.bandwidth * rates.memory)
        match work.kind:
            case CallKind.PRODUCT:
                seconds = max(seconds, self._product(work, _dtype(node)))
            case CallKind.ATTENTION:
                share = _SEEN if work.operations is not None and work.operations.causal else 1.0
                peak = peak_of(device, wide_of(_dtype(node)))
                seconds = max(seconds, share * work.flops / (peak * rates.attention))
        return self._launch_s + rates.gap_s + seconds

    def _product(self, work: CallWork, dtype: str) -> float:
        key = work.flops, work.dims, dtype
        if key not in self._known:
            sizes, flops = np.array(work.dims, dtype=np.float64), work.flops
            if self._device.rates.units:
                sizes, flops = _in_tiles(work)
            products = Products(np.full((1, 1), flops), sizes[:, None, None])
            self._known[key] = float(product_seconds(products, self._device, peak_of(self._device, dtype))[0])
        return self._known[key]

    def _touched(self, node: Node, work: CallWork) -> float:
        """Return the bytes that a call moves through memory."""
        if self._fuses and is_elementwise(node):
            outside = [source for source in node.all_input_nodes if not _stays_inside(source)]
            read = sum(_nbytes(source.meta.get("val")) for source in outside)
            return read + (0 if _stays_inside(node) else work.written_bytes)
        return work.read_bytes + work.written_bytes + _changed_bytes(node)


_TILE = np.array([64.0, 64.0, 16.0])
"""Rows, columns and inner dimension of the smallest tile in which units of a device compute."""
_SEEN = 0.5
"""Of all pairs of queries and keys, those that a causal kernel computes."""


class ModelledCollectives:
    """Times of collectives over the axes of a mesh.

    Args:
        cluster: where.
        mesh: of all ranks, outermost axis first: the last one's ranks are neighbours.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self._cluster = cluster
        self._mesh = mesh
        self._found: dict[Hashable, float] = {}

    def seconds(self, kind: str, nbytes: int, axis: str) -> float:
        """Return the seconds of a collective over the ranks along an axis."""
        key = kind, nbytes, axis
        if key not in self._found:
            size, stride = self._mesh[axis], self._stride(axis)
            # Every rank is in a group of this axis, so groups that interleave send at the same time.
            found = collective_seconds(self._cluster, kind, float(nbytes), size, stride, sharing=stride)
            self._found[key] = float(found) * self._beside_work(axis)
        return self._found[key]

    def _beside_work(self, axis: str) -> float:
        """Return how many times what it takes alone a collective takes in a step."""
        rates = self._cluster.groups[0].device.rates
        if axis == Axis.PP.value:
            return rates.transfer
        return rates.exchange if Axis(axis).splits_batch else rates.collective

    def _stride(self, axis: str) -> int:
        names = self._mesh.names
        return prod(size for _, size in self._mesh.axes[names.index(axis) + 1 :])


def is_elementwise(node: Node) -> bool:
    """Whether a call works on each element by itself, so that a compiler can join it to its neighbours."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _stays_inside(node: Node) -> bool:
    """Whether a value is made and read within one kernel only."""
    return is_elementwise(node) and bool(node.users) and all(is_elementwise(user) for user in node.users)


def _changed_bytes(node: Node) -> int:
    """Return the bytes that a call changes in place without returning them."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.returns or not target._schema.is_mutable:
        return 0
    changed: list[Any] = []
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(value, lambda source: changed.append(source.meta.get("val")))
    return sum(map(_nbytes, changed))


def _in_tiles(work: CallWork) -> tuple[NDArray[np.float64], float]:
    """Return sizes and operations as a device of many units computes them: small products fill up a tile each.

    Those of a batch are computed beside each other.
    """
    assert work.operations is not None
    rows, columns, inner = np.maximum(np.array(work.dims, dtype=np.float64), _TILE)
    sizes = np.array([rows * work.times, columns, inner])
    return sizes, work.operations.factor * float(np.prod(sizes))


def _dtype(node: Node) -> str:
    """Return the type in which a call computes, by name."""
    dtype = next((value.dtype for value in _given(node) if value.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def _given(node: Node) -> list[Tensor]:
    return [value for source in node.all_input_nodes for value in _tensors(source.meta.get("val"))]


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> list[Any]:
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if hasattr(item, "element_size")]
