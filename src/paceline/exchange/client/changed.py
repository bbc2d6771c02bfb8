"""The question which rows were changed: of servers of a job that notes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.errands import Errand
from paceline.exchange.messages import Kind
from paceline.exchange.view import View
from paceline.exchange.wire.frame import Frame


class Changed(NamedTuple):
    """Rows that were changed.

    Attributes:
        keys: by table, each once: [n] int64.
        positions: of each shard, up to which they are known; where to go on from.
    """

    keys: Mapping[int, Tensor]
    positions: Sequence[int]


class Changes(Errand):
    """Asks all shards.

    Args:
        worker: who asks: its own updates do not count.
        tables: sparse ones.
        since: of each shard the position after which.
    """

    def __init__(self, worker: int, tables: Sequence[int], since: Sequence[int]) -> None:
        super().__init__(range(len(since)))
        self._worker, self._tables, self._since = worker, tables, since
        self._positions = dict(enumerate(since))
        self._found: dict[tuple[int, int], Tensor] = {}

    def holder(self, view: View, shard: int) -> int:
        """The tail."""
        return view.tail(shard)

    def frame(self, shards: Sequence[int]) -> Frame:
        """See `Errand`."""
        numbers = [number for asked in self._asked(shards) for number in (*asked, self._since[asked[1]])]
        return Frame(Kind.CHANGED, worker=self._worker, numbers=np.array(numbers, dtype=np.int64))

    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """See `Errand`."""
        asked = self._asked(shards)
        if not len(asked) == len(answer.tensors) == len(answer.numbers):
            raise ExchangeError(f"a server answered {len(asked)} questions for changes with {len(answer.tensors)}.")
        for (table, shard), keys, position in zip(asked, answer.tensors, answer.numbers.tolist(), strict=True):
            if keys.dtype != torch.int64 or keys.ndim != 1:
                raise ExchangeError(f"a server answered with keys of {keys.dtype} {list(keys.shape)}; they are int64.")
            self._found[table, shard] = keys.clone()
            self._positions[shard] = position

    @property
    def found(self) -> Changed:
        """What was found, in the order of shards."""
        keys = {
            table: torch.cat([self._found[table, shard] for shard in range(len(self._since))]) for table in self._tables
        }
        return Changed(keys, [self._positions[shard] for shard in range(len(self._since))])

    def _asked(self, shards: Sequence[int]) -> list[tuple[int, int]]:
        return [(table, shard) for shard in shards for table in self._tables]
