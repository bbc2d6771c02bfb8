"""What the coordinator knows and must not forget. It changes by records only, so that replaying them gives it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership.seats import Role, Seat
from paceline.exchange.membership.store import Record
from paceline.exchange.membership.tasks import Item, Tasks
from paceline.exchange.terms import Charter
from paceline.exchange.view import Address, View


def listed(items: Iterable[Item]) -> list[list[Any]]:
    """Return tasks and evaluations for JSON."""
    return [[order.value, number] for order, number in items]


def items_of(values: Iterable[Any]) -> list[Item]:
    """Read what `listed` wrote."""
    return [(Order(order), int(number)) for order, number in values]


@dataclass
class Snapshot:
    """A snapshot in the making, or made.

    Attributes:
        number: its directory.
        clock: all tasks of clocks below are in it.
        epoch: in which it was asked for.
        files: what was written, by shard.
    """

    number: int
    clock: int
    epoch: int
    files: dict[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "files": {str(shard): name for shard, name in self.files.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(**{**values, "files": {int(shard): name for shard, name in values["files"].items()}})


class State:
    """Who is there, who holds what, what is done.

    Attributes:
        view: the newest.
        seats: members, by id.
        gone: why those that are no more are gone, by nonce.
        next_id: of the next member.
        tasks: of the job.
        failed: why the job cannot go on; empty while it can.
        last_snapshot: number of the last that was begun, complete or not.
        snapshot: in the making.
        snapshots: complete ones that are still there; oldest first.
        snapshot_clock: of the last complete one.
    """

    def __init__(self, charter: Charter, *, next_id: int = 1, view: View | None = None) -> None:
        self._charter = charter
        self.view = view or View()
        self.seats: dict[int, Seat] = {}
        self.gone: dict[str, str] = {}
        self.next_id = next_id
        self.tasks = Tasks(charter.job, charter.terms)
        self.failed = ""
        self.last_snapshot = charter.terms.restored
        self.snapshot: Snapshot | None = None
        self.snapshots: list[Snapshot] = []
        self.snapshot_clock = charter.job.clock(charter.terms.first_task)
        self._wait_for_snapshot_after(self.snapshot_clock)
        self._kinds: Mapping[str, Callable[..., None]] = {
            "join": self._join,
            "leave": self._leave,
            "gone": self._gone,
            "view": self._view,
            "deal": self._deal,
            "done": self._done,
            "back": self._back,
            "agree": self._agree,
            "failed": self._fail,
            "snapshot": self._begin_snapshot,
            "file": self._file,
            "complete": self._complete,
            "dropped": self._drop_snapshot,
            "anew": self._anew,
            "state": self._restore,
        }

    @classmethod
    def of(cls, charter: Charter, records: Iterable[Record]) -> Self:
        """Return what the records tell."""
        state = cls(charter)
        for record in records:
            state.apply(record)
        return state

    def apply(self, record: Record) -> None:
        """Change as a record says."""
        self._kinds[record["is"]](**{name: value for name, value in record.items() if name != "is"})

    def to_record(self) -> Record:
        """Return one record that tells all."""
        return {
            "is": "state",
            "view": self.view.to_dict(),
            "seats": [seat.to_dict() for seat in self.seats.values()],
            "gone": self.gone,
            "next_id": self.next_id,
            "tasks": self.tasks.to_dict(),
            "failed": self.failed,
            "last_snapshot": self.last_snapshot,
            "snapshot": self.snapshot and self.snapshot.to_dict(),
            "snapshots": [one.to_dict() for one in self.snapshots],
            "snapshot_clock": self.snapshot_clock,
        }

    def members(self, role: Role, *, leaving: bool | None = None) -> list[Seat]:
        """Return the members of a role; only those that leave, or do not, if asked."""
        return [s for s in self.seats.values() if s.role is role and (leaving is None or s.leaving is leaving)]

    def servers(self) -> dict[int, Address]:
        """Return where servers listen."""
        return {seat.id: seat.address for seat in self.members(Role.SERVER)}

    def seat_of(self, nonce: str) -> Seat | None:
        """Return the member of a nonce."""
        return next((seat for seat in self.seats.values() if seat.nonce == nonce), None)

    def _join(self, seat: Mapping[str, Any]) -> None:
        made = Seat.from_dict(seat)
        self.seats[made.id] = made
        self.next_id = max(self.next_id, made.id + 1)

    def _leave(self, id: int) -> None:
        self.seats[id] = replace(self.seats[id], leaving=True)

    def _gone(self, id: int, why: str) -> None:
        seat = self.seats.pop(id)
        self.gone[seat.nonce] = why
        self.tasks.drop(id)

    def _view(self, view: Mapping[str, Any]) -> None:
        self.view = View.from_dict(view)

    def _deal(self, id: int, order: str, number: int) -> None:
        self.tasks.deal(id, Deal(Order(order), number))

    def _done(self, items: list[Any]) -> None:
        self.tasks.done(items_of(items))

    def _back(self, id: int, items: list[Any]) -> None:
        self.tasks.put_back(id, items_of(items))

    def _agree(self, id: int, items: list[Any]) -> None:
        self.tasks.agree(id, items_of(items))

    def _fail(self, why: str) -> None:
        self.failed = why

    def _begin_snapshot(self, number: int, clock: int, epoch: int) -> None:
        self.snapshot = Snapshot(number, clock, epoch)
        self.last_snapshot = number

    def _file(self, shard: int, name: str) -> None:
        if self.snapshot is not None:
            self.snapshot.files[shard] = name

    def _complete(self, keep: int) -> None:
        if self.snapshot is not None:
            self.snapshots = [*self.snapshots, self.snapshot][-keep:]
            self.snapshot_clock = self.snapshot.clock
            self.snapshot = None
            self._wait_for_snapshot_after(self.snapshot_clock)

    def _drop_snapshot(self) -> None:
        self.snapshot = None
        self._wait_for_snapshot_after(self.tasks.clock)  # training does not stop for want of room on a disk

    def _wait_for_snapshot_after(self, clock: int) -> None:
        """Let tasks wait for the next snapshot that is due after this clock."""
        every = self._charter.terms.snapshot_every
        self.tasks.barrier = (clock // every + 1) * every if every else None

    def _anew(self) -> None:
        """The job begins from the snapshot of its terms; ids and epochs go on, so that no log has two of one."""
        nobody = View(self.view.epoch + 1)
        fresh = State(self._charter, next_id=self.next_id, view=nobody)
        fresh.last_snapshot = max(self.last_snapshot, fresh.last_snapshot)
        fresh.snapshots = self.snapshots
        fresh.gone = self.gone | {seat.nonce: "the job began anew" for seat in self.seats.values()}
        vars(self).update({name: value for name, value in vars(fresh).items() if name != "_kinds"})

    def _restore(self, tasks: Mapping[str, Any], **values: Any) -> None:
        self.view = View.from_dict(values["view"])
        self.seats = {seat["id"]: Seat.from_dict(seat) for seat in values["seats"]}
        self.gone, self.next_id, self.failed = dict(values["gone"]), values["next_id"], values["failed"]
        self.tasks.restore(tasks)
        self.last_snapshot, self.snapshot_clock = values["last_snapshot"], values["snapshot_clock"]
        self.snapshot = Snapshot.from_dict(values["snapshot"]) if values["snapshot"] else None
        self.snapshots = [Snapshot.from_dict(one) for one in values["snapshots"]]
