"""A job whose servers and workers are killed, and others join: when its workers had to wait, and for how long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from paceline.errors import ConnectionLost, RankFailed
from paceline.exchange.directory import Directory
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.membership import Observer
from paceline.exchange.shard.whole import write_initial
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address


class Logs(StrEnum):
    """What is kept of updates and actions."""

    NONE = "none"
    KEPT = "kept"
    DURABLE = "durable"


_LIMIT_S: Final = 120.0
"""After what a job that does not go on is given up."""


@dataclass
class _Process:
    """A process of the job. diary: of a worker, when its tasks were done."""

    running: subprocess.Popen[bytes]
    log: Path
    began_s: float
    diary: Path

    def kill(self) -> float:
        """Kill it; return when."""
        now = time.monotonic()
        self.running.send_signal(signal.SIGKILL)
        self.running.wait()
        return now

    @property
    def done_s(self) -> list[float]:
        """When its tasks were done."""
        return list(map(float, self.diary.read_text().split())) if self.diary.exists() else []


class RecoveryJob:
    """Servers that hold one dense table, and workers.

    Args:
        folder: for all that it leaves.
        servers, workers: with how many it begins.
        elements: of the table.
        task_s: that a task computes.
        replication: servers that hold each shard.
        log: what is kept of updates and actions.
    """

    def __init__(
        self, folder: Path, servers: int, workers: int, elements: int, task_s: float, replication: int, log: Logs
    ) -> None:
        self._folder, self._task_s = folder, task_s
        self._directory = Directory(folder / "exchange")
        job = Job((DenseTable("weight", (elements,)),), shards=4 * servers, pieces=workers, replication=replication)
        terms = Terms(tasks=workers * 10**8, servers=servers, workers=1, ahead=2)
        charter = Charter(
            job, terms, Address(unix=str(folder / "c")), log=log is not Logs.NONE, durable=log is Logs.DURABLE
        )
        self._directory.write(charter)
        write_initial(self._directory.snapshots, job, {"weight": torch.zeros(elements)})
        self._observer = Observer(charter, self._directory.read_secret())
        self._all: list[_Process] = []
        self._begun_with = servers, workers
        self.servers: list[_Process] = []
        self.workers: list[_Process] = []

    def start(self) -> None:
        """Start all of it; returns once it runs."""
        servers, workers = self._begun_with
        self._start("paceline.exchange.membership")
        self.servers = [self._start("paceline.exchange.server") for _ in range(servers)]
        self.workers = [self._start_worker() for _ in range(workers)]
        self._until(lambda: all(len(worker.done_s) > 10 for worker in self.workers))

    def kill_server(self, watched_s: float) -> float:
        """Kill one; return the longest time that a worker then waited for a task to be done."""
        killed_s = self.servers.pop(0).kill()
        return self._stall(killed_s, watched_s)

    def kill_worker(self, watched_s: float) -> float:
        """Kill one; return the longest time that another then waited for a task to be done."""
        killed_s = self.workers.pop(0).kill()
        return self._stall(killed_s, watched_s)

    def join_server(self) -> float:
        """Start one; return the seconds until it has its share, and nothing moves."""
        self._until(lambda: self._settled(len(self.servers)))
        self.servers.append(self._start("paceline.exchange.server"))
        self._until(lambda: self._settled(len(self.servers)))
        return time.monotonic() - self.servers[-1].began_s

    def join_worker(self) -> float:
        """Start one; return the seconds until its first task was done."""
        worker = self._start_worker()
        self.workers.append(worker)
        self._until(lambda: worker.done_s)
        return worker.done_s[0] - worker.began_s

    def usual_s(self) -> list[float]:
        """Seconds between tasks of a worker, while nothing happens."""
        times = self.workers[0].done_s[-50:]
        return [after - before for before, after in pairwise(times)]

    def close(self) -> None:
        """End all processes."""
        self._observer.close()
        for process in self._all:
            process.running.kill()
        for process in self._all:
            process.running.wait()

    def _stall(self, killed_s: float, watched_s: float) -> float:
        time.sleep(watched_s)
        self._until(lambda: all(worker.done_s[-1] > killed_s + watched_s for worker in self.workers))
        return max(longest(worker.done_s, killed_s, killed_s + watched_s) for worker in self.workers)

    def _settled(self, servers: int) -> bool:
        view = self._status()["view"]
        heads = {chain[0] for chain in view["chains"] if chain}
        return len(view["servers"]) == servers and len(heads) == servers and not view["moves"]

    def _status(self) -> dict[str, Any]:
        try:
            return self._observer.status()
        except ConnectionLost:  # it starts
            return {"view": {"servers": {}, "chains": [], "moves": []}}

    def _until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + _LIMIT_S
        while not condition():
            ended = next((process for process in self._all if process.running.poll() not in (None, -9)), None)
            if ended is not None or time.monotonic() > end_s:
                log = (ended or self._all[0]).log
                raise RankFailed(f"a job of the benchmark does not go on; {log.name}:\n{log.read_text()[-2000:]}")
            time.sleep(0.002)

    def _start_worker(self) -> _Process:
        return self._start("paceline.bench.server.recovery_worker", f"diary-{len(self._all)}", str(self._task_s))

    def _start(self, module: str, diary: str = "", *more: str) -> _Process:
        log = self._folder / f"{module.rpartition('.')[2]}-{len(self._all)}.log"
        path = self._folder / diary
        arguments = [str(path), *more] if diary else []
        command = [sys.executable, "-m", module, str(self._directory.root), *arguments]
        began_s = time.monotonic()
        with log.open("wb") as out:
            running = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._all.append(_Process(running, log, began_s, path))
        return self._all[-1]


@contextmanager
def recovery_job(
    servers: int, workers: int, elements: int, task_s: float, replication: int, log: Logs
) -> Iterator[RecoveryJob]:
    """A job that runs, until the end of the block.

    Raises:
        RankFailed: it does not go on.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # short: it holds sockets
        job = RecoveryJob(Path(folder), servers, workers, elements, task_s, replication, log)
        try:
            job.start()
            yield job
        finally:
            job.close()


def longest(times: Sequence[float], begin: float, end: float) -> float:
    """Return the longest time between two moments, of those that reach into a span."""
    return max(after - before for before, after in pairwise(times) if after > begin and before < end)
