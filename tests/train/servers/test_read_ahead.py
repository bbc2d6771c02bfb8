"""A worker that looks ahead: what it reads early, what it steps on itself, and that a replay does the same."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.exchange.client.client import ServerExchange
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Arrivals, Dealer, Exchange, Rows, RowsWanted
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.replay.whole import replay
from paceline.exchange.shard.snapshot import load_shard
from paceline.exchange.shard.whole import write_initial
from paceline.train.data import MicroBatch
from paceline.train.servers.worker.ahead import InThread
from paceline.train.servers.worker.computer import Computed, Evaluated, Prepared
from paceline.train.servers.worker.reading import ReadAhead
from paceline.train.servers.worker.worker import Worker
from tests.exchange.loopback import SECRET, Tasks, charter, finish, loopback
from tests.train.servers.in_memory import Dealing, InMemory, Kept

TASKS = 24


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(300, exit=True)  # only one that hangs takes so long
    yield
    faulthandler.cancel_dump_traceback_later()


def job(consistency: str, shards: int = 3, pieces: int = 2, dense: str | None = None) -> Job:
    how = Consistency.parse(consistency)
    adagrad = Rule("adagrad", {"lr": 0.1})
    tables = (
        DenseTable("weight", (5,), "float64", adagrad, Consistency.parse(dense or consistency)),
        SparseTable("rows", 2, "float64", Rule("sgd", {"lr": 0.5}), how, Initializer("normal", 1.0)),
    )
    return Job(tables, shards=shards, pieces=pieces)


def keys_of(task: int) -> Tensor:
    return torch.tensor([7, 100 + task % 5, 200 + task])


def portions(task: int) -> list[MicroBatch]:
    return [MicroBatch({"task": torch.tensor(task)}, False, 1)]


class Toy:
    """Gradients that depend on all that was read."""

    dense, sparse, overlaps = (0,), (1,), False

    def __init__(self) -> None:
        self.rooms = [torch.zeros(5, dtype=torch.float64)]
        self.rows = torch.empty(0)
        self.keys = torch.empty(0)
        self.computed: list[int] = []
        self.prepared: list[int] = []

    def order(self) -> None:
        return None

    def prepare(self, portions: Sequence[MicroBatch]) -> Prepared:
        task = int(portions[0].batch["task"])  # type: ignore[call-overload]
        self.prepared.append(task)
        return Prepared(portions, None, {1: keys_of(task)})

    def take(self, prepared: Prepared) -> RowsWanted:
        self.keys = prepared.keys[1]
        self.rows = torch.full((len(self.keys), 2), torch.nan, dtype=torch.float64)
        return {1: (self.keys, self.rows)}

    def arrived(self, tables: Sequence[int]) -> None:
        pass

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        self.computed.append(task)
        weight, rows = self.rooms[0], self.rows
        return Computed(0.0, 1.0, {0: weight * 0.3 + rows.sum() + task}, {1: Rows(self.keys, rows * 0.2 + weight[:2])})

    def evaluate(self, batches: Iterable[MicroBatch], read: Callable[[RowsWanted], None]) -> Evaluated:
        raise AssertionError


def work(ahead: ReadAhead) -> Callable[[int, Exchange, Dealer], None]:
    return lambda number, exchange, dealer: Worker(exchange, dealer, Toy(), portions, ahead=4, read_ahead=ahead).run()


@pytest.mark.parametrize(
    ("consistency", "ahead", "gone"),
    [
        ("asp", ReadAhead.PARAMETERS, []),
        ("ssp(1)", ReadAhead.PARAMETERS, [0]),
        ("bsp", ReadAhead.ROWS, [1]),
        ("downpour(3, 2)", ReadAhead.PARAMETERS, []),
        ("downpour(2, 3)", ReadAhead.SAMPLES, []),
    ],
)
def test_a_replay_looks_ahead_as_the_run_did(
    consistency: str, ahead: ReadAhead, gone: list[int], tmp_path: Path
) -> None:
    """One of three workers leaves in the midst; tasks of one that is gone are found while others look ahead."""
    made, directory = job(consistency), Directory(tmp_path)
    directory.write(charter(made, TASKS))
    write_initial(directory.snapshots, made, {"weight": torch.ones(5, dtype=torch.float64)})
    shards = [load_shard(directory.snapshot(0), made, number) for number in range(made.shards)]
    with loopback(made, 2, shards=shards) as there:
        dealer = Tasks(TASKS, there)
        assert [dealer.next_task().number for _ in gone] == gone[:0] + list(range(len(gone)))
        toys = [Toy() for _ in range(3)]

        def one(number: int) -> None:
            exchange = ServerExchange(charter(made, TASKS), there.member(number), SECRET, directory, outstanding=1)
            toy = toys[number - 1]
            stopping = (lambda: len(toy.computed) > 2) if number == 3 else (lambda: False)
            try:
                Worker(
                    exchange,
                    exchange.logged(dealer),
                    toy,
                    portions,
                    ahead=4,
                    read_ahead=ahead,
                    aside=InThread(),
                    stopping=stopping,
                ).run()
            except BaseException:
                for member in there.members:
                    member.fenced = True
                raise
            finally:
                exchange.close()

        with ThreadPoolExecutor() as pool:
            workers = [pool.submit(one, number) for number in (1, 2, 3)]
            if gone:
                dealer.give_up(range(len(gone)))
        for worker in workers:
            worker.result()
        finish(there, directory, TASKS)
    assert sorted(dealer.finished) == list(range(TASKS))
    outcome = replay(directory, work(ahead))
    assert outcome.difference is None and outcome.workers == 3


class Told(InMemory):
    """An exchange that also fetches, and notes what was read and pushed."""

    def __init__(self, kept: Kept, worker: int) -> None:
        super().__init__(kept, worker)
        self.events: list[tuple[object, ...]] = []

    def fetch(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> Told:
        self._read_all("early", tables, out, clock, rows)
        return self

    def wait(self) -> None:
        pass

    def pull_together(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        self._read_all("read", tables, out, clock, rows)

    def pull_in_order(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> Arrivals:
        raise AssertionError("toys compute once they have all that they need")

    def _read_all(self, how: str, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        self.events.append((how, clock, [*tables, *rows]))
        if tables:
            self.pull(tables, out, clock)
        for table, (keys, room) in rows.items():
            self.pull_rows(table, keys, room, clock)

    def push(
        self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float = 1.0
    ) -> None:
        self.events.append(("push", tasks[0]))
        super().push(tasks, dense, rows, weight)


def test_what_comes_next_is_read_while_a_task_is_computed() -> None:
    """Rows that may be a clock old are read early, and dense tables only if that is asked for; neither under bsp."""
    found = {}
    for dense, sparse, ahead in (
        ("asp", "asp", ReadAhead.PARAMETERS),
        ("bsp", "ssp(1)", ReadAhead.ROWS),
        ("asp", "asp", ReadAhead.SAMPLES),
    ):
        made = job(sparse, pieces=1, dense=dense)
        kept = Kept(made, {"weight": torch.ones(5)})
        toy, exchange = Toy(), Told(kept, 0)
        Worker(exchange, Dealing(2), toy, portions, read_ahead=ahead).run()
        assert toy.prepared == toy.computed == [0, 1]
        found[dense, sparse, ahead] = exchange.events
    assert list(found.values()) == [
        [("read", 0, [0, 1]), ("early", 1, [0, 1]), ("push", 0), ("push", 1)],
        [("read", 0, [0, 1]), ("early", 1, [1]), ("push", 0), ("read", 1, [0]), ("push", 1)],
        [("read", 0, [0, 1]), ("push", 0), ("read", 1, [0, 1]), ("push", 1)],
    ]


def test_downpour_steps_on_rows_that_it_has_until_it_fetches() -> None:
    made = job("downpour(3, 2)", shards=1, pieces=1)
    kept = Kept(made, {"weight": torch.ones(5)})
    every = torch.unique(torch.cat([keys_of(task) for task in range(8)]))
    rows = torch.empty(len(every), 2, dtype=torch.float64)
    InMemory(kept, 9).pull_rows(1, every, rows, 0)
    servers = dict(zip(every.tolist(), rows, strict=True))
    square = torch.zeros(5, dtype=torch.float64)
    weight = torch.ones(5, dtype=torch.float64)
    accrued: list[tuple[Tensor, dict[int, Tensor]]] = []
    for task in range(8):
        if task % 3 == 0:
            mine, local = weight.clone(), {}
        keys = keys_of(task).tolist()
        local = {key: servers[key] for key in keys} | local
        read = torch.stack([local[key] for key in keys])
        dense, sparse = mine * 0.3 + read.sum() + task, read * 0.2 + mine[:2]
        accrued.append((dense, dict(zip(keys, sparse, strict=True))))
        mine = mine - 0.1 * dense
        local |= {key: local[key] - 0.5 * gradient for key, gradient in zip(keys, sparse, strict=True)}
        if task % 2:
            total = accrued[0][0] + accrued[1][0]
            square += total**2
            weight = weight - 0.1 * total / (square.sqrt() + 1e-10)
            for _, gradients in accrued:
                servers |= {key: servers[key] - 0.5 * gradient for key, gradient in gradients.items()}
            accrued = []
    Worker(InMemory(kept, 0), Dealing(8), Toy(), portions, ahead=6).run()
    InMemory(kept, 9).pull_rows(1, every, rows, 0)
    assert float((kept.values()["weight"] - weight).abs().max()) < 1e-9
    assert float((rows - torch.stack([servers[key] for key in every.tolist()])).abs().max()) < 1e-9
