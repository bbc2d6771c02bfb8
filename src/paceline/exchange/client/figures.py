"""What a worker counts of its exchange: how much, how old, how long it waited and for which tasks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any


def bucket(staleness: int) -> int:
    """Return the lower end of the bucket of the histogram: 0, 1, 2, 4, 8, ..."""
    return 0 if staleness <= 0 else 1 << (staleness.bit_length() - 1)


class Figures:
    """Counts since the start; threads may add at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._times = {"pull_s": 0.0, "push_s": 0.0, "clock_wait_s": 0.0}
        self._awaited: Counter[int] = Counter()

    def pulled(self, seconds: float, rows: int, waited_s: float) -> None:
        """A read has come. waited_s: of its seconds those in which clocks did not allow it yet."""
        with self._lock:
            self._counts["pulls"] += 1
            self._counts["rows_pulled"] += rows
            self._times["pull_s"] += seconds
            self._times["clock_wait_s"] += waited_s

    def awaited(self, tasks: Iterable[int]) -> None:
        """A read waits for these tasks."""
        with self._lock:
            self._awaited.update(tasks)
            if len(self._awaited) > 256:
                self._awaited = Counter(dict(self._awaited.most_common(64)))

    def pushed(self, seconds: float, rows: int) -> None:
        """A push was sent, after so many seconds in which its worker did nothing else."""
        with self._lock:
            self._counts["pushes"] += 1
            self._counts["rows_pushed"] += rows
            self._times["push_s"] += seconds

    def acknowledged(self, staleness: Iterable[int]) -> None:
        """A push is on all replicas. staleness: of each shard."""
        with self._lock:
            self._staleness.update(map(bucket, staleness))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: counts, seconds, pushes per second, and `staleness`: updates by bucket.

        `awaited` are the tasks that reads waited for most, with how often a server said so.
        """
        with self._lock:
            seconds = max(time.monotonic() - self._began, 1e-9)
            return {
                **{name: self._counts[name] for name in ("pulls", "rows_pulled", "pushes", "rows_pushed")},
                **self._times,
                "pushes_per_s": self._counts["pushes"] / seconds,
                "staleness": {str(low): count for low, count in sorted(self._staleness.items())},
                "awaited": {str(task): count for task, count in self._awaited.most_common(8)},
            }
