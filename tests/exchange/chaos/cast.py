"""Who plays in a job of real processes: a coordinator, servers and workers, to be killed, stopped and sent away."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConnectionLost
from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.membership import Observer
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.whole import write_initial
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from tests.exchange.chaos.toil import values
from tests.forked import Forked

PATIENCE_S = 30.0
"""Only a test that fails waits so long."""


class Actor(NamedTuple):
    """A process, and where it writes."""

    process: Forked
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def end(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Return with what code it ended; None: it did not."""
        return self.process.wait(timeout_s)

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def ids(self) -> list[int]:
        """As what servers it served, one after the other."""
        return [int(found) for found in re.findall(r"this is server (\d+)", self.said)]

    def send(self, number: int) -> None:
        self.process.send(number)


class Cast:
    """A job and its processes."""

    def __init__(self, folder: Path, job: Job, terms: Terms, transport: str) -> None:
        self.folder = folder
        self.directory = Directory(folder / "exchange")
        self.charter = Charter(job, terms, Address(unix=str(folder / "c")), transport=transport)
        self.directory.write(self.charter)
        write_initial(self.directory.snapshots, job, values(job))
        self.actors: list[Actor] = []
        self.limit(0)
        self.observer = Observer(self.charter, self.directory.read_secret())
        self.start_coordinator()

    def start_coordinator(self, *options: str) -> None:
        """Start it, or another in its place."""
        self.coordinator = self._start(
            "coordinator", "paceline.exchange.membership.__main__", self.directory.root, *options
        )

    def begin_again(self, snapshot: int, servers: int, tasks: int) -> None:
        """End all processes; go on from a snapshot, with so many servers, which are still to be started, to the end."""
        for actor in self.actors:
            actor.send(signal.SIGKILL)
            actor.end()
        first = Manifest.read(self.directory.snapshot(snapshot)).first_task
        terms = replace(self.charter.terms, restored=snapshot, first_task=first, servers=servers, tasks=tasks)
        self.charter = replace(self.charter, terms=terms)
        self.directory.write(self.charter)
        self.start_coordinator("--anew")

    def server(self) -> Actor:
        return self._start("server", "paceline.exchange.server.__main__", self.directory.root)

    def worker(self, seconds: float = 0.005) -> Actor:
        """A worker. seconds: that a task takes, about."""
        return self._start("worker", "tests.exchange.chaos.toil", self.directory.root, seconds)

    def status(self) -> dict[str, Any]:
        """What the coordinator says; nothing where it is away."""
        try:
            return self.observer.status()
        except ConnectionLost:
            return {"state": "away", "epoch": -1, "members": [], "tasks": {"done": -1}, "view": {"chains": []}}

    @property
    def done(self) -> int:
        """Tasks that are done."""
        return int(self.status()["tasks"]["done"])

    def wait(self, condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
        """Return what the condition is, once it is."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if found := condition():
                return found
            if self.status()["state"] == "failed":
                break
            time.sleep(0.01)
        raise AssertionError(f"{what} did not come to be; {self.status()}\n{self.logs()}")

    def limit(self, task: int) -> None:
        """Have workers wait before they do this task."""
        draft = self.directory.root / "limit.draft"
        draft.write_text(str(task))
        draft.replace(self.directory.root / "limit")

    def more(self, tasks: int) -> None:
        """Return once some more tasks are done, with others under way."""
        goal = self.wait(lambda: self.done + 1, "a coordinator") - 1 + tasks
        self.limit(goal + 20)
        self.wait(lambda: self.done >= goal, f"task {goal}")

    def settle(self, copies: int) -> dict[str, Any]:
        """Return the view once all shards have as many copies and nothing moves."""

        def settled() -> dict[str, Any] | None:
            view: dict[str, Any] = self.status()["view"]
            chains = view["chains"]
            return view if chains and not view["moves"] and all(len(chain) == copies for chain in chains) else None

        found: dict[str, Any] = self.wait(settled, f"{copies} copies")
        return found

    def finish(self) -> None:
        """Return once all tasks are done, and what they made is on disk."""
        self.limit(self.charter.terms.tasks)
        while not self._goes_on(self.done):
            pass

    def _goes_on(self, done: int) -> bool:
        """Return whether all is done, once it is or more tasks are than these."""

        def found() -> str:
            status = self.status()
            return status["state"] if status["state"] == "finished" or status["tasks"]["done"] > done else ""

        return bool(self.wait(found, "the end, or a further task") == "finished")

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.directory.events.read_text().splitlines())
        return [event for event in lines if event["event"] == name]

    @property
    def died(self) -> list[dict[str, Any]]:
        """Events of members that were taken for dead."""
        return [event for event in self.events("gone") if "closed" not in event["why"]]

    def silent(self, id: int) -> float:
        """For how many seconds a member was not heard of."""
        found = (member["silent_s"] for member in self.status()["members"] if member["id"] == id)
        return float(next(found, 0.0))

    def logs(self) -> str:
        """The last lines of all, after their stacks."""
        for actor in self.actors:
            actor.send(signal.SIGUSR1)
        time.sleep(0.5)
        ends = ("\n".join(actor.said.splitlines()[-60:]) for actor in self.actors)
        return "\n".join(f"--- {actor.log.name}\n{end}" for actor, end in zip(self.actors, ends, strict=True))

    def close(self) -> None:
        """End all processes."""
        self.observer.close()
        for actor in self.actors:
            actor.send(signal.SIGKILL)
        for actor in self.actors:
            actor.end()

    def _start(self, name: str, module: str, *arguments: object) -> Actor:
        log = self.folder / f"{name}-{len(self.actors)}.log"
        actor = Actor(Forked(module, *arguments, output=log), log)
        self.actors.append(actor)
        return actor


@contextmanager
def cast(job: Job, terms: Terms, *, transport: str = "auto") -> Iterator[Cast]:
    """A job whose processes end with the block."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # short: it holds sockets
        made = Cast(Path(folder), job, terms, transport)
        try:
            yield made
        finally:
            made.close()
