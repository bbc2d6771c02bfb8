"""The power goes, for all hosts at once, again and again: nothing that was acknowledged is gone from a durable job."""

from __future__ import annotations

import faulthandler
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from paceline.exchange.client.actions import read_actions
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership import Member, Role
from paceline.exchange.membership.service import Service, serve
from paceline.exchange.membership.state import State
from paceline.exchange.membership.store import Journal
from paceline.exchange.replay.whole import replay
from paceline.exchange.server.life import Life
from paceline.exchange.shard.log import read_log
from paceline.exchange.shard.manifest import whole_snapshots
from paceline.exchange.shard.whole import write_initial
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from tests.exchange.chaos.toil import Toil, job, values
from tests.exchange.power import Disk, Image

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what was synced is read from /proc")
JOB = job("asp", shards=3, replication=2)
TASKS = 24
BOTH = 2
"""Servers, each of which has all shards; and workers."""


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(100, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Play:
    """A job in this process. `cuts`: tasks that were acknowledged before the power went, and what was left then."""

    def __init__(self, folder: Path, disk: Disk, durable: bool) -> None:
        terms = Terms(TASKS, servers=BOTH, workers=BOTH, snapshot_every=3, kept_snapshots=TASKS)
        self.directory = Directory(folder / "exchange")
        self.directory.write(Charter(JOB, terms, Address(unix=str(folder / "c")), durable=durable))
        self.disk = disk
        self.cuts: list[tuple[set[int], Image]] = []
        self._acknowledged: set[int] = set()
        self._lock = threading.Lock()
        write_initial(self.directory.snapshots, JOB, values(JOB))

    def run(self) -> None:
        """Play it to its end."""
        ready: queue.SimpleQueue[Service] = queue.SimpleQueue()
        with ThreadPoolExecutor() as threads:
            coordinator = threads.submit(serve, self.directory, ready=ready.put)
            service = ready.get()
            others = [threads.submit(Life(self.directory).run) for _ in range(BOTH)]
            others += [threads.submit(self._work) for _ in range(BOTH)]
            for other in others:
                other.result()
            service.stop()
            coordinator.result()

    def _work(self) -> None:
        charter, secret = self.directory.read(), self.directory.read_secret()
        member = Member.join(charter, secret, Role.WORKER)
        exchange = ServerExchange(charter, member, secret, self.directory)
        try:
            Toil(exchange, Noting(exchange.logged(member), self._note)).run()
            member.leave()
        finally:
            exchange.close()
            member.close()

    def _note(self, deals: Sequence[Deal]) -> None:
        """These were acknowledged, and then the power goes."""
        with self._lock:
            self._acknowledged.update(deal.number for deal in deals if deal.order is Order.TASK)
            self.cuts.append((set(self._acknowledged), self.disk.image()))


class Noting:
    """A dealer that says what is done before it is told so."""

    def __init__(self, dealer, note) -> None:  # type: ignore[no-untyped-def]
        self._dealer, self._note = dealer, note

    def done(self, deals: Sequence[Deal]) -> None:
        self._note(deals)
        self._dealer.done(deals)

    def __getattr__(self, name: str) -> object:
        return getattr(self._dealer, name)


def gone(acknowledged: set[int], left: Directory) -> set[str]:
    """What was acknowledged, and is not where it is to be."""
    logs = [read_log(path) for path in sorted((left.root / "updates").glob("*"))]
    applied = [{(record.shard, task) for record in log for task in record.tasks} for log in logs]
    actions = [read_actions(path) for path in (left.root / "actions").glob("*") if path.stat().st_size]
    pushed = {task for each in actions for tasks in each.pushes.values() for task in tasks}
    lost = {
        f"task {task} in shard {shard}"
        for task in acknowledged
        for shard in range(JOB.shards)
        if sum((shard, task) in held for held in applied) < BOTH
    }
    return lost | {f"the push of task {task}" for task in acknowledged - pushed}


def remembered(left: Directory) -> State:
    """What the next coordinator knows."""
    journal = Journal(left.journal)
    try:
        return State.of(left.read(), journal.load())
    finally:
        journal.close()


def test_what_was_acknowledged_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="paceline-") as folder:  # short: it holds sockets
        root = Path(folder) / "disk"
        root.mkdir()
        play = Play(root, disk := Disk(root, monkeypatch), durable=True)
        play.run()
        assert len(play.cuts[-1][0]) == TASKS
        numbers = set()
        for number, (acknowledged, image) in enumerate(play.cuts):
            disk.restore(image, left := Path(folder) / f"left-{number}")
            directory = Directory(left / "exchange")
            assert not gone(acknowledged, directory)
            state = remembered(directory)
            whole = whole_snapshots(directory.snapshots)
            assert directory.read_secret() and {one.number for one in state.snapshots} <= set(whole)
            if whole[-1] not in numbers:
                numbers.add(whole[-1])
                assert not whole[-1] or replay(directory, toil, snapshot=whole[-1]).difference is None
        assert len(numbers) > 2


def toil(worker: int, exchange, dealer) -> None:  # type: ignore[no-untyped-def]
    Toil(exchange, dealer).run()


def test_of_a_job_that_is_not_durable_snapshots_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="paceline-") as folder:
        root = Path(folder) / "disk"
        root.mkdir()
        play = Play(root, disk := Disk(root, monkeypatch), durable=False)
        play.run()
        acknowledged, image = play.cuts[-1]
        disk.restore(image, left := Path(folder) / "left")
        directory = Directory(left / "exchange")
        assert gone(acknowledged, directory)
        assert {one.number for one in remembered(directory).snapshots} <= set(whole_snapshots(directory.snapshots))
        assert whole_snapshots(directory.snapshots)
