"""The coordinator: hears members, decides, writes down, tells. It knows no sockets; `service` has them.

A member is gone when its process has ended (noticed at once, where it can be seen from here), when its connection
ended and it did not come back soon, when it was silent for a lease, or when it says so. What it was, nobody becomes
again: if it wakes, it is told that it is fenced. A coordinator that was away itself (killed, stopped, waiting for its
store) cannot know who was silent meanwhile, and gives everybody a lease.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership.books import Books
from paceline.exchange.membership.partitions import Partitions
from paceline.exchange.membership.presence import Departed, Peer, Presence
from paceline.exchange.membership.protocol import Message
from paceline.exchange.membership.report import described, headcount, wants
from paceline.exchange.membership.seats import Process, Role, Seat
from paceline.exchange.membership.snapshots import Snapshots
from paceline.exchange.membership.state import items_of
from paceline.exchange.membership.views import begun, lost, may_go, next_view
from paceline.exchange.terms import Charter
from paceline.exchange.view import Address, Move, Turn, View

_LOG: Final = logging.getLogger(__name__)

_PARK_S: Final = 0.25
"""How long a question for work waits for some before it is answered with WAIT."""

_REMEMBERED_S: Final = 60.0
"""How long figures of a member that left are told: of those who leave at the end of a job, all have the last ones."""

_RETURN: Final = 0.1
"""Part of a lease within which a member whose connection ended must be back, where its process cannot be seen."""


class Coordinator:
    """Decides for one job. For one thread.

    Args:
        charter: of the job.
        directory: of the job.
        books: what is known.
        watch: told of each member's process, so that `ended` is called once that has ended.
        now_s: what time it is; any clock that does not go back.
    """

    def __init__(
        self,
        charter: Charter,
        directory: Directory,
        books: Books,
        watch: Callable[[int, Process], None],
        now_s: float,
    ) -> None:
        self._job, self._terms, self._books, self._watch = charter.job, charter.terms, books, watch
        self._snapshots = Snapshots(charter, directory, books)
        self._members: dict[int, Presence] = {seat: Presence(now_s) for seat in books.state.seats}
        self._departed: deque[Departed] = deque(maxlen=64)
        self._peers: dict[Peer, int] = {}
        self._synced: set[Move] = set()
        self._turned: set[Turn] = set()
        self._partitions = Partitions()
        self._servers_changed = False
        self._short = False
        self._told_orphans = False
        self._ended = False
        self._now_s = now_s
        self._away_s = now_s if books.recovered else -math.inf
        books.event("recovered" if books.recovered else "began", members=sorted(self._members))
        for seat in list(books.state.seats.values()):
            watch(seat.id, seat.process)

    def hear(self, peer: Peer, message: Message, now_s: float) -> None:
        """A message came."""
        self._now_s = now_s
        what, number = message.get("say"), message.get("n", 0)
        if what == "join":
            self._join(peer, message)
            return
        if what == "status":
            peer.send({"answer": number, "status": self.status()})
            return
        if what == "snapshot":
            self._snapshots.begin()
            made = self._books.state.snapshot
            peer.send({"answer": number, "number": made.number if made else None})
            return
        id = self._peers.get(peer)
        if id is None:
            peer.close()
            return
        self._members[id].heard_s = now_s
        self._hear_member(id, what, number, message)

    def _hear_member(self, id: int, what: str | None, number: int, message: Message) -> None:
        presence, books = self._members[id], self._books
        if what == "beat":
            presence.figures = message.get("figures") or presence.figures
            self._answer(id, number)
        elif what == "next":
            presence.asking = (number, self._now_s)
        elif what == "done":
            books.write({"is": "done", "items": message["items"]})
        elif what == "back":
            books.write({"is": "back", "id": id, "items": message["items"]})
        elif what == "synced":
            move = Move(message["shard"], id, message["target"], message["begun"])
            if move in books.state.view.moves:
                self._synced.add(move)
        elif what == "turned":
            turn = Turn(message["shard"], id, message["begun"])
            if turn in books.state.view.turns:
                self._turned.add(turn)
        elif what == "unreached":
            self._part(id, int(message["server"]))
        elif what == "file":
            self._snapshots.written(message["number"], message["shard"], message["name"])
        elif what == "unwritten":
            self._snapshots.failed(message["number"], message["why"])
        elif what == "leave":
            presence.leaving = number
            presence.figures = message.get("figures") or presence.figures
            self._leave(id)
        elif what == "close":
            self.remove(id, "it closed its connection")

    def lose(self, peer: Peer, now_s: float) -> None:
        """A connection ended."""
        self._now_s = now_s
        id = self._peers.pop(peer, None)
        if id is None:
            return
        presence = self._members[id]
        presence.peer = presence.asking = None
        seat = self._books.state.seats[id]
        if not seat.process.visible:
            lately = now_s < self._away_s + self._terms.lease_s  # it may have given this process up, and come back
            presence.until_s = now_s + (1 if lately else _RETURN) * self._terms.lease_s
        elif not seat.process.lives:
            self.remove(id, "its process ended")

    def ended(self, id: int, now_s: float) -> None:
        """A member's process ended."""
        self._now_s = now_s
        if id in self._members:
            self.remove(id, "its process ended")

    def away(self, now_s: float) -> None:
        """This process heard nobody for a while, by its own fault: all have a lease from now on."""
        self._away_s = now_s
        for presence in self._members.values():
            presence.heard_s = now_s
            presence.until_s = None

    def settle(self, now_s: float) -> None:
        """Decide what follows from all that was heard, and write it down; called before anything is sent."""
        self._now_s = now_s
        for id, presence in list(self._members.items()):
            silent_s = now_s - presence.heard_s
            if silent_s > self._terms.lease_s:
                self.remove(id, f"it was silent for {silent_s:.2f} s; a lease is {self._terms.lease_s:g} s")
            elif presence.until_s is not None and now_s > presence.until_s:
                self.remove(id, "its connection ended")
        if self._partitions.expire(now_s) or self._servers_changed or self._synced or self._turned:
            self._renew()
        self._tell_shortage()
        self._answer_questions()
        self._snapshots.finish()
        self._snapshots.begin_due()
        for server, request in self._snapshots.requests().items():
            self._tell(server, request)
        self._tell_orphans()
        self._tell_end()

    def remove(self, id: int, why: str) -> None:
        """A member is gone: its tasks and shards are others'."""
        seat, presence = self._books.state.seats[id], self._members.pop(id)
        self._books.write({"is": "gone", "id": id, "why": why})
        needed = not (self._over or (seat.role is Role.WORKER and self._books.state.tasks.finished))
        name = "gone" if needed and not seat.leaving else "left"
        self._books.event(name, id=id, role=seat.role.value, why=why)
        if name == "left":
            self._departed.append(Departed(seat, self._now_s, presence.figures))
        _LOG.info("%s %d %s: %s", seat.role.value, id, "is gone" if name == "gone" else "left", why)
        self._servers_changed |= seat.role is Role.SERVER
        self._partitions.forget(id)
        if presence.peer is not None:
            del self._peers[presence.peer]
            if presence.leaving is not None:
                presence.peer.send({"answer": presence.leaving})
            else:
                presence.peer.send({"fenced": why})
            presence.peer.close()

    def status(self) -> dict[str, Any]:
        """Return what people want to know; see `Observer.status`."""
        return {
            **described(self._books.state, self._terms, deals=self._deals, saved=self._snapshots.complete),
            "members": [self._members[id].described(seat, self._now_s) for id, seat in self._books.state.seats.items()],
            "left": [one.described() for one in self._departed if self._now_s < one.at_s + _REMEMBERED_S],
        }

    @property
    def _deals(self) -> bool:
        """Whether tasks are dealt: the job has begun, and has enough workers."""
        workers = len(self._books.state.members(Role.WORKER, leaving=False))
        return bool(self._books.state.view.chains) and workers >= self._terms.workers

    @property
    def _over(self) -> bool:
        """Whether views do not matter any more."""
        state = self._books.state
        return bool(state.failed) or (state.tasks.finished and self._snapshots.complete)

    def _join(self, peer: Peer, message: Message) -> None:
        state, nonce = self._books.state, message["nonce"]
        seat = state.seat_of(nonce)
        if seat is None and (nonce in state.gone or message.get("id") is not None):
            why = state.gone.get(nonce, "the coordinator does not know it")
            peer.send({"answer": message.get("n", 0), "fenced": why})
            peer.close()
            return
        new = seat is None
        if seat is None:
            process, address = Process(**message["process"]), Address(**message["address"])
            seat = Seat(state.next_id, Role(message["role"]), nonce, process, address)
            self._books.write({"is": "join", "seat": seat.to_dict()})
            self._books.event("joined", id=seat.id, role=seat.role.value, pid=process.pid, where=process.where)
            _LOG.info("%s %d joined", seat.role.value, seat.id)
            self._members[seat.id] = Presence(self._now_s)
            self._servers_changed |= seat.role is Role.SERVER
        self._attach(seat, peer, message)
        if new:
            self._watch(seat.id, seat.process)

    def _attach(self, seat: Seat, peer: Peer, message: Message) -> None:
        """A member is reached by this connection now; tell it all that it may have missed."""
        state, presence = self._books.state, self._members[seat.id]
        if presence.peer is not None:
            del self._peers[presence.peer]
            presence.peer.close()
        presence.peer, presence.heard_s, presence.until_s, presence.asking = peer, self._now_s, None, None
        self._peers[peer] = seat.id
        holding = message.get("holding", [])
        if set(items_of(holding)) != set(state.tasks.held(seat.id)):
            self._books.write({"is": "agree", "id": seat.id, "items": holding})
        peer.send({"answer": message.get("n", 0), "id": seat.id, "view": state.view.to_dict()})
        if self._told_orphans:
            peer.send({"tell": "orphans", "there": True})
        if self._ended:
            peer.send(self._end())
        for server, request in self._snapshots.requests(seat.id).items():
            self._tell(server, request)

    def _leave(self, id: int) -> None:
        seat = self._books.state.seats[id]
        if not seat.leaving:
            self._books.write({"is": "leave", "id": id})
            self._books.event("leaving", id=id, role=seat.role.value)
        if seat.role is Role.WORKER or self._over or not self._books.state.view.chains:
            self.remove(id, "it left")
        else:
            self._servers_changed = True

    def _part(self, id: int, other: int) -> None:
        """A server says that it does not reach another, with which it has a shard in common."""
        view = self._books.state.view
        if other in view.servers and any(view.successor(shard, id) == other for shard in range(len(view.chains))):
            self._partitions.add(id, other, self._now_s)
            self._books.event("unreached", id=id, server=other)
            _LOG.warning("server %d does not reach server %d: what they shared goes elsewhere", id, other)
            self._servers_changed = True

    def _renew(self) -> None:
        """Make the next view; servers that nothing depends on any more may go."""
        state, synced, turned = self._books.state, frozenset(self._synced), frozenset(self._turned)
        self._servers_changed = False
        self._synced.clear()
        self._turned.clear()
        if self._over:
            return
        servers = state.servers()
        left = self._terms.outlived and state.view.servers.keys().isdisjoint(servers)
        if left or not state.view.chains:
            ready = len(servers) >= self._terms.servers
            view = begun(state.view, servers, self._job) if ready else View(state.view.epoch + 1, servers)
            self._publish(view)
            return
        view = self._next_view(synced, turned)
        free = [seat.id for seat in state.members(Role.SERVER, leaving=True) if may_go(view, seat.id)]
        if free:
            for id in free:
                self.remove(id, "it left")
            self._servers_changed = False
            view = self._next_view(synced, turned)
        if view != state.view:
            self._publish(view)

    def _next_view(self, synced: Collection[Move], turned: Collection[Turn]) -> View:
        state = self._books.state
        return next_view(
            state.view,
            state.servers(),
            self._job,
            leaving=[seat.id for seat in state.members(Role.SERVER, leaving=True)],
            synced=synced,
            turned=turned,
            parted=self._partitions.pairs,
        )

    def _publish(self, view: View) -> None:
        plain = view.to_dict()
        self._books.write({"is": "view", "view": plain})
        said = {name: plain[name] for name in ("chains", "moves", "turns")}
        self._books.event("view", servers=sorted(view.servers), **said)
        for presence in self._members.values():
            if presence.peer is not None:
                presence.peer.send({"tell": "view", "view": plain})
        missing = lost(view) if view.chains else ()
        if missing:
            self._fail(missing)

    def _fail(self, shards: Sequence[int]) -> None:
        whole = [one.number for one in self._books.state.snapshots] or [self._terms.restored]
        why = (
            f"all copies of shards {list(shards)} are lost: the servers that held them are gone. Resume from snapshot "
            f"{whole[-1]}; with a higher replication the death of one server loses nothing."
        )
        self._books.write({"is": "failed", "why": why})
        self._books.event("failed", shards=list(shards), snapshots=whole, why=why)
        _LOG.error("%s", why)

    def _tell_shortage(self) -> None:
        """Say when too few members are there, and when there are enough again."""
        state = self._books.state
        short = not self._deals and not state.tasks.finished
        if short != self._short and not state.failed:
            self._short = short
            numbers = headcount(state, self._terms)
            if short:
                self._books.event("waiting", why=wants(state, self._terms), **numbers)
            else:
                self._books.event("going on", **numbers)

    def _answer_questions(self) -> None:
        tasks, deals = self._books.state.tasks, self._deals
        for id, presence in self._members.items():
            if presence.asking is None:
                continue
            number, since_s = presence.asking
            deal = tasks.choose(id) if deals or tasks.finished else Deal(Order.WAIT)
            if self._books.state.failed:
                deal = Deal(Order.END)
            if deal.order is Order.WAIT and not tasks.held(id) and self._now_s < since_s + _PARK_S:
                continue
            if deal.order in (Order.TASK, Order.EVALUATE):
                self._books.write({"is": "deal", "id": id, "order": deal.order.value, "number": deal.number})
            presence.asking = None
            why = self._books.state.failed
            self._answer(id, number, deal=[deal.order.value, deal.number, deal.alone], why=why)

    def _tell_orphans(self) -> None:
        there = self._books.state.tasks.orphans
        if there != self._told_orphans:
            self._told_orphans = there
            for id in self._members:  # workers are to do them, and servers to let go of reads that wait for them
                self._tell(id, {"tell": "orphans", "there": there})

    def _tell_end(self) -> None:
        """Say once that the job is over, and let go of who waits to leave."""
        if self._over and not self._ended:
            self._ended = True
            if not self._books.state.failed:
                self._books.event("finished", tasks=self._terms.tasks)
            for id in self._members:
                self._tell(id, self._end())
            for seat in self._books.state.members(Role.SERVER, leaving=True):
                self.remove(seat.id, "it left")

    def _end(self) -> Message:
        return {"tell": "end", "why": self._books.state.failed}

    def _answer(self, id: int, number: int, **values: Any) -> None:
        self._tell(id, {"answer": number, **values})

    def _tell(self, id: int, message: Message) -> None:
        peer = self._members[id].peer if id in self._members else None
        if peer is not None:
            peer.send(message)
