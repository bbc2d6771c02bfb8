"""A worker of `recovery`: computes nothing for a while, and writes down when each of its tasks was done.

Run as `python -m paceline.bench.server.recovery_worker DIRECTORY FILE TASK_S`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.directory import Directory
from paceline.exchange.interface import NO_ROWS, Arrivals, RowsWanted
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.membership import Member, Role
from paceline.train.data import MicroBatch
from paceline.train.servers.worker.ahead import InThread
from paceline.train.servers.worker.computer import Computed, Evaluated, Prepared
from paceline.train.servers.worker.reports import Listener, TaskReport
from paceline.train.servers.worker.worker import Worker


class Idle:
    """Stands for a replica; see `worker.Computer`. Its gradients are zeros, and take `task_s` seconds."""

    def __init__(self, job: Job, task_s: float) -> None:
        tables = {index: table for index, table in enumerate(job.tables) if isinstance(table, DenseTable)}
        self.dense: Sequence[int] = list(tables)
        self.sparse: Sequence[int] = ()
        self.rooms: Sequence[Tensor] = [torch.empty(table.shape) for table in tables.values()]
        self.overlaps = False
        self._gradients = {index: torch.zeros(table.shape) for index, table in tables.items()}
        self._task_s = task_s

    def order(self) -> Sequence[int] | None:
        """See `worker.Computer`."""
        return None

    def prepare(self, portions: Sequence[MicroBatch]) -> Prepared:
        """See `worker.Computer`."""
        return Prepared(portions, None, {})

    def take(self, prepared: Prepared) -> RowsWanted:
        """See `worker.Computer`."""
        return NO_ROWS

    def arrived(self, tables: Sequence[int]) -> None:
        """See `worker.Computer`."""

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        """See `worker.Computer`."""
        time.sleep(self._task_s)
        return Computed(0.0, 1.0, self._gradients, {})

    def evaluate(self, batches: Iterable[MicroBatch], read: Callable[[RowsWanted], None]) -> Evaluated:
        """See `worker.Computer`."""
        return Evaluated(0.0, 1.0, {})


class Diary(Listener):
    """Writes the moments at which tasks were done, on the clock that all processes of a host share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def on_task(self, report: TaskReport) -> None:
        """See `Listener`."""
        os.write(self._file, b"%.6f\n" % time.monotonic())


def main(root: str, path: str, task_s: str) -> None:
    """Work until killed."""
    torch.set_num_threads(1)
    directory = Directory(Path(root))
    charter, secret = directory.read(), directory.read_secret()
    member = Member.join(charter, secret, Role.WORKER)
    exchange = ServerExchange(charter, member, secret, directory)
    computer, diary = Idle(charter.job, float(task_s)), Diary(Path(path))
    Worker(
        exchange, member, computer, lambda task: (), ahead=charter.terms.ahead, listener=diary, aside=InThread()
    ).run()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PacelineError as error:
        sys.exit(f"error: {error}")
