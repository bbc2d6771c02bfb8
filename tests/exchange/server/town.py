"""Servers as threads of the test, over real connections, and a coordinator that is a few lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.exchange.client.client import ServerExchange
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.directory import Directory
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.membership.views import begun, may_go, next_view
from paceline.exchange.server.server import Server
from paceline.exchange.shard.log import UpdateLog
from paceline.exchange.shard.shard import Shard
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address, Move, Turn, View
from paceline.exchange.wire.listen import Listener

SECRET = b"of the town"
WORKERS = 1000
"""Ids of workers are from here on."""


def beginning(job: Job, number: int) -> Shard:
    """A shard as the job begins with it."""
    shard = Shard(job, number)
    for index in shard.tables:
        if isinstance(job.tables[index], DenseTable):
            values = shard.read(index)
            shard.table(index).fill((values + number + 1) / 8)
    return shard


class Citizen:
    """Membership of a server or a worker; see `membership.Member`."""

    def __init__(self, town: Town, id: int) -> None:
        self._town = town
        self.id = id
        self.trusted = True
        self.fenced = False
        self.failure = ""
        self.orphans = False

    @property
    def view(self) -> View:
        return self._town.view

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        with self._town.changed:
            self._town.changed.wait_for(lambda: self._town.view.epoch > newer_than, timeout_s)
            return self._town.view

    def on_view(self, callback: Callable[[View], None]) -> None:
        self._town.listeners.append(callback)

    def synced(self, move: Move) -> None:
        self._town.synced(move)

    def turned(self, turn: Turn) -> None:
        self._town.turned(turn)

    def unreached(self, server: int) -> None:
        self._town.unreached(self.id, server)


class Town:
    """A job on servers that come and go. `failures` are errors that servers died of.

    apart: servers that are believed when they say that they do not reach each other.
    """

    def __init__(
        self, job: Job, folder: Path, *, transport: str = "unix", durable: bool = False, lease_s: float = 2.0
    ) -> None:
        self.directory = Directory(folder)
        terms = Terms(tasks=100, lease_s=lease_s)
        self.charter = Charter(job, terms, Address(), transport=transport, durable=durable)
        self.apart: frozenset[int] = frozenset()
        self._parted: set[frozenset[int]] = set()
        self._turned: set[Turn] = set()
        self.view = View()
        self.views: list[View] = []
        self.changed = threading.Condition()
        self._one = threading.Lock()
        self.servers: dict[int, Server] = {}
        self.listeners: list[Callable[[View], None]] = []
        self.failures: list[BaseException] = []
        self.logs: list[Path] = []
        self._addresses: dict[int, Address] = {}
        self._leaving: set[int] = set()
        self._synced: set[Move] = set()
        self._folder = folder
        self._ids = iter(range(1, WORKERS))

    def add(self) -> int:
        """A server joins."""
        id = next(self._ids)
        listener = Listener("127.0.0.1", SECRET, unix=str(self._folder / f"{id}.socket"))
        path = self.directory.updates(id)
        log = UpdateLog(path, id)
        self.logs.append(path)
        job = self.charter.job
        server = Server(
            self.charter,
            SECRET,
            Citizen(self, id),
            listener,
            lambda shard: beginning(job, shard),
            log,
            self.failures.append,
        )
        self.servers[id] = server
        self._addresses[id] = listener.address
        server.start()
        self._renew()
        return id

    def begin(self) -> None:
        """The first view with chains."""
        self._set(begun(self.view, self._addresses, self.charter.job))

    def kill(self, id: int) -> None:
        """A server is gone at once."""
        del self._addresses[id]
        self.servers.pop(id).close()
        self._renew()

    def cut_off(self, id: int) -> Server:
        """A server is taken for dead while it goes on in its epoch; nobody tells it."""
        server = self.servers.pop(id)
        del self._addresses[id]
        server._member.wait_for_view = lambda newer_than, timeout_s: View()  # type: ignore[method-assign]
        self._renew()
        return server

    def leave(self, id: int) -> None:
        """A server leaves once its shards are elsewhere."""
        self._leaving.add(id)
        self._renew()
        with self.changed:
            assert self.changed.wait_for(lambda: may_go(self.view, id), 20), self.view
        self.kill(id)

    def settle(self, copies: int | None = None) -> None:
        """Return once nothing moves."""
        wanted = min(self.charter.job.replication, len(self._addresses.keys() - self._leaving))
        wanted = wanted if copies is None else copies
        with self.changed:
            done = self.changed.wait_for(
                lambda: (
                    not (self.view.moves or self.view.turns) and all(len(chain) == wanted for chain in self.view.chains)
                ),
                20,
            )
            assert done, (self.view, self.failures)

    def synced(self, move: Move) -> None:
        self._synced.add(move)
        self._renew()

    def turned(self, turn: Turn) -> None:
        self._turned.add(turn)
        self._renew()

    def unreached(self, one: int, other: int) -> None:
        pair = frozenset((one, other))
        if pair == self.apart and pair not in self._parted:
            self._parted.add(pair)
            self._renew()

    def worker(self, number: int, compression: Compressor | None = None) -> ServerExchange:
        return ServerExchange(self.charter, Citizen(self, WORKERS + number), SECRET, None, compression)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        assert not self.failures, self.failures

    def _renew(self) -> None:
        with self._one:
            if not self.view.chains:
                return
            leaving = self._leaving & self._addresses.keys()
            made = next_view(
                self.view,
                self._addresses,
                self.charter.job,
                leaving=leaving,
                synced=self._synced,
                turned=self._turned,
                parted=self._parted,
            )
            if made is not self.view:
                self._set(made)

    def _set(self, view: View) -> None:
        with self.changed:
            self.view = view
            self.views.append(view)
            self.changed.notify_all()
        for listener in self.listeners:
            listener(view)


@contextmanager
def town(
    job: Job, folder: Path, servers: int, *, transport: str = "unix", durable: bool = False, lease_s: float = 2.0
) -> Iterator[Town]:
    """A town with some servers, begun."""
    made = Town(job, folder, transport=transport, durable=durable, lease_s=lease_s)
    try:
        for _ in range(servers):
            made.add()
        made.begin()
        yield made
    finally:
        made.close()
