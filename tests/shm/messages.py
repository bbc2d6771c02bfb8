"""Point-to-point calls: several messages at once, in orders and with tags that differ between the ranks."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from tests.shm.calls import Call, Maker, Mode, Place, Running
from tests.shm.values import Spec, Want


@dataclass(frozen=True)
class Message:
    """A tensor that `source` sends to `target`."""

    source: int
    target: int
    tag: int
    spec: Spec


class How(Enum):
    """By which functions messages go. All can be matched by ranks that wait for their peers to receive."""

    ASYNC = "isend and irecv"
    BATCH = "batch_isend_irecv"
    SYNC = "send and recv"  # in the order of the messages
    SYNC_SEND = "irecv, then send"
    SYNC_RECEIVE = "isend, then recv"


@dataclass(frozen=True)
class Messages(Call):
    """Messages between any ranks; those with one source, target and tag arrive in their order.

    Attributes:
        messages: all of them, of all ranks.
        how: by which functions.
        seed: of the order in which each rank sends and receives.
    """

    messages: tuple[Message, ...]
    how: How
    seed: int

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        # Outputs appear in the order of messages, whatever the order in which they are received.
        tensors = [self._tensor(make, place.rank, n, message) for n, message in enumerate(self.messages)]
        order = range(len(self.messages)) if self.how is How.SYNC else self._shuffled(place.rank)
        mine = [(self.messages[n], tensors[n]) for n in order if place.rank in self._ends(n)]
        if self.how is How.BATCH:
            for work in dist.batch_isend_irecv([_operation(place, *one) for one in mine]) if mine else ():
                make.running.wait_for(work, mode)
            return make.running
        sends = [one for one in mine if one[0].source == place.rank]
        receives = [one for one in mine if one[0].target == place.rank]
        first, blocking = {
            How.ASYNC: (mine, []),
            How.SYNC: ([], mine),
            How.SYNC_SEND: (receives, sends),
            How.SYNC_RECEIVE: (sends, receives),
        }[self.how]
        for message, tensor in first:
            operation = _operation(place, message, tensor)
            peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
            make.running.wait_for(operation.op(tensor, group=place.group, tag=message.tag, **peer), mode)
        for message, tensor in blocking:
            if message.source == place.rank:
                dist.send(tensor, group=place.group, tag=message.tag, group_dst=message.target)
            else:
                dist.recv(tensor, group=place.group, tag=message.tag, group_src=message.source)
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(one.spec.values(one.source, n)) for n, one in enumerate(self.messages) if one.target == rank]

    def _ends(self, n: int) -> tuple[int, int]:
        return self.messages[n].source, self.messages[n].target

    def _tensor(self, make: Maker, rank: int, n: int, message: Message) -> torch.Tensor | None:
        if message.source == rank:
            return make.input(message.spec, n)
        return make.output(message.spec, n) if message.target == rank else None

    def _shuffled(self, rank: int) -> Iterator[int]:
        """Yield the messages in an order of this rank's own, except among equal source, target and tag."""
        waiting = defaultdict[tuple[int, int, int], deque[int]](deque)
        for n, one in enumerate(self.messages):
            waiting[one.source, one.target, one.tag].append(n)
        keys = [(one.source, one.target, one.tag) for one in self.messages]
        random.Random(self.seed + rank).shuffle(keys)
        for key in keys:
            yield waiting[key].popleft()


@dataclass(frozen=True)
class FromAny(Call):
    """One rank receives from whoever sends first.

    Attributes:
        target: that rank.
        each: how many messages every other rank sends to it.
        tag: of all of them, and of nothing else.
    """

    spec: Spec
    target: int
    each: int
    tag: int

    def start(self, place: Place, mode: Mode) -> Running:
        make = Maker(place)
        if place.rank != self.target:
            for n in range(self.each):
                tensor = make.input(self.spec, n)
                work = dist.isend(tensor, group=place.group, tag=self.tag, group_dst=self.target)
                make.running.wait_for(work, mode)
            return make.running
        arrived: dict[int, list[torch.Tensor]] = {source: [] for source in range(place.size) if source != place.rank}
        for n in range(self.each * (place.size - 1)):
            tensor = make.output(self.spec, n)
            source = dist.get_group_rank(place.group, dist.recv(tensor, group=place.group, tag=self.tag))
            arrived[source].append(tensor)
        make.running.outputs = [tensor for source in sorted(arrived) for tensor in arrived[source]]
        return make.running

    def expect(self, rank: int, size: int) -> list[Want]:
        if rank != self.target:
            return []
        return [Want(self.spec.values(r, n)) for r in range(size) if r != rank for n in range(self.each)]


@dataclass(frozen=True)
class ObjectMessage(Call):
    """`send_object_list` from one rank to another."""

    source: int
    target: int
    seed: int

    def _objects(self) -> list[object]:
        return [{"seed": self.seed}, "x" * (self.seed % 5000), None]

    def start(self, place: Place, mode: Mode) -> Running:
        running = Running()
        if place.rank == self.source:
            dist.send_object_list(self._objects(), group=place.group, group_dst=self.target)
        elif place.rank == self.target:
            running.outputs = [None] * 3
            dist.recv_object_list(running.outputs, group=place.group, group_src=self.source)
        return running

    def expect(self, rank: int, size: int) -> list[Want]:
        return [Want(one) for one in self._objects()] if rank == self.target else []


def _operation(place: Place, message: Message, tensor: torch.Tensor | None) -> dist.P2POp:
    assert tensor is not None
    sends = message.source == place.rank
    return dist.P2POp(
        dist.isend if sends else dist.irecv,
        tensor,
        group=place.group,
        tag=message.tag,
        group_peer=message.target if sends else message.source,
    )
