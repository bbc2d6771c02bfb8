"""Snapshots: when one is due, who writes what, and when it is whole."""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from typing import Final

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership.books import Books
from paceline.exchange.membership.protocol import Message
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.exchange.terms import Charter

_RETRY_S: Final = 5.0
"""After how long a snapshot that failed is tried again."""


class Snapshots:
    """Snapshots of a job, as the coordinator has them made.

    Args:
        charter: of the job.
        directory: where they are.
        books: the coordinator's.
    """

    def __init__(self, charter: Charter, directory: Directory, books: Books) -> None:
        self._job, self._terms, self._directory, self._books = charter.job, charter.terms, directory, books
        self._asked: dict[int, int] = {}  # who was asked for a shard of this snapshot
        self._not_before_s = 0.0

    @property
    def complete(self) -> bool:
        """Whether there is a snapshot of the end."""
        return self._books.state.snapshot_clock >= self._job.clock(self._terms.tasks)

    def begin_due(self) -> None:
        """Begin a snapshot if one is due."""
        state, every = self._books.state, self._terms.snapshot_every
        clock = state.tasks.clock
        if state.tasks.cuts:
            due = state.tasks.barrier is not None and clock >= state.tasks.barrier
        else:
            due = bool(every) and clock // every > state.snapshot_clock // every
        ended = clock >= self._job.clock(self._terms.tasks) > state.snapshot_clock
        if (due or ended) and time.monotonic() >= self._not_before_s:
            self.begin()

    def begin(self) -> None:
        """Begin a snapshot now, unless there is one in the making, or nothing to be had."""
        state = self._books.state
        if state.snapshot is not None or state.failed or not state.view.chains:
            return
        number = max(state.last_snapshot, *whole_snapshots(self._directory.snapshots), 0) + 1
        self._asked.clear()
        self._books.write({"is": "snapshot", "number": number, "clock": state.tasks.clock, "epoch": state.view.epoch})

    def requests(self, server: int | None = None) -> dict[int, Message]:
        """Return what to tell servers: the shards that are missing, of whose chains they are the tails.

        Args:
            server: has come back: ask it again for all that it is to write.
        """
        snapshot, view = self._books.state.snapshot, self._books.state.view
        wanted: dict[int, list[int]] = defaultdict(list)
        if snapshot is None:
            return {}
        for shard, chain in enumerate(view.chains):
            if chain and shard not in snapshot.files and (self._asked.get(shard) != chain[-1] or chain[-1] == server):
                self._asked[shard] = chain[-1]
                wanted[chain[-1]].append(shard)
        return {
            tail: {
                "tell": "snapshot",
                "number": snapshot.number,
                "clock": snapshot.clock,
                "epoch": view.epoch,
                "shards": shards,
            }
            for tail, shards in wanted.items()
        }

    def written(self, number: int, shard: int, name: str) -> None:
        """A shard is in its file; with the last one the snapshot is complete."""
        state = self._books.state
        snapshot = state.snapshot
        if snapshot is None or snapshot.number != number or not 0 <= shard < self._job.shards:
            return
        self._books.write({"is": "file", "shard": shard, "name": name})
        self.finish()

    def finish(self) -> None:
        """Complete the snapshot whose shards are all written, if there is one."""
        state = self._books.state
        snapshot = state.snapshot
        if snapshot is None or len(snapshot.files) < self._job.shards:
            return
        number = snapshot.number
        first_task = min(snapshot.clock * self._job.pieces, self._terms.tasks)
        manifest = Manifest(number, snapshot.clock, first_task, snapshot.epoch, snapshot.files)
        before = [one.number for one in state.snapshots]
        try:
            manifest.write(self._directory.snapshot(number))
        except ExchangeError as error:
            self.failed(number, str(error))
            return
        self._books.write({"is": "complete", "keep": self._terms.kept_snapshots})
        self._books.event("snapshot", number=number, clock=snapshot.clock, first_task=first_task)
        kept = [one.number for one in state.snapshots]
        self._remove(*(old for old in before if old not in kept))

    def failed(self, number: int, why: str) -> None:
        """A snapshot cannot be made; those before are kept, and it is tried again later."""
        snapshot = self._books.state.snapshot
        if snapshot is not None and snapshot.number == number:
            self._not_before_s = time.monotonic() + _RETRY_S
            self._books.write({"is": "dropped"})
            self._books.event("snapshot failed", number=number, why=why)
            self._remove(number)

    def _remove(self, *numbers: int) -> None:
        """Delete snapshots, large as they may be, while the coordinator goes on."""
        for number in numbers:
            if number not in (0, self._terms.restored):
                path = self._directory.snapshot(number)
                threading.Thread(target=shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}).start()
