"""A worker of few means: its gradients are a function of its task and of what it read. Also a process of its own."""

from __future__ import annotations

import faulthandler
import logging
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.errors import ExchangeError
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Dealer, Exchange, Interrupted, Order, Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.membership import Fenced, Member, Role

WEIGHT, BIAS, ROWS = 0, 1, 2
KEYS = 500


def job(consistency: str, *, shards: int = 6, pieces: int = 2, replication: int = 2, clip: float | None = None) -> Job:
    """Two dense tables, one of them in several shards, and rows; three rules."""
    how = Consistency.parse(consistency)
    return Job(
        (
            DenseTable("weight", (6, 4096), "float32", Rule("adagrad", {"lr": 0.05}), how),
            DenseTable("bias", (10,), "float64", Rule("momentum", {"lr": 0.01}), how),
            SparseTable("rows", 4, "float32", Rule("adam", {"lr": 0.01}), how, Initializer("normal", 0.1)),
        ),
        shards=shards,
        pieces=pieces,
        replication=replication,
        seed=3,
        clip=clip,
    )


def values(of: Job) -> dict[str, torch.Tensor]:
    """What the dense tables begin with."""
    draw = torch.Generator().manual_seed(1)
    return {
        table.name: torch.randn(table.shape, generator=draw).to(getattr(torch, table.dtype))
        for table in of.tables
        if isinstance(table, DenseTable)
    }


class Toil:
    """The loop; the same in a replay.

    Args:
        think: is called with the number of each task, and takes a while.
        stopping: whether to leave after this task.
    """

    def __init__(
        self,
        exchange: Exchange,
        dealer: Dealer,
        think: Callable[[int], None] = lambda task: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exchange, self._dealer, self._think, self._stopping = exchange, dealer, think, stopping
        self._weight = torch.empty(exchange.job.tables[WEIGHT].shape)  # type: ignore[union-attr]
        self._bias = torch.empty(exchange.job.tables[BIAS].shape, dtype=torch.float64)  # type: ignore[union-attr]
        self._held: list[Deal] = []

    def run(self) -> None:
        """Work until all is done."""
        while not self._stopping():
            deal = self._held.pop(0) if self._held else self._dealer.next_task()
            if deal.order is Order.END:
                break
            if deal.order is Order.TASK:
                self._do(deal)
            elif deal.order is Order.EVALUATE:
                self._dealer.done([deal])
            else:
                time.sleep(0.002)
        self._exchange.flush()
        if self._held:
            self._dealer.put_back(self._held)

    def _do(self, deal: Deal) -> None:
        draw = torch.Generator().manual_seed(deal.number)
        keys = torch.randperm(KEYS, generator=draw)[:30]
        rows = torch.empty(len(keys), 4)
        clock = self._exchange.job.clock(deal.number)
        while True:
            try:
                self._exchange.pull([WEIGHT, BIAS], [self._weight, self._bias], clock)
                self._exchange.pull_rows(ROWS, keys, rows, clock)
                break
            except Interrupted:
                self._help()
        self._think(deal.number)
        noise = torch.randn(4096, generator=draw)
        self._exchange.push(
            [deal.number],
            {WEIGHT: 0.1 * self._weight + noise * (1 + rows.mean()), BIAS: 0.1 * self._bias + noise[:10]},
            {ROWS: Rows(keys, 0.1 * rows + self._weight[0, :4])},
            weight=1.0 + deal.number % 3,
        )
        self._exchange.flush()
        self._dealer.done([deal])

    def _help(self) -> None:
        """Do the task of a worker that is gone."""
        other = self._dealer.next_task()
        if other.order is Order.TASK and other.alone:
            self._do(other)
        elif other.order in (Order.TASK, Order.EVALUATE):
            self._held.append(other)


def live(directory: Directory, seconds: float, stopping: Callable[[], bool]) -> None:
    """Work as a member, and anew as another where this one was taken for dead.

    Tasks from the number in the file `limit` on wait.
    """
    charter, secret = directory.read(), directory.read_secret()

    def think(task: int) -> None:
        time.sleep(seconds * random.uniform(0.5, 1.5))
        while task >= int((directory.root / "limit").read_text()):
            time.sleep(0.01)

    while not stopping():
        member = Member.join(charter, secret, Role.WORKER)
        exchange = ServerExchange(charter, member, secret, directory)
        try:
            Toil(exchange, exchange.logged(member), think, stopping).run()
            member.leave()
            return
        except Fenced:
            logging.warning("worker %d was given up, and begins anew", member.id)
        except ExchangeError:
            if not member.fenced:
                raise
            logging.warning("worker %d was given up, and begins anew", member.id)
        finally:
            exchange.close()
            member.close()


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    live(Directory(Path(sys.argv[1])), float(sys.argv[2]), lambda: bool(asked))
