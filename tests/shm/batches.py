"""More calls: several tensors at once, functional collectives, and Python objects."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.shm.calls import (
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Broadcast,
    Call,
    Maker,
    Mode,
    Op,
    Place,
    ReduceScatterSingle,
    Running,
    times,
)
from tests.shm.values import Spec, Want


@dataclass(frozen=True)
class Coalesced(Call):
    """Attributes: `calls`, all of one kind, made within c10d's coalescing manager."""

    calls: tuple[AllReduce | AllGatherSingle | ReduceScatterSingle, ...]

    def start(self, place: Place, mode: Mode) -> Running:
        whole = Running()
        with dist._coalescing_manager(place.group, async_ops=mode is not Mode.SYNC) as manager:
            for call in self.calls:
                one = call.start(place, Mode.SYNC)
                whole.outputs += one.outputs
                whole.inputs += one.inputs
        for work in manager.works:
            whole.wait_for(work, mode)
        return whole

    def expect(self, rank: int, size: int) -> list[Want]:
        return [want for call in self.calls for want in call.expect(rank, size)]


@dataclass(frozen=True)
class AllReduceCoalesced(Call):
    """Attributes: `specs` of one type."""

    specs: tuple[Spec, ...]
    op: Op

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        tensors = [make.inout(spec) for spec in self.specs]
        make.running.outputs += tensors
        with _old_names():
            future = dist.all_reduce_coalesced(tensors, self.op, place.group, mode is not Mode.SYNC)
        if future is not None:
            make.running.waits.append(lambda: future.wait())
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [want for spec in self.specs for want in AllReduce(spec, self.op).expect(rank, size)]


@dataclass(frozen=True)
class AllGatherCoalesced(Call):
    """Attributes: `specs` of one type."""

    specs: tuple[Spec, ...]

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        outputs = [[make.output(spec, part) for spec in self.specs] for part in range(place.size)]
        inputs = [make.input(spec) for spec in self.specs]
        with _old_names():
            future = dist.all_gather_coalesced(outputs, inputs, place.group, mode is not Mode.SYNC)
        if future is not None:
            make.running.waits.append(lambda: future.wait())
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(spec.values(r)) for r in range(size) for spec in self.specs]


@dataclass(frozen=True)
class Functional(Call):
    """Attributes: `call` to make by the functional collective of the same name."""

    call: AllReduce | AllGatherSingle | ReduceScatterSingle | AllToAllSingle | Broadcast

    def start(self, place: Place, mode: Mode) -> Running:
        make, call, group = Maker(place), self.call, place.group
        match call:
            case AllReduce():
                result = functional.all_reduce(make.input(call.spec), _name(call.op), group)
            case AllGatherSingle():
                result = functional.all_gather_single(make.input(call.spec), 0, group)
            case ReduceScatterSingle():
                whole = make.input(call.spec, shape=times(place.size, call.spec.shape))
                result = functional.reduce_scatter_single(whole, _name(call.op), 0, group)
            case AllToAllSingle():
                sent = list(call.rows[place.rank])
                got = [row[place.rank] for row in call.rows]
                source = make.input(call.spec, shape=(sum(sent), *call.spec.shape[1:]))
                splits = (got, sent) if call.split else (None, None)
                result = functional.all_to_all_single(source, *splits, group)
            case Broadcast():
                result = functional.broadcast(make.input(call.spec), call.root, group)
        return _functional(make.running, [result], mode)

    def expect(self, rank: int, size: int) -> list[Want]:
        wants = self.call.expect(rank, size)
        if isinstance(self.call, ReduceScatterSingle) and not self.call.spec.shape:
            return [Want(want.value.view(1), None if want.slack is None else want.slack.view(1)) for want in wants]
        return wants


@dataclass(frozen=True)
class FunctionalCoalesced(Call):
    """Attributes: `calls`, all of one kind and operation."""

    calls: tuple[AllReduce | AllGatherSingle | ReduceScatterSingle, ...]

    def start(self, place: Place, mode: Mode) -> Running:
        make, first, group = Maker(place), self.calls[0], place.group
        specs = [call.spec for call in self.calls]
        if isinstance(first, ReduceScatterSingle):
            wholes = [make.input(spec, shape=times(place.size, spec.shape)) for spec in specs]
            results = functional.reduce_scatter_single_coalesced(wholes, _name(first.op), [0] * len(wholes), group)
        elif isinstance(first, AllReduce):
            results = functional.all_reduce_coalesced([make.input(spec) for spec in specs], _name(first.op), group)
        else:
            results = functional.all_gather_single_coalesced([make.input(spec) for spec in specs], group)
        return _functional(make.running, list(results), mode)

    def expect(self, rank: int, size: int) -> list[Want]:
        return [want for call in self.calls for want in Functional(call).expect(rank, size)]


class ObjectKind(Enum):
    """Which call for Python objects."""

    ALL_GATHER = "all_gather_object"
    BROADCAST = "broadcast_object_list"
    GATHER = "gather_object"
    SCATTER = "scatter_object_list"


@dataclass(frozen=True)
class Objects(Call):
    """Attributes: `kind`; `seed` of what the objects are; `root` where there is one."""

    kind: ObjectKind
    seed: int
    root: int

    def _object(self, rank: int, part: int = 0) -> Any:
        draw = random.Random(self.seed + 1009 * rank + 9176 * part)
        return {"from": rank, "bytes": draw.randbytes(draw.choice((0, 1, 100, 20_000))), "nested": [part, (None,)]}

    def start(self, place: Place, mode: Mode) -> Running:
        group, mine, everyone = place.group, self._object(place.rank), range(place.size)
        outputs: list[Any] = [None] * place.size
        match self.kind:
            case ObjectKind.ALL_GATHER:
                dist.all_gather_object(outputs, mine, group)
            case ObjectKind.GATHER:
                dist.gather_object(mine, outputs if place.rank == self.root else None, group=group, group_dst=self.root)
                outputs = outputs if place.rank == self.root else []
            case ObjectKind.BROADCAST:
                outputs = [self._object(place.rank, part) for part in range(3)]
                dist.broadcast_object_list(outputs, group=group, group_src=self.root)
            case ObjectKind.SCATTER:
                outputs = [None]
                sent = [self._object(self.root, part) for part in everyone] if place.rank == self.root else None
                dist.scatter_object_list(outputs, sent, group=group, group_src=self.root)
        return Running(outputs)

    def expect(self, rank: int, size: int) -> list[Want]:
        match self.kind:
            case ObjectKind.BROADCAST:
                return [Want(self._object(self.root, part)) for part in range(3)]
            case ObjectKind.SCATTER:
                return [Want(self._object(self.root, rank))]
            case ObjectKind.GATHER if rank != self.root:
                return []
        return [Want(self._object(r)) for r in range(size)]


def _functional(running: Running, results: list[torch.Tensor], mode: Mode) -> Running:
    """Let the results be read, at once or later: reading waits."""

    def read() -> None:
        for result in results:
            running.outputs.append(result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result)

    running.waits.append(read)
    if mode is Mode.SYNC:
        running.finish()
    return running


def _name(op: Op) -> str:
    return op.name.lower()


@contextmanager
def _old_names() -> Iterator[None]:
    """Call what is deprecated but still there, without the warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
