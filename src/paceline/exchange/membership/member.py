"""A process of a job, as a member: what it knows of the others, what it is dealt, and its lease."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership.link import Link
from paceline.exchange.membership.protocol import Message
from paceline.exchange.membership.seats import Process, Role
from paceline.exchange.membership.state import items_of, listed
from paceline.exchange.membership.tasks import Item
from paceline.exchange.terms import Charter
from paceline.exchange.view import Address, Move, Turn, View

_T = TypeVar("_T")

_LOG: Final = logging.getLogger(__name__)

_BEATS: Final = 5
"""Heartbeats in a lease."""

_STOPPED: Final = 0.5
"""Part of a lease: a process that was stopped for longer asks before it believes that it is still a member."""

_SILENT: Final = 2.0
"""Leases without a word from the coordinator, after which its connection is given up for another."""

_NEVER: Final = 1 << 62
"""Number of a message that was not sent yet."""

_FIRST_S: Final = 30.0
"""How long a process waits for the coordinator when it starts."""


class Fenced(ExchangeError):
    """This process is no member any more: it was taken for gone, and others do its work. It may join anew."""

    exit_code = 1


class SnapshotRequest(NamedTuple):
    """What a server is to write. It may come again, and after a change of view name further shards.

    Attributes:
        number: of the snapshot, and of its directory.
        clock: all tasks of clocks below it are applied.
        epoch: of the view by which it is asked.
        shards: those whose tail this server is in that view.
    """

    number: int
    clock: int
    epoch: int
    shards: tuple[int, ...]


class Member:
    """A membership, from `join` to `leave` or `close`. It is an `interface.Dealer`. Any thread may use it.

    It goes on without a coordinator, and comes back to the one that is started in its place.
    """

    def __init__(self, charter: Charter, secret: bytes, role: Role, address: Address | None = None) -> None:
        self.role = role
        self._lease_s = charter.terms.lease_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._who = {
            "role": role.value,
            "nonce": secrets.token_hex(16),
            "process": asdict(Process.own()),
            "address": asdict(address or Address()),
        }
        self._id = -1
        self._view = View()
        self._held: dict[Item, None] = {}
        self._orphans = False
        self._fenced = ""
        self._end: str | None = None
        self._leaving = False
        self._request: SnapshotRequest | None = None
        self._figures: Mapping[str, Any] | None = None
        self._ticked_s = self._heard_s = time.monotonic()
        self._unsure: int | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_view: list[Callable[[View], None]] = []
        self._on_snapshot: list[Callable[[SnapshotRequest], None]] = []
        self._on_fenced: list[Callable[[str], None]] = []
        self._on_end: list[Callable[[str], None]] = []
        self._on_orphans: list[Callable[[bool], None]] = []
        self._closed = threading.Event()
        self._link = Link(charter.coordinator, secret, self._greeting, self._hear, self._lose)

    @classmethod
    def join(cls, charter: Charter, secret: bytes, role: Role, address: Address | None = None) -> Self:
        """Become a member.

        Args:
            charter: of the job.
            secret: of the job.
            role: what this process does.
            address: where it listens; of servers.

        Raises:
            ConnectionLost: there is no coordinator.
            ExchangeError: the secret is another.
        """
        member = cls(charter, secret, role, address)
        member._link.start(_FIRST_S)
        for work in (member._beat, member._call):
            threading.Thread(target=work, name=f"{role.value} {member.id} {work.__name__}", daemon=True).start()
        return member

    @property
    def id(self) -> int:
        """This member's number; nobody else ever has it."""
        return self._id

    @property
    def view(self) -> View:
        """The newest view."""
        return self._view

    @property
    def orphans(self) -> bool:
        """Whether tasks of workers that are gone wait for somebody."""
        return self._orphans

    @property
    def fenced(self) -> bool:
        """Whether this process is no member any more, without having asked for it."""
        return bool(self._fenced)

    @property
    def ended(self) -> bool:
        """Whether the job is over: finished and saved, or failed."""
        return self._end is not None

    @property
    def failure(self) -> str:
        """Why the job failed; empty where it did not."""
        return self._end or ""

    @property
    def trusted(self) -> bool:
        """Whether this process may take itself for a member.

        It may not after it was stopped for a while, from the first moment on, until the coordinator says that it still
        is one. That the coordinator is away changes nothing.
        """
        awake = time.monotonic() - self._ticked_s < _STOPPED * self._lease_s
        return awake and self._unsure is None and not self._fenced

    @property
    def snapshot_request(self) -> SnapshotRequest | None:
        """The newest."""
        return self._request

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        """Return a view once it is newer than an epoch, or the newest after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.epoch > newer_than, timeout_s)
            return self._view

    def on_view(self, callback: Callable[[View], None]) -> None:
        """Have a function called with each new view, from a thread for such calls, once `view` is that view."""
        self._on_view.append(callback)

    def on_snapshot(self, callback: Callable[[SnapshotRequest], None]) -> None:
        """Have a function called with each request, from the same thread; at once with the newest, if there is one."""
        self._on_snapshot.append(callback)
        if (request := self._request) is not None:
            self._calls.put(lambda: callback(request))

    def on_fenced(self, callback: Callable[[str], None]) -> None:
        """Have a function called with the reason, once, when this process is no member any more."""
        self._on_fenced.append(callback)
        if why := self._fenced:
            self._calls.put(lambda: callback(why))

    def on_orphans(self, callback: Callable[[bool], None]) -> None:
        """Have a function called with `orphans` whenever that has changed."""
        self._on_orphans.append(callback)
        self._calls.put(lambda: callback(self._orphans))

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Have a function called once the job is over, with why it failed, or with nothing."""
        self._on_end.append(callback)
        if (why := self._end) is not None:
            self._calls.put(lambda: callback(why))

    def next_task(self) -> Deal:
        """See `interface.Dealer`. Who holds nothing waits a moment for work before the answer is WAIT.

        Raises:
            Fenced: this process is no member any more.
            ExchangeError: the job failed.
        """
        answer = self._ask({"say": "next"})
        if answer["why"]:
            raise ExchangeError(answer["why"])
        order, number, alone = answer["deal"]
        return Deal(Order(order), number, alone)

    def done(self, deals: Sequence[Deal]) -> None:
        """See `interface.Dealer`."""
        self._give("done", deals)

    def put_back(self, deals: Sequence[Deal]) -> None:
        """See `interface.Dealer`."""
        self._give("back", deals)

    def synced(self, move: Move) -> None:
        """Say that the target of a move, of which this server is the source, has all of the shard."""
        self._link.say({"say": "synced", "shard": move.shard, "target": move.target, "begun": move.begun})

    def turned(self, turn: Turn) -> None:
        """Say that all that this server, the head, has of a shard is on its successors."""
        self._link.say({"say": "turned", "shard": turn.shard, "begun": turn.begun})

    def unreached(self, server: int) -> None:
        """Say that this server does not reach a successor, which may be reached by others."""
        self._link.say({"say": "unreached", "server": server}, keep=False)

    def snapshot_written(self, number: int, shard: int, name: str) -> None:
        """Say that a shard is in a snapshot; name: of its file there."""
        self._link.say({"say": "file", "number": number, "shard": shard, "name": name})

    def snapshot_failed(self, number: int, why: str) -> None:
        """Say that a snapshot cannot be made."""
        self._link.say({"say": "unwritten", "number": number, "why": why})

    def report(self, figures: Mapping[str, Any]) -> None:
        """Have the coordinator know, with the next heartbeat, what this process did."""
        self._figures = figures

    def leave(self) -> None:
        """Leave the job; returns once nothing depends on this member, for a server: once its shards are elsewhere."""
        self._leaving = True
        try:
            self._link.ask({"say": "leave", "figures": self._figures})
        except ConnectionLost as error:  # it left before the coordinator was started again, or was taken for gone
            _LOG.info("left: %s", error)
        self.close()

    def close(self) -> None:
        """Be gone at once; what this member was dealt goes to others."""
        self._leaving = True
        self._closed.set()
        self._calls.put(None)
        self._link.say({"say": "close"}, keep=False)
        self._link.close()

    def _ask(self, message: Message) -> Message:
        try:
            return self._link.ask(message)
        except ConnectionLost as error:
            if self._fenced:
                raise Fenced(
                    f"{self.role.value} {self._id} is no member of the job any more: {self._fenced}. What it was dealt "
                    "is done by others; it may join anew, under another number."
                ) from error
            raise

    def _give(self, what: str, deals: Sequence[Deal]) -> None:
        items = [(deal.order, deal.number) for deal in deals if deal.order in (Order.TASK, Order.EVALUATE)]
        if items:
            with self._lock:  # who greets the next coordinator meanwhile holds them, or has said so
                self._link.say({"say": what, "items": listed(items)})
                for item in items:
                    self._held.pop(item, None)

    def _greeting(self) -> Message:
        """Who this is. What it has done but nobody confirmed it still holds, until that is said again."""
        with self._lock:
            holding = dict(self._held)
            for message in self._link.unconfirmed():
                holding |= dict.fromkeys(items_of(message.get("items", ())))
        return {"say": "join", **self._who, "id": self._id if self._id >= 0 else None, "holding": listed(holding)}

    def _hear(self, message: Message) -> None:
        self._heard_s = time.monotonic()
        if "fenced" in message:
            self._fence(message["fenced"])
            return
        if "id" in message:
            self._id, self._orphans = message["id"], False
            self._call_all(self._on_orphans, False)
        if "view" in message:
            self._take_view(View.from_dict(message["view"]))
        if "deal" in message:
            order, number, _ = message["deal"]
            if Order(order) in (Order.TASK, Order.EVALUATE):
                with self._lock:
                    self._held[Order(order), number] = None
        if self._unsure is not None and message.get("answer", -1) >= self._unsure:
            self._unsure = None
        told = message.get("tell")
        if told == "orphans":
            self._orphans = message["there"]
            self._call_all(self._on_orphans, self._orphans)
        elif told == "snapshot":
            number, clock, epoch = (message[name] for name in ("number", "clock", "epoch"))
            self._request = request = SnapshotRequest(number, clock, epoch, tuple(message["shards"]))
            self._call_all(self._on_snapshot, request)
        elif told == "end" and self._end is None:
            self._end = message["why"]
            self._call_all(self._on_end, self._end)

    def _take_view(self, view: View) -> None:
        with self._changed:
            if view.epoch <= self._view.epoch:
                return
            self._view = view
            self._changed.notify_all()
        self._call_all(self._on_view, view)

    def _fence(self, why: str) -> None:
        if not self._leaving:
            _LOG.warning("%s %d is fenced: %s", self.role.value, self._id, why)
            self._fenced = why
            self._call_all(self._on_fenced, why)
        self._link.close(why)

    def _lose(self, why: str) -> None:
        self._fence(f"no coordinator is heard any more: {why}")

    def _call_all(self, callbacks: Sequence[Callable[[_T], None]], value: _T) -> None:
        for callback in callbacks:
            self._calls.put(partial(callback, value))

    def _call(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # somebody may wait for what did not come of it, and hold tasks meanwhile
                _LOG.exception("a function that was to be told failed")
                if not self._fenced:
                    self._fence(f"a function that was to be told of what it heard failed: {error!r}")

    def _beat(self) -> None:
        """Say that this process lives; notice when it was stopped for long."""
        while not self._closed.wait(self._lease_s / _BEATS) and not self._fenced:
            now_s = time.monotonic()
            if now_s - self._ticked_s >= _STOPPED * self._lease_s and self._unsure is None:
                self._unsure = _NEVER
            figures, self._figures = self._figures, None
            number = self._link.say({"say": "beat", "figures": figures}, keep=False)
            if self._unsure == _NEVER:
                self._unsure = number
            self._ticked_s = now_s
            if now_s - self._heard_s > _SILENT * self._lease_s:
                self._heard_s = now_s
                self._link.renew()
