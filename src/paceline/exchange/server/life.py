"""A server's life: it joins, serves, and leaves; and joins anew where it was taken for dead and is not."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership import Fenced, Member, Role
from paceline.exchange.server.server import Server
from paceline.exchange.server.snapshots import SnapshotWriter
from paceline.exchange.shard.log import UpdateLog
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.snapshot import Snapshots, load_shard
from paceline.exchange.terms import Charter
from paceline.exchange.wire.listen import Listener

_log = logging.getLogger(__name__)

_REPORT_S: Final = 0.5
"""Between reports of figures."""


@dataclass(frozen=True)
class _Evicted:
    why: str


@dataclass(frozen=True)
class _Over:
    why: str


class _Leave:
    """This process was asked to leave."""


class _Left:
    """Nothing depends on this server any more."""


class Life:
    """Serves the job of a directory, from now on.

    Args:
        directory: of the job's exchange.
        bind: interface to listen on; None: the one that the charter says, which is of the job's first host.
    """

    def __init__(self, directory: Directory, bind: str | None = None) -> None:
        self._directory = directory
        self._charter: Charter = directory.read()
        self._bind = self._charter.bind if bind is None else bind
        self._secret = directory.read_secret()
        self._happened: queue.SimpleQueue[_Evicted | _Over | _Leave | _Left | BaseException] = queue.SimpleQueue()

    def leave(self) -> None:
        """Have `run` end once the shards of this server are elsewhere. May be called in a signal handler."""
        self._happened.put(_Leave())

    def run(self) -> None:
        """Serve until the job is over, or this server has left.

        Raises:
            ExchangeError: there is no coordinator, or the job failed.
        """
        while self._serve():
            _log.warning("this server joins anew")

    def _serve(self) -> bool:
        """Serve as one member; return whether to join anew."""
        listener = Listener(self._bind, self._secret, unix=self._socket())
        try:
            member = Member.join(self._charter, self._secret, Role.SERVER, listener.address)
        except BaseException:
            listener.close()
            raise
        _log.info("this is server %d, process %d", member.id, os.getpid())
        log = UpdateLog(self._directory.updates(member.id), member.id) if self._charter.log else None
        server = Server(self._charter, self._secret, member, listener, self._load, log, self._happened.put)
        snapshots = Snapshots(self._directory.snapshots, self._charter.job)
        writer = SnapshotWriter(server.keeper, snapshots, member, log.settle if log is not None else lambda: None)
        closed = threading.Event()
        member.on_fenced(lambda why: self._happened.put(_Evicted(why)))
        member.on_end(lambda why: self._happened.put(_Over(why)))
        member.on_snapshot(writer.request)
        member.on_orphans(server.keeper.hurry)
        for work in (writer.run, lambda: _report(server, member, closed)):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()
        server.start()
        try:
            return self._wait(member)
        finally:
            closed.set()
            writer.close()
            member.close()
            server.close()

    def _wait(self, member: Member) -> bool:
        while True:
            what = self._happened.get()
            match what:
                case _Leave():
                    _log.info("asked to leave: shards move to others first")
                    threading.Thread(target=self._leave, args=(member,), daemon=True).start()
                case _Left():
                    return False
                case _Over(why):
                    if why:
                        raise ExchangeError(why)
                    return False
                case _Evicted(why):
                    _log.warning("evicted: %s", why)
                    return True
                case BaseException():
                    raise what

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what `run` does not wait for, and have it hear of an error that nobody expects."""
        try:
            work()
        except Exception as error:
            self._happened.put(error)

    def _leave(self, member: Member) -> None:
        try:
            member.leave()
            self._happened.put(_Left())
        except Fenced:
            pass  # that is told as well
        except ExchangeError as error:
            self._happened.put(error)

    def _load(self, shard: int) -> Shard:
        return load_shard(self._directory.snapshot(self._charter.terms.restored), self._charter.job, shard)

    def _socket(self) -> str:
        self._directory.sockets.mkdir(exist_ok=True)
        return str(self._directory.sockets / f"{os.getpid()}-{secrets.token_hex(4)}")


def _report(server: Server, member: Member, closed: threading.Event) -> None:
    while not closed.wait(_REPORT_S):
        member.report(server.figures())
