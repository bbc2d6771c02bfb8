"""How tensors get from stage to stage: point to point between processes, or through mailboxes within one.

A message is what one stage sends another for one micro-batch: some tensors, which go one after the other. Sends never
block the sender; what it sent it keeps until it knows that the receiver has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.pipeline.step import Sent
from paceline.runtime.pipeline.wire import Wire
from paceline.schedule import Payload

RankTensors = list[list[Tensor]]
"""For each tensor of a message, its piece on each rank in this process."""


class Message(NamedTuple):
    """Which message: what it carries, from which stage to which, for which micro-batch."""

    payload: Payload
    source: int
    target: int
    micro_batch: int


class Channel(Protocol):
    """Carries the messages of one pipeline rank."""

    def send(self, message: Message, rank: int, values: RankTensors) -> None:
        """Begin to send to a pipeline rank."""
        ...

    def expect(self, message: Message, rank: int, sent: Sequence[Sent]) -> None:
        """Make room for what a pipeline rank will send."""
        ...

    def has(self, message: Message) -> bool:
        """Whether `receive` may be called: it waits for other processes, but cannot within one."""
        ...

    def receive(self, message: Message) -> RankTensors:
        """Return what was expected, when it is there."""
        ...

    def release(self, message: Message) -> None:
        """Let go of what was sent, because the receiver has it."""
        ...


class Mailboxes:
    """Messages between pipeline ranks that live in one process."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._boxes: dict[Message, RankTensors] = {}
        self._sent: dict[Message, Sequence[Sent]] = {}

    def send(self, message: Message, rank: int, values: RankTensors) -> None:
        """Put them into the box, as the wire would leave them."""
        self._boxes[message] = [[self._carried(x) for x in pieces] for pieces in values]

    def expect(self, message: Message, rank: int, sent: Sequence[Sent]) -> None:
        """Nothing: there is room."""

    def has(self, message: Message) -> bool:
        """Whether the message is there."""
        return message in self._boxes

    def receive(self, message: Message) -> RankTensors:
        """Take it out of the box."""
        return self._boxes.pop(message)

    def release(self, message: Message) -> None:
        """Nothing: the receiver took it."""

    def _carried(self, x: Tensor) -> Tensor:
        return self._wire.decode(self._wire.encode(x), Sent(tuple(x.shape), x.dtype)).clone()


class ProcessChannel:
    """Messages of a process that is one rank, by sends and receives that do not block.

    Args:
        group: the process group of the pipeline; its ranks are the pipeline ranks.
        device: where this rank computes.
        wire: what tensors are sent as.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, wire: Wire) -> None:
        self._group = group
        self._device = device
        self._wire = wire
        self._under_way: dict[Message, list[tuple[dist.Work | None, Tensor]]] = {}
        self._expected: dict[Message, list[tuple[Sent, list[tuple[dist.Work | None, Tensor]]]]] = {}

    def send(self, message: Message, rank: int, values: RankTensors) -> None:
        """Start to send each tensor, under the tag of this pair of stages."""
        parts = [part for (x,) in values for part in self._wire.encode(x)]
        tag = _tag(message)
        self._under_way[message] = [
            (dist.isend(part, group=self._group, group_dst=rank, tag=tag), part) for part in parts
        ]

    def expect(self, message: Message, rank: int, sent: Sequence[Sent]) -> None:
        """Start to receive into fresh tensors."""
        tag, found = _tag(message), []
        for item in sent:
            parts = []
            for part in self._wire.layout(item):
                room = torch.empty(part.shape, dtype=part.dtype, device=self._device)
                parts.append((dist.irecv(room, group=self._group, group_src=rank, tag=tag), room))
            found.append((item, parts))
        self._expected[message] = found

    def has(self, message: Message) -> bool:
        """Whether it was expected: `receive` waits for it."""
        return message in self._expected

    def receive(self, message: Message) -> RankTensors:
        """Wait for each tensor."""
        values = []
        for sent, parts in self._expected.pop(message):
            for work, _ in parts:
                if work is not None:
                    work.wait()
            values.append([self._wire.decode([room for _, room in parts], sent)])
        return values

    def release(self, message: Message) -> None:
        """Wait for the sends, which are over."""
        for work, _ in self._under_way.pop(message):
            if work is not None:
                work.wait()


def _tag(message: Message) -> int:
    """A tag of its own for each pair of stages and direction; messages of one tag arrive in the order of sending."""
    small, large = sorted((message.source, message.target))
    pair = large * (large - 1) // 2 + small
    between_ranks = message.micro_batch < 0  # of sums, whose ends are ranks and no stages
    return 4 * pair + 2 * between_ranks + (message.payload is Payload.GRADIENT)
