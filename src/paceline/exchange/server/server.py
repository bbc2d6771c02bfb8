"""A member of a job that serves: its keeper, the threads around it, and the views that it goes by."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.server.figures import Figures
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.server.link import Link
from paceline.exchange.server.peer import Peer
from paceline.exchange.server.place import said, unloaded
from paceline.exchange.shard.log import Record, UpdateLog
from paceline.exchange.shard.shard import Shard
from paceline.exchange.terms import Charter
from paceline.exchange.view import Address, Move, Turn, View
from paceline.exchange.wire.connect import connect
from paceline.exchange.wire.frame import Connection
from paceline.exchange.wire.listen import Listener

_log = logging.getLogger(__name__)

_VIEW_S: Final = 1.0
"""How long one question for a newer view waits, at most."""

_PATIENCE: Final = 1.5
"""Leases within which a successor is to be reached: it is no member any more by then, if it is gone or hangs."""

_COPIED_BYTES_PER_S: Final = 256 << 20
"""At which a successor may copy what it holds, and answer nobody meanwhile."""


class Membership(Protocol):
    """What a server needs of `membership.Member`."""

    @property
    def id(self) -> int:
        """This server's."""
        ...

    @property
    def view(self) -> View:
        """The newest."""
        ...

    @property
    def trusted(self) -> bool:
        """Whether this process was not stopped since the coordinator last heard it."""
        ...

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        """Return a view once it is newer, or the newest after some seconds."""
        ...

    def synced(self, move: Move) -> None:
        """The target of a move from this server has all of the shard."""
        ...

    def turned(self, turn: Turn) -> None:
        """All that this server, the head, has of a shard is on its successors."""
        ...

    def unreached(self, server: int) -> None:
        """A successor of this server is not reached from here."""
        ...


class Server:
    """Serves for one member, from its joining until it is told to stop.

    Args:
        charter: of the job.
        secret: of the job.
        member: this server's membership.
        listener: where others reach it; closed with this.
        load: returns a shard as the job begins with it.
        log: of what is applied here, where there is to be one; closed with this.
        failed: told once, of an error that nobody expects; this server is of no use any more.
    """

    def __init__(
        self,
        charter: Charter,
        secret: bytes,
        member: Membership,
        listener: Listener,
        load: Callable[[int], Shard],
        log: UpdateLog | None,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._charter, self._secret, self._member, self._listener = charter, secret, member, listener
        self._load, self._log, self._failed = load, log, failed
        self._counted = Figures()
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        self._gone_bytes = (0, 0)
        self._closed = threading.Event()
        self._complete: queue.SimpleQueue[Move | Turn | None] = queue.SimpleQueue()
        self.keeper = Keeper(
            charter.job,
            member.id,
            outlet=self._link,
            synced=self._complete.put,
            trusted=lambda: member.trusted,
            applied=self._applied,
            settled=log.settle if log is not None and charter.durable else lambda: None,
        )

    def start(self) -> None:
        """Begin to serve."""
        for work in (self._accept, self._follow, self._tell):
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__, daemon=True).start()

    def figures(self) -> dict[str, Any]:
        """Return what this server did."""
        with self._lock:
            sent, received = self._gone_bytes
            for peer in self._peers:
                sent += peer.connection.sent_bytes
                received += peer.connection.received_bytes
        with self.keeper.lock:
            outlets = self.keeper.outlets
            sent += sum(outlet.bytes[0] for outlet in outlets)
            received += sum(outlet.bytes[1] for outlet in outlets)
            queued = sum(outlet.queued for outlet in outlets)
            return self._counted.of(self.keeper.replicas.values(), queued, sent, received)

    def close(self) -> None:
        """Serve no more: all connections end."""
        self._closed.set()
        self._listener.close()
        self._complete.put(None)
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.connection.close()
        self.keeper.close()
        if self._log is not None:
            with self.keeper.lock:
                self._log.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of a thread: told to whoever runs the server
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._closed.is_set():
            self._failed(error)

    def _applied(self, records: Sequence[Record]) -> None:
        self._counted.applied(record.staleness for record in records)
        if self._log is not None:
            self._log.append(records)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except ConnectionLost:
                return
            peer = Peer(connection, self.keeper, self.figures, self._fail)
            with self._lock:
                self._peers.add(peer)
            threading.Thread(target=self._answer, args=(peer,), name="peer", daemon=True).start()

    def _answer(self, peer: Peer) -> None:
        try:
            peer.run()
        finally:
            with self._lock:
                self._peers.remove(peer)
                sent, received = self._gone_bytes
                held = peer.connection
                self._gone_bytes = (sent + held.sent_bytes, received + held.received_bytes)

    def _link(self, keeper: Keeper, server: int, address: Address, copying: bool) -> Link:
        return Link(keeper, server, address, copying, self._connect, self._fail)

    def _connect(self, address: Address) -> Connection:
        charter = self._charter
        return connect(address, self._secret, transport=charter.transport, streams=charter.streams)

    def _follow(self) -> None:
        """Go by each new view; say in between which successors are not reached."""
        lease_s = self._charter.terms.lease_s
        while not self._closed.is_set():
            view = self._member.wait_for_view(self.keeper.epoch, min(_VIEW_S, lease_s / 2))
            if view.epoch > self.keeper.epoch:
                self._adopt(view)
                continue
            for server in self._unreached():
                _log.warning("server %d is not reached from here", server)
                self._member.unreached(server)

    def _unreached(self) -> set[int]:
        """Return the successors that should have been heard from by now."""
        with self.keeper.lock:
            outlets = self.keeper.outlets
            held_bytes = sum(replica.shard.memory_bytes for replica in self.keeper.replicas.values())
        patience_s = _PATIENCE * self._charter.terms.lease_s + held_bytes / _COPIED_BYTES_PER_S
        return {outlet.server for outlet in outlets if outlet.is_silent(patience_s)}

    def _adopt(self, view: View) -> None:
        keeper = self.keeper
        missing = unloaded(view, keeper.server, keeper.held)
        if missing and keeper.view.chains:
            raise ExchangeError(
                f"epoch {view.epoch} has server {keeper.server} hold shards {missing}, which nobody copied to it."
            )
        gone = keeper.view.servers.keys() - view.servers.keys()
        keeper.adopt(view, {shard: self._load(shard) for shard in missing})
        with self._lock:
            cut_off = [peer for peer in self._peers if peer.server in gone]
        for peer in cut_off:  # it may be stopped, and read nothing of what it is told
            peer.connection.close()
        _log.info("%s", said(view, keeper.server))

    def _tell(self) -> None:
        """Tell the coordinator of replicas that are complete, and heads that may change; it may be away for a while."""
        while (done := self._complete.get()) is not None:
            if isinstance(done, Turn):
                self._member.turned(done)
            else:
                self._member.synced(done)
