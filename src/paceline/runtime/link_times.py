"""How long collectives take between the ranks of this job, by size: measured through what carries them in a step.

Ranks meet at a barrier before each, and other memory was touched before it, as a step would. What ranks that share
memory add up or gather is measured where it lies in a step: sums of gradients in a bucket, in place; parameters that
`fsdp` splits in one tensor of all ranks, which is there as soon as all ranks are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PlanError
from paceline.placement.redistribute import Collective
from paceline.plan import Mesh
from paceline.runtime.binding import AxisGroup
from paceline.runtime.executor import Executor
from paceline.runtime.exemplars import clock_of
from paceline.runtime.figures import key_of_device, way_between_ranks
from paceline.runtime.kept import Kept
from paceline.runtime.peers import Peers
from paceline.runtime.timing import exchange_graph, given_to
from paceline.shm import Exchange

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of whole tensors at which collectives are measured."""
FEW = (1 << 10, 1 << 18, 1 << 22)
"""The same where little time is to be spent."""
SEND = "send"
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", SEND)
_FILE = "collectives-1.json"
_OF_GRADIENTS = ("dp", "fsdp")
"""Axes whose sums are of gradients; those of others are of activations, and lie where they were made."""
_HOLDING = ("fsdp",)
"""Axes along which parameters are split and gathered."""
_OTHER_ELEMENTS = 12 << 20
_LEAST, _MOST = 4, 12
_BYTES_OF_A_TURN = 64 << 20

Points = Sequence[tuple[float, float]]
"""Bytes of the whole tensor and seconds, ascending."""


def interpolated(points: Points, nbytes: float) -> float:
    """Return seconds for a size: straight between two sizes, and beyond the largest as between the last two."""
    sizes = [size for size, _ in points]
    at = min(max(bisect_left(sizes, nbytes), 1), len(points) - 1)
    if len(points) == 1 or nbytes <= sizes[0]:
        return points[0][1]
    (low, quick), (high, slow) = points[at - 1], points[at]
    return max(quick + (nbytes - low) / (high - low) * (slow - quick), 0.0)


@dataclass(frozen=True)
class MeasuredCollectives:
    """Answers for the collectives of a job.

    Attributes:
        points: by axis and kind, what was measured.
    """

    points: Mapping[str, Mapping[str, Points]]

    def seconds(self, kind: str, nbytes: int, axis: str) -> float:
        """Return the seconds of a collective from the moment at which all ranks have begun.

        Raises:
            PlanError: it was not measured.
        """
        of_axis = self.points.get(axis, {})
        found = of_axis.get(kind) or of_axis.get("all_gather" if kind == "broadcast" else SEND)
        if found is None:
            raise PlanError(f"a {kind} along '{axis}' was not measured; measured: {', '.join(self.points) or 'none'}.")
        return interpolated(found, nbytes)


def measured_collectives(
    peers: Peers,
    mesh: Mesh,
    *,
    axes: Collection[str] | None = None,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    tell: Callable[[str], None] = lambda what: None,
) -> MeasuredCollectives:
    """Return what collectives take along each axis of a mesh; a collective of all ranks of the job.

    Args:
        peers: the ranks.
        mesh: that they were connected with.
        axes: along which; by default all of the mesh.
        sizes: bytes of whole tensors.
        kinds: of `KINDS`.
        tell: told of each kind before it is measured.
    """
    device = peers.devices[0]
    points: dict[str, dict[str, Points]] = {}
    for axis, parts in mesh.axes if not peers.alone else ():
        if parts == 1 or (axes is not None and axis not in axes):
            continue
        ways = _Ways(peers.executor, peers.groups[axis], axis, parts, device)
        points[axis] = {}
        for kind in kinds:
            tell(f"{kind} along {axis}")
            points[axis][kind] = [(float(size), _measure(ways.call(kind, size), size, device)) for size in sizes]
    return MeasuredCollectives(points)


def known_collectives(
    peers: Peers, mesh: Mesh, directory: Path | None, *, kinds: Mapping[str, Sequence[str]], sizes: Sequence[int] = FEW
) -> MeasuredCollectives:
    """Return what collectives take along each axis: as was measured before, or measured now.

    A collective of all ranks of the job, of which rank 0 knows the result.

    Args:
        peers: the ranks.
        mesh: that they were connected with.
        directory: where figures are kept.
        kinds: by axis, which; all along other axes.
        sizes: bytes of whole tensors, where they are measured now.
    """
    points: dict[str, Mapping[str, Points]] = {}
    for axis, parts in mesh.axes if not peers.alone else ():
        if parts == 1:
            continue
        wanted = kinds.get(axis, KINDS)
        kept = Kept(directory, _FILE)
        key = f"{key_of_device(peers.devices[0])}, {way_between_ranks()}, {parts} along {axis}"
        known = kept.section(key) if peers.leads else {}
        flag = torch.tensor([set(wanted) <= set(known)], dtype=torch.uint8, device=peers.devices[0])
        peers.broadcast(flag)
        if flag.item():
            points[axis] = {kind: [(size, seconds) for size, seconds in known[kind]] for kind in known}
            continue
        points[axis] = measured_collectives(peers, mesh, axes=(axis,), kinds=wanted, sizes=sizes).points[axis]
        if peers.leads:
            kept.store(key, {**known, **points[axis]})
    return MeasuredCollectives(points)


class _Ways:
    """Calls of collectives along an axis as a step makes them."""

    def __init__(self, executor: Executor, group: AxisGroup, axis: str, parts: int, device: torch.device) -> None:
        self._executor = executor
        self._group = group
        self._axis = axis
        self._parts = parts
        self._device = device

    def call(self, kind: str, nbytes: int) -> Callable[[], object]:
        """Return what makes one collective of a whole tensor of so many bytes, from the start to the result."""
        count = max(nbytes // 4 // self._parts**2, 1) * self._parts**2
        if kind == SEND:
            return self._send(torch.zeros(count, device=self._device))
        shared = self._group.shared if self._device.type == "cpu" else None
        if shared is not None:
            return self._in_memory(shared, kind, count)
        given = given_to(Collective(kind), count, self._parts, self._device)
        name = "all_reduce_in_place" if kind == "all_reduce" and self._axis in _OF_GRADIENTS else kind
        run = self._executor.prepare(exchange_graph(name, given, self._axis, self._parts), {})
        return lambda: run([[given]])

    def _in_memory(self, exchange: Exchange, kind: str, count: int) -> Callable[[], object]:
        given, parts = given_to(Collective(kind), count, self._parts, self._device), self._parts
        if kind == "all_gather" and self._axis in _HOLDING:
            return exchange.fence
        if kind == "reduce_scatter":
            return lambda: exchange.reduce_scatter(exchange.empty(count, torch.float32), [count // parts]).wait()
        if kind == "all_reduce" and self._axis in _OF_GRADIENTS:
            return lambda: exchange.all_reduce_in_place(exchange.empty(count, torch.float32)).wait()
        start = {
            "all_reduce": exchange.all_reduce,
            "all_gather": exchange.all_gather,
            "all_to_all": exchange.all_to_all,
        }[kind]
        return lambda: start(given).wait()

    def _send(self, x: Tensor) -> Callable[[], object]:
        """Every rank sends to the next one, and receives from the one before."""
        group, parts = self._group.group, self._parts
        after, before = (self._group.index + 1) % parts, (self._group.index - 1) % parts
        room = torch.empty_like(x)

        def swap() -> None:
            sent = dist.isend(x, group=group, group_dst=after)
            received = dist.irecv(room, group=group, group_src=before)
            for work in (received, sent):
                if work is not None:
                    work.wait()

        return swap


def _measure(call: Callable[[], object], nbytes: int, device: torch.device) -> float:
    """Return the lower quartile of the slowest rank's seconds; what is above it, others may have caused."""
    other = torch.zeros(_OTHER_ELEMENTS, device=device)
    clock, found = clock_of(device), []
    call()
    for _ in range(max(_LEAST, min(_MOST, _BYTES_OF_A_TURN // nbytes))):
        other.add_(1.0)
        dist.barrier()
        clock.start()
        call()
        clock.stop("call")
        found.append(clock.laps()["call"].seconds)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(torch.quantile(slowest, 0.25))
