"""A job with a coordinator and members in processes of their own, to be killed, stopped and started again."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.errors import ConnectionLost
from paceline.exchange.directory import Directory
from paceline.exchange.job import Consistency, DenseTable, Job
from paceline.exchange.membership import Member, Observer, Role
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from tests.forked import Forked

PATIENCE_S = 30.0
"""Only a test that fails waits so long."""


def job(consistency: str = "asp", **more: Any) -> Job:
    return Job((DenseTable("w", (8,), consistency=Consistency.parse(consistency)),), **{"shards": 4, **more})


class Process:
    """A process whose lines are read as they come."""

    def __init__(self, module: str, *arguments: object) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.process = Forked(module, *arguments, output=pipes[0][1], errors=pipes[1][1])
        for _, theirs in pipes:
            os.close(theirs)
        self._streams = [os.fdopen(ours) for ours, _ in pipes]
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._fresh: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self.errors.extend, args=(self._streams[1],), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        for line in self._streams[0]:
            self.lines.append(line.strip())
            self._fresh.put(line.strip())
        self._fresh.put(None)

    def line(self, beginning: str) -> str:
        """The next line that begins so; what comes before is passed over."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                line = self._fresh.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if line is None:
                break
            if line.startswith(beginning):
                return line
        self.send(signal.SIGUSR1)
        time.sleep(0.3)
        raise AssertionError(f"no line '{beginning}'; there were {self.lines} and {''.join(self.errors)}")

    def send(self, number: int) -> None:
        self.process.send(number)

    def kill(self) -> None:
        self.process.kill()
        for reader in self._readers:
            reader.join()
        for stream in self._streams:
            stream.close()


class Village:
    """The job. Its members of this process are closed at the end."""

    def __init__(self, folder: Path, job: Job, terms: Terms, store: str = "embedded", port: int = 0) -> None:
        self.directory = Directory(folder / "exchange")
        self.charter = Charter(job, terms, Address("127.0.0.1", port, str(folder / "c")), store=store)
        self.directory.write(self.charter)
        self.secret = self.directory.read_secret()
        self._processes: list[Process] = []
        self._members: list[Member] = []
        self.start()

    def start(self, *options: str) -> Process:
        self.coordinator = Process("paceline.exchange.membership.__main__", self.directory.root, *options)
        self._processes.append(self.coordinator)
        self.observer = Observer(self.charter, self.secret)
        self.wait(lambda: self.status() is not None)
        return self.coordinator

    def person(self, role: Role, *, holds: int = 0, pause_s: float = 0.0) -> Process:
        made = Process("tests.exchange.membership.person", self.directory.root, role.value, holds, pause_s)
        self._processes.append(made)
        return made

    def member(self, role: Role = Role.WORKER) -> Member:
        made = Member.join(self.charter, self.secret, role, Address("127.0.0.1", 1))
        self._members.append(made)
        return made

    def status(self) -> dict[str, Any] | None:
        try:
            return self.observer.status()
        except ConnectionLost:
            return None

    def wait(self, condition: Callable[[], Any]) -> Any:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if found := condition():
                return found
            time.sleep(0.005)
        raise AssertionError(
            f"it did not come to be; {self.status()}, {self.events()[-5:]}, {self.coordinator.errors[-20:]}"
        )

    def phase(self, name: str) -> dict[str, Any]:
        """Wait until the job is in this state; return its status."""
        found = self.wait(lambda: (status := self.status()) and status["state"] == name and status)
        assert isinstance(found, dict)
        return found

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        lines = self.directory.events.read_text().splitlines() if self.directory.events.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if name in (None, event["event"])]

    def close(self) -> None:
        for member in self._members:
            member.close()
        self.observer.close()
        for process in self._processes:
            process.kill()


@contextmanager
def village(job: Job, terms: Terms, store: str = "embedded", port: int = 0) -> Iterator[Village]:
    with TemporaryDirectory(prefix="paceline-") as folder:  # short: it holds a socket
        made = Village(Path(folder), job, terms, store, port)
        try:
            yield made
        finally:
            made.close()


def stopped(process: Process) -> None:
    """Stop a process as a debugger would, and wait until it is."""
    process.process.stop()
