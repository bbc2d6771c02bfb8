"""Pushes: to the heads of all shards, each of which hears of the tasks, also where it has no share of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import ExchangeError
from paceline.exchange.client.errands import Errand
from paceline.exchange.client.outgoing import Outgoing
from paceline.exchange.messages import Kind, packed
from paceline.exchange.view import View
from paceline.exchange.wire.frame import Frame


class Push(Errand):
    """A push.

    Args:
        worker, sequence, tasks, weight: see `updates.Update`.
        reads: of each shard the position that the gradients were computed from.
        outgoing: the gradients.

    Attributes:
        outgoing: see there.
        staleness: of each shard that has acknowledged it.
    """

    def __init__(
        self,
        worker: int,
        sequence: int,
        tasks: Sequence[int],
        weight: float,
        reads: Sequence[int],
        outgoing: Outgoing,
    ) -> None:
        super().__init__(range(len(reads)))
        self.sequence, self.tasks = sequence, tuple(tasks)
        self.staleness: dict[int, int] = {}
        self._worker, self._weight = worker, weight
        self._reads, self.outgoing = reads, outgoing

    def holder(self, view: View, shard: int) -> int:
        """The head: the one master."""
        return view.head(shard)

    def frame(self, shards: Sequence[int]) -> Frame:
        """See `Errand`."""
        payloads = self.outgoing.payloads(shards)
        numbers = [len(self.tasks), *self.tasks, len(shards)]
        for shard in shards:
            numbers += (shard, self._reads[shard])
        return Frame(
            Kind.PUSH,
            worker=self._worker,
            sequence=self.sequence,
            weight=self._weight,
            numbers=np.asarray(numbers + packed(payloads), dtype=np.int64),
            tensors=[tensor for payload in payloads for tensor in payload.tensors],
        )

    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """See `Errand`."""
        told = answer.numbers.reshape(-1, 3).tolist()
        if sorted(shard for shard, _, _ in told) != sorted(shards):
            raise ExchangeError(f"a server acknowledged other shards than those it was sent: {sorted(shards)}.")
        self.staleness.update((shard, staleness) for shard, _, staleness in told)
