"""The calls of `torch.distributed`, as data: each can be made on a group, and knows what it must give.

    call = AllReduce(Spec((3, 4), torch.float32, seed=7, bits=False), ReduceOp.SUM)
    running = call.start(place, Mode.ASYNC)
    running.finish()
    assert not differences(call, place, running)

`place` says which group, and how tensors may lie in memory there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.shm.values import PRIVATE, Allocate, Layout, Spec, Want, lay, reduced

Op = ReduceOp.RedOpType


class Mode(Enum):
    """How a call is made and waited for; calls that know only one way ignore it."""

    SYNC = "sync"
    ASYNC = "async"
    FUTURE = "future"
    POLL = "poll"


@dataclass(frozen=True)
class Place:
    """A rank in a group: where calls are made.

    Attributes:
        group: the group.
        rank: this process's rank in it.
        size: how many ranks it has.
        layouts: how tensors may lie in memory.
        modes: how calls can be made there.
        can: says whether a call can be made there.
        allocate: returns memory that all ranks share.
    """

    group: Any
    rank: int
    size: int
    layouts: tuple[Layout, ...] = PRIVATE
    modes: tuple[Mode, ...] = tuple(Mode)
    can: Callable[[Call], bool] = lambda call: True
    allocate: Allocate | None = None

    def start(self, call: Call, mode: Mode) -> Running:
        """Make `call` in this mode, or as it can be made here."""
        return call.start(self, mode if mode in self.modes else Mode.ASYNC)


@dataclass
class Running:
    """A call under way.

    Attributes:
        waits: what ends it, in any order.
        outputs: where its results appear.
        inputs: tensors that it must leave alone, with what they held.
    """

    outputs: list[Any] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def finish(self) -> None:
        for wait in self.waits:
            wait()
        self.waits = []

    def wait_for(self, work: dist.Work | None, mode: Mode) -> None:
        """Let `finish` wait for `work`; None has ended already."""
        if work is not None:
            self.waits.append(lambda: _wait(work, mode))


@dataclass(frozen=True)
class Call:
    """One call."""

    def start(self, place: Place, mode: Mode) -> Running:
        """Make it; the results are there after `finish`."""
        raise NotImplementedError

    def expect(self, rank: int, size: int) -> list[Want]:
        """Return what the outputs of `rank` are in a group of `size` ranks."""
        raise NotImplementedError


def differences(call: Call, place: Place, running: Running) -> list[str]:
    """Return in what the results of an ended call are wrong."""
    wants = call.expect(place.rank, place.size)
    if len(wants) != len(running.outputs):
        return [f"{len(running.outputs)} outputs, want {len(wants)}"]
    found = [
        f"output {n}: {difference}"
        for n, (want, got) in enumerate(zip(wants, running.outputs, strict=True))
        if (difference := want.difference(got)) is not None
    ]
    for n, (tensor, held) in enumerate(running.inputs):
        if (difference := Want(held).difference(tensor)) is not None:
            found.append(f"input {n} was written to: {difference}")
    return found


def _wait(work: dist.Work, mode: Mode) -> None:
    if mode is Mode.FUTURE:
        # What is chained runs once, with the future itself, before or after the work has ended.
        ended = []
        work.get_future().then(lambda future: ended.append(future.done())).wait()
        assert ended == [True]
        return
    if mode is Mode.POLL:
        while not work.is_completed():
            torch.randn(8)
    work.wait()


class Maker:
    """Makes the tensors of one call, at one place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.running = Running()

    def input(self, spec: Spec, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor that the call reads only."""
        tensor = self.inout(spec, part, shape)
        self.running.inputs.append((tensor, tensor.clone()))
        return tensor

    def inout(self, spec: Spec, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        values = spec.values(self._place.rank, part, shape)
        return self._lay(values, spec, part)

    def output(self, spec: Spec, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor that the call writes only; it holds something else before."""
        values = torch.ones(spec.shape if shape is None else shape, dtype=spec.dtype)
        tensor = self._lay(values, spec, part + 31)
        self.running.outputs.append(tensor)
        return tensor

    def _lay(self, values: torch.Tensor, spec: Spec, part: int) -> torch.Tensor:
        place = self._place
        return lay(values, spec.layout(place.rank, part, place.layouts), place.allocate)

    def plain(self, spec: Spec, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an output that lies as C++ wants single tensors of several ranks to lie."""
        tensor = torch.ones(shape, dtype=spec.dtype)
        self.running.outputs.append(tensor)
        return tensor


@dataclass(frozen=True)
class AllReduce(Call):
    spec: Spec
    op: Op

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        tensor = make.inout(self.spec)
        make.running.outputs.append(tensor)
        work = dist.all_reduce(tensor, self.op, group=place.group, async_op=mode is not Mode.SYNC)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [reduced(self.op, [self.spec.values(r) for r in range(size)])]


@dataclass(frozen=True)
class Reduce(Call):
    spec: Spec
    op: Op
    root: int

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        tensor = make.inout(self.spec)
        if place.rank == self.root:
            make.running.outputs.append(tensor)
        work = dist.reduce(tensor, op=self.op, group=place.group, async_op=mode is not Mode.SYNC, group_dst=self.root)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return AllReduce(self.spec, self.op).expect(rank, size) if rank == self.root else []


@dataclass(frozen=True)
class Broadcast(Call):
    spec: Spec
    root: int

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        tensor = make.inout(self.spec)
        make.running.outputs.append(tensor)
        work = dist.broadcast(tensor, group=place.group, async_op=mode is not Mode.SYNC, group_src=self.root)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(self.spec.values(self.root))]


@dataclass(frozen=True)
class AllGather(Call):
    spec: Spec

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        outputs = [make.output(self.spec, part) for part in range(place.size)]
        work = dist.all_gather(outputs, make.input(self.spec), group=place.group, async_op=mode is not Mode.SYNC)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(self.spec.values(r)) for r in range(size)]


@dataclass(frozen=True)
class AllGatherSingle(Call):
    spec: Spec

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        output = make.plain(self.spec, times(place.size, self.spec.shape))
        work = dist.all_gather_single(output, make.input(self.spec), place.group, mode is not Mode.SYNC)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(cat([self.spec.values(r) for r in range(size)]))]


@dataclass(frozen=True)
class Gather(Call):
    spec: Spec
    root: int

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        outputs = None
        if place.rank == self.root:
            outputs = [make.output(self.spec, part) for part in range(place.size)]
        work = dist.gather(
            make.input(self.spec), outputs, group=place.group, async_op=mode is not Mode.SYNC, group_dst=self.root
        )
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return AllGather(self.spec).expect(rank, size) if rank == self.root else []


@dataclass(frozen=True)
class Scatter(Call):
    spec: Spec
    root: int

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        inputs = None
        if place.rank == self.root:
            inputs = [make.input(self.spec, part) for part in range(place.size)]
        output = make.output(self.spec)
        work = dist.scatter(output, inputs, group=place.group, async_op=mode is not Mode.SYNC, group_src=self.root)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(self.spec.values(self.root, rank))]


@dataclass(frozen=True)
class ReduceScatter(Call):
    spec: Spec
    op: Op

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        inputs = [make.input(self.spec, part) for part in range(place.size)]
        output = make.output(self.spec)
        work = dist.reduce_scatter(output, inputs, self.op, place.group, mode is not Mode.SYNC)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [reduced(self.op, [self.spec.values(r, rank) for r in range(size)])]


@dataclass(frozen=True)
class ReduceScatterSingle(Call):
    spec: Spec
    op: Op

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        whole = make.input(self.spec, shape=times(place.size, self.spec.shape))
        output = make.output(self.spec)
        work = dist.reduce_scatter_single(output, whole, self.op, place.group, mode is not Mode.SYNC)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        every = [self.spec.values(r, shape=times(size, self.spec.shape)) for r in range(size)]
        return [reduced(self.op, [x.view(size, *self.spec.shape)[rank] for x in every])]


@dataclass(frozen=True)
class AllToAll(Call):
    """Attributes: `rows` of tensors of `spec`'s other dimensions that each rank (row) sends to each (column)."""

    spec: Spec
    rows: tuple[tuple[int, ...], ...]

    def _shape(self, source: int, target: int) -> tuple[int, ...]:
        return (self.rows[source][target], *self.spec.shape[1:])

    def start(self, place: Place, mode: Mode) -> Running:
        make, everyone = Maker(place), range(place.size)
        inputs = [make.input(self.spec, part, self._shape(place.rank, part)) for part in everyone]
        outputs = [make.output(self.spec, part, self._shape(part, place.rank)) for part in everyone]
        work = dist.all_to_all(outputs, inputs, place.group, mode is not Mode.SYNC)
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(self.spec.values(r, rank, self._shape(r, rank))) for r in range(size)]


@dataclass(frozen=True)
class AllToAllSingle(Call):
    """Attributes: `rows` that each rank (row) sends to each (column); all are equal if the splits are left out."""

    spec: Spec
    rows: tuple[tuple[int, ...], ...]
    split: bool

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        sent = list(self.rows[place.rank])
        got = [row[place.rank] for row in self.rows]
        source = make.input(self.spec, shape=(sum(sent), *self.spec.shape[1:]))
        output = make.plain(self.spec, (sum(got), *self.spec.shape[1:]))
        work = dist.all_to_all_single(
            output,
            source,
            got if self.split else None,
            sent if self.split else None,
            group=place.group,
            async_op=mode is not Mode.SYNC,
        )
        make.running.wait_for(work, mode)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        pieces = []
        for source in range(size):
            whole = self.spec.values(source, shape=(sum(self.rows[source]), *self.spec.shape[1:]))
            pieces.append(whole.split(list(self.rows[source]))[rank])
        return [Want(torch.cat(pieces))]


@dataclass(frozen=True)
class Barrier(Call):
    def start(self, place: Place, mode: Mode) -> Running:
        running = Running()
        running.wait_for(dist.barrier(place.group, async_op=mode is not Mode.SYNC), mode)
        return running

    def expect(self, rank: int, size: int) -> list[Want]:
        return []


def times(size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `size` such tensors, one after the other."""
    return (size * shape[0], *shape[1:]) if shape else (size,)


def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors)) if tensors[0].dim() else torch.stack(list(tensors))
