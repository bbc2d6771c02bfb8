"""A coordinator and its servers, as a supervisor keeps them: one exchange, of the run or of a group of workers."""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from paceline.errors import ExchangeError, RankFailed
from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.membership.observer import Observer
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from paceline.exchange.wire.address import bound, machine, reachable
from paceline.train.servers.processes.children import Child, Children
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.watch.news import News
from paceline.train.servers.watch.status import Status

_LONGEST_UNIX_PATH: Final = 90
"""Bytes; the kernel takes 107, and servers add names of their own."""
_HASTY_S: Final = 5.0
"""A process that dies within this of its start may be doing so for a reason of its own."""
_TRIES: Final = 10

log = logging.getLogger("paceline")


def charter_for(server: ServerSection, job: Job, terms: Terms, directory: Directory) -> Charter:
    """Return what all processes of an exchange are started with; an address for its coordinator is found here."""
    with bound(server.bind, 0) as probe:
        port = probe.getsockname()[1]
    unix = directory.root.resolve() / "coordinator.sock"
    if len(str(unix)) > _LONGEST_UNIX_PATH:
        unix = Path(tempfile.mkdtemp(prefix="paceline-")) / "coordinator.sock"
    return Charter(
        job,
        terms,
        Address(reachable(server.bind), port, str(unix), machine()),
        store=server.store,
        transport=server.transport,
        streams=server.streams,
        bind=server.bind,
        log=server.log and not server.is_hogwild,
        durable=server.durable,
    )


class Cluster:
    """Processes of one exchange.

    Args:
        directory: of the exchange, with its charter.
        charter: of it.
        children: where processes are started.
        replace: whether servers that die are started anew.
        label: of a group, in names of processes; empty where there is only one exchange.
        server: module that a server runs, and its arguments after the directory.
    """

    def __init__(
        self,
        directory: Directory,
        charter: Charter,
        children: Children,
        *,
        replace: bool,
        label: str = "",
        server: Sequence[str] = ("paceline.exchange.server",),
    ) -> None:
        self.directory = directory
        self.charter = charter
        self.label = label
        self._children = children
        self._replace = replace
        self._server = server
        group = f"group {label.removeprefix('-')}: " if label else ""
        self._news = News(directory.events, group, self._joined, self._gone)
        self._pids: dict[int, int] = {}  # of members, by number
        self._servers: dict[str, Child] = {}
        self._leaving: set[str] = set()
        self._heirs: dict[str, str] = {}  # of servers that died
        self._coordinator: Child | None = None
        self._observer: Observer | None = None
        self._next = 0
        self._hasty = 0

    def start(self, servers: int) -> None:
        """Start the coordinator and so many servers."""
        self._start_coordinator()
        for _ in range(servers):
            self.start_server()

    def _start_coordinator(self) -> None:
        name = f"coordinator{self.label}"
        self._coordinator = self._children.start(name, "paceline.exchange.membership", str(self.directory.root))

    def start_server(self) -> str:
        """Start a server; returns the name that it begins with."""
        name = f"server-start{self.label}-{self._next}"
        self._next += 1
        module, *arguments = self._server
        self._servers[name] = self._children.start(name, module, str(self.directory.root), *arguments)
        return name

    def dismiss(self, server: str) -> None:
        """Tell a server, or who was started in its place, to leave: it ends once its shards have moved elsewhere."""
        while server in self._heirs:
            server = self._heirs.pop(server)
        if server in self._servers:
            self._leaving.add(server)
            self._servers[server].send(signal.SIGTERM)

    def look(self) -> None:
        """Start what has died.

        Raises:
            RankFailed: it dies again and again, or of a fault of its own.
        """
        coordinator = self._coordinator
        if coordinator is not None and coordinator.code is not None:
            log.warning("the coordinator ended (%s), and is started again", coordinator.code)
            self._ended(coordinator)
            self._start_coordinator()
        for name, server in list(self._servers.items()):
            if server.code is None:
                continue
            del self._servers[name]
            if name in self._leaving or server.code == 0:  # 0: somebody else had it leave, or the job is over
                log.info("%s left", server.name)
                self._children.forget(server)
                continue
            who, code = server.name, server.code
            self._ended(server)
            if self._replace:
                self._heirs[name] = self.start_server()
            log.warning("%s ended (%s)%s", who, code, "; another is started" if self._replace else "")

    def _ended(self, child: Child) -> None:
        """Take leave of a process; one that fails by itself, or as soon as it is started, ends the run."""
        code = child.code
        hasty = time.monotonic() - child.began < _HASTY_S
        self._hasty = self._hasty + 1 if hasty else 0
        tail = child.tail()
        self._children.forget(child)
        if (code is not None and code > 0) or self._hasty > _TRIES:
            raise RankFailed(f"{child.name} ended with exit code {code}. The end of its log:\n{tail}")

    def _joined(self, role: str, number: int, pid: int) -> str | None:
        self._pids[number] = pid
        return self._children.joined(pid, f"{role}{self.label}-{number}")

    def _gone(self, number: int) -> None:
        """End a bridge that the global job gave up but that is there: it hangs, and others wait for its meetings."""
        pid = self._pids.pop(number, None)
        for child in self._children.named("bridge"):
            if child.pid == pid and child.code is None and not self.label:  # a group's job it leaves before it ends
                log.warning("%s is not heard of any more, and is ended", child.name)
                child.send(signal.SIGKILL)

    def news(self) -> Iterator[str]:
        """Yield what happened since the last time, in words."""
        return self._news.new()

    def status(self) -> Status | None:
        """Return what the coordinator knows; None while it cannot be asked."""
        values = self._ask(Observer.status)
        return None if values is None else Status.of(values, self.charter.terms)

    def ask_for_snapshot(self) -> None:
        """Have servers write a snapshot, if none is in the making; nobody hears it while there is no coordinator."""
        self._ask(Observer.snapshot)

    def _ask(self, question: Callable[[Observer], Any]) -> Any:
        try:
            if self._observer is None:
                self._observer = Observer.connect(self.charter, self.directory.read_secret())
            return question(self._observer)
        except ExchangeError:
            self._forget_observer()
            return None

    def _forget_observer(self) -> None:
        if self._observer is not None:
            with suppress(ExchangeError):
                self._observer.close()
            self._observer = None

    def close(self) -> None:
        """Ask no more."""
        self._forget_observer()
