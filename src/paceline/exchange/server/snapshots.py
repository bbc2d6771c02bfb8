"""Shards on their way to a snapshot: copied between two updates, written while the server goes on."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from functools import partial
from typing import Protocol

from paceline.errors import ExchangeError
from paceline.exchange.membership.member import SnapshotRequest
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.shard.snapshot import Snapshots

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears what became of a request; see `membership.Member`."""

    def snapshot_written(self, number: int, shard: int, name: str) -> None:
        """A shard is in a snapshot; name: of its file there."""
        ...

    def snapshot_failed(self, number: int, why: str) -> None:
        """A snapshot cannot be made."""
        ...


class SnapshotWriter:
    """Writes what is requested, one shard after the other. `run` is for a thread of its own.

    Args:
        keeper: of this server.
        snapshots: where they go.
        listener: is told of what was written.
        settle: has the log of what led there outlive a loss of power, as the snapshot does.
    """

    def __init__(
        self, keeper: Keeper, snapshots: Snapshots, listener: Listener, settle: Callable[[], None] = lambda: None
    ) -> None:
        self._keeper, self._snapshots, self._listener, self._settle = keeper, snapshots, listener, settle
        self._requests: queue.SimpleQueue[SnapshotRequest | None] = queue.SimpleQueue()

    def request(self, request: SnapshotRequest) -> None:
        """Have shards written; returns at once."""
        self._requests.put(request)

    def close(self) -> None:
        """End `run` once the shard that is being written is."""
        self._requests.put(None)

    def run(self) -> None:
        """Write until `close`."""
        while (request := self._requests.get()) is not None:
            for shard in request.shards:
                try:
                    self._write(request, shard)
                except ExchangeError as error:
                    _log.warning("snapshot %d: %s", request.number, error)
                    self._listener.snapshot_failed(request.number, str(error))
                    break

    def _write(self, request: SnapshotRequest, shard: int) -> None:
        number = request.number
        take = partial(self._snapshots.take, number=number)
        taken = self._keeper.captured(shard, request.clock, request.epoch, take)
        if taken is not None:  # else another server answers for it now, and will be asked
            name = self._snapshots.write(taken)
            self._settle()
            self._listener.snapshot_written(number, shard, name)
