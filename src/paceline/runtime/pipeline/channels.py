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

from paceline.runtime.pipeline.directed import DirectedGroups
from paceline.runtime.pipeline.step import Sent
from paceline.runtime.pipeline.wire import Exact, Wire
from paceline.schedule import Payload

RankTensors = list[list[Tensor]]
"""For each tensor of a message, its piece on each rank in this process."""


class Message(NamedTuple):
    """Which message: what it carries, from which stage to which, for which micro-batch.

    Sums of gradients over micro-batches go from rank to rank; they have numbers below 0, and are never rounded.
    """

    payload: Payload
    source: int
    target: int
    micro_batch: int

    @property
    def is_of_ranks(self) -> bool:
        """Whether its ends are pipeline ranks instead of stages."""
        return self.micro_batch < 0

    def __str__(self) -> str:
        """`the activations of micro-batch 3 from stage 0 to stage 1`, for people."""
        if self.is_of_ranks:
            return f"sums of gradients from rank {self.source} to rank {self.target} of the pipeline"
        what = "activations" if self.payload is Payload.ACTIVATION else "gradients"
        return f"the {what} of micro-batch {self.micro_batch} from stage {self.source} to stage {self.target}"


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
        wire = _wire_of(message, self._wire)
        self._boxes[message] = [[_carried(wire, x) for x in pieces] for pieces in values]

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


class ProcessChannel:
    """Messages of a process that is one rank, by sends and receives that do not block.

    Args:
        group: the process group of the pipeline; its ranks are the pipeline ranks.
        device: where this rank computes.
        wire: what tensors are sent as.
        directed: a group for each way, where the transport needs one.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, wire: Wire, directed: DirectedGroups | None = None
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._directed = directed
        self._device = device
        self._wire = wire
        self._under_way: dict[Message, list[tuple[dist.Work | None, Tensor]]] = {}
        self._expected: dict[Message, list[tuple[Sent, list[tuple[dist.Work | None, Tensor]]]]] = {}

    def send(self, message: Message, rank: int, values: RankTensors) -> None:
        """Start to send each tensor, under the tag of this pair of stages."""
        wire = _wire_of(message, self._wire)
        parts = [part for (x,) in values for part in wire.encode(x)]
        group, _, target, tag = self._way(message, self._rank, rank)
        self._under_way[message] = [(dist.isend(part, group=group, group_dst=target, tag=tag), part) for part in parts]

    def expect(self, message: Message, rank: int, sent: Sequence[Sent]) -> None:
        """Start to receive into fresh tensors."""
        group, source, _, tag = self._way(message, rank, self._rank)
        found = []
        for item in sent:
            parts = []
            for part in _wire_of(message, self._wire).layout(item):
                room = torch.empty(part.shape, dtype=part.dtype, device=self._device)
                parts.append((dist.irecv(room, group=group, group_src=source, tag=tag), room))
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
                _wait(work, message)
            values.append([_wire_of(message, self._wire).decode([room for _, room in parts], sent)])
        return values

    def release(self, message: Message) -> None:
        """Wait for the sends, which are over."""
        for work, _ in self._under_way.pop(message):
            _wait(work, message)

    def _way(self, message: Message, source: int, target: int) -> tuple[dist.ProcessGroup, int, int, int]:
        """The group through which a message goes, who in it sends and who receives, and its tag."""
        if self._directed is None:
            return self._group, source, target, _tag(message)
        return *self._directed.towards(message.payload, source, target), 0


def _wait(work: dist.Work | None, message: Message) -> None:
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        error.add_note(f"while waiting for {message}")
        raise


def _wire_of(message: Message, wire: Wire) -> Wire:
    """What a message is sent as: copies of a parameter would part if their gradients were rounded on the way."""
    return Exact() if message.is_of_ranks else wire


def _carried(wire: Wire, x: Tensor) -> Tensor:
    return wire.decode(wire.encode(x), Sent(tuple(x.shape), x.dtype)).clone()


def _tag(message: Message) -> int:
    """A tag of its own for each pair of stages and direction; messages of one tag arrive in the order of sending."""
    small, large = sorted((message.source, message.target))
    pair = large * (large - 1) // 2 + small
    return 4 * pair + 2 * message.is_of_ranks + (message.payload is Payload.GRADIENT)
