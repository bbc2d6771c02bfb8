"""What a server did, in numbers that all who watch a job understand."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from paceline.exchange.server.replica import Replica


class Figures:
    """Counts updates, and describes replicas.

    Staleness is counted in buckets: 0, 1, 2 to 3, 4 to 7 and so on, each under its lowest value.
    """

    def __init__(self) -> None:
        self._updates = 0
        self._staleness: dict[int, int] = {}
        self._before = (time.monotonic(), 0)

    def applied(self, stalenesses: Iterable[int]) -> None:
        """Count updates."""
        for staleness in stalenesses:
            self._updates += 1
            bucket = 1 << staleness.bit_length() >> 1
            self._staleness[bucket] = self._staleness.get(bucket, 0) + 1

    def of(self, replicas: Iterable[Replica], queued: int, sent_bytes: int, received_bytes: int) -> dict[str, Any]:
        """Return all figures, as plain values for JSON. queued: entries and copies that were not sent yet."""
        now, before = time.monotonic(), self._before
        self._before = (now, self._updates)
        kept = list(replicas)
        return {
            "updates": self._updates,
            "updates_per_s": (self._updates - before[1]) / max(now - before[0], 1e-9),
            "staleness": {str(bucket): count for bucket, count in sorted(self._staleness.items())},
            "queue": queued,
            "lag": max((replica.shard.position - replica.committed for replica in kept), default=0),
            "master_of": sum(replica.place.head for replica in kept),
            "replica_of": sum(not replica.place.head for replica in kept),
            "memory_bytes": sum(replica.shard.memory_bytes for replica in kept),
            "sent_bytes": sent_bytes,
            "received_bytes": received_bytes,
        }
