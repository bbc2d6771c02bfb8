"""A replica on several processes: the first of them, the leader, talks to servers, and the others do as it says.

Between them are the collectives of the placed program. What the leader read from servers is handed on, and gradients
come back to it, as `pieces` says: no other rank ever has whole what it keeps a shard of.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.exchange.interface import Arrivals, Interrupted, RowsWanted
from paceline.train.data import MicroBatch
from paceline.train.servers.worker.computer import Computed, Computer, Evaluated, Prepared


class _Word(IntEnum):
    """What the leader says, before a number."""

    READ = 1
    """What was read follows: dense tables (1), rows (2), or both (3)."""
    COMPUTE = 2
    """The task of this number."""
    EVALUATE = 3
    END = 4
    GO_ON = 5
    """Of an evaluation: the rows of a batch are there."""
    GIVE_UP = 6
    """Of an evaluation: they cannot be read now, and all of it comes again later."""


class Leader:
    """Computes together with the other ranks; a `worker.Computer`.

    Args:
        computer: of this rank.
    """

    def __init__(self, computer: Computer) -> None:
        self._computer = computer

    @property
    def dense(self) -> Sequence[int]:
        """See `worker.Computer`."""
        return self._computer.dense

    @property
    def sparse(self) -> Sequence[int]:
        """See `worker.Computer`."""
        return self._computer.sparse

    @property
    def rooms(self) -> Sequence[Tensor]:
        """See `worker.Computer`."""
        return self._computer.rooms

    @property
    def overlaps(self) -> bool:
        """Never: other ranks wait for the whole."""
        return False

    def order(self) -> None:
        """See `worker.Computer`."""

    def prepare(self, portions: Sequence[MicroBatch]) -> Prepared:
        """See `worker.Computer`."""
        return self._computer.prepare(portions)

    def take(self, prepared: Prepared) -> RowsWanted:
        """See `worker.Computer`."""
        return self._computer.take(prepared)

    def arrived(self, tables: Sequence[int]) -> None:
        """Hand on what was read: all dense tables, rows of all sparse ones, or both."""
        kinds = sum(kind for kind, some in _kinds(self._computer).items() if any(table in tables for table in some))
        if kinds:
            _say(_Word.READ, kinds)
            self._computer.arrived(_of_kinds(self._computer, kinds))

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        """See `worker.Computer`."""
        _say(_Word.COMPUTE, task)
        return self._computer.compute(task)

    def evaluate(self, batches: Iterable[MicroBatch], read: Callable[[RowsWanted], None]) -> Evaluated:
        """See `worker.Computer`."""
        _say(_Word.EVALUATE)

        def read_and_tell(rows: RowsWanted) -> None:
            try:
                read(rows)
            except BaseException:  # a read that gives way, or a leader who was given up, and goes on as another member
                _say(_Word.GIVE_UP)
                raise
            _say(_Word.GO_ON)

        return self._computer.evaluate(batches, read_and_tell if self.sparse else read)

    def end(self) -> None:
        """Let the other ranks go."""
        _say(_Word.END)


def follow(
    computer: Computer,
    portions: Callable[[int], Sequence[MicroBatch]],
    validation: Callable[[], Iterable[MicroBatch]],
    evaluated: Callable[[], object] = lambda: None,
) -> None:
    """Do as the leader says, until it says that there is nothing more.

    Args:
        computer: of this rank.
        portions: returns this rank's samples of a task.
        validation: returns this rank's part of held-out data.
        evaluated: is called after each evaluation, as the leader's listener is.
    """
    for ignored in (signal.SIGTERM, signal.SIGINT):  # the leader's to act on
        signal.signal(ignored, signal.SIG_IGN)
    while True:
        word, number = _listen()
        match word:
            case _Word.READ:
                computer.arrived(_of_kinds(computer, number))
            case _Word.COMPUTE:
                computer.take(computer.prepare(portions(number)))
                computer.compute(number)
            case _Word.EVALUATE:
                with suppress(Interrupted):
                    computer.evaluate(validation(), _hear if computer.sparse else _nothing)
                    evaluated()
            case _Word.END:
                return


def _say(word: _Word, number: int = 0) -> None:
    dist.broadcast(torch.tensor([word, number]), 0)


def _listen() -> tuple[_Word, int]:
    said = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(said, 0)
    word, number = said.tolist()
    return _Word(word), number


def _kinds(computer: Computer) -> dict[int, Sequence[int]]:
    """Tables that are handed on together, by the number that stands for them."""
    return {1: computer.dense, 2: computer.sparse}


def _of_kinds(computer: Computer, number: int) -> list[int]:
    return [table for kind, some in _kinds(computer).items() if kind & number for table in some]


def _hear(rows: RowsWanted) -> None:
    """Wait until the leader has read rows.

    Raises:
        Interrupted: it could not.
    """
    word, _ = _listen()
    if word is _Word.GIVE_UP:
        raise Interrupted


def _nothing(rows: RowsWanted) -> None:
    """A follower reads nothing itself."""
