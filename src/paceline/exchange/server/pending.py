"""A push that waits until all its shards are committed, and its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from paceline.exchange.messages import Kind
from paceline.exchange.updates import Applied
from paceline.exchange.wire.frame import Frame


class PendingPush:
    """Gathers what became of a push in its shards; answers once all are on all replicas.

    Args:
        request: its number, which the answer bears.
        shards: how many it is for.
        later: sends the answer without making its caller wait.
    """

    def __init__(self, request: int, shards: int, later: Callable[[Frame], None]) -> None:
        self._request, self._missing, self._later = request, shards, later
        self._numbers: list[int] = []
        self._lock = threading.Lock()
        self._held = True
        self._answer: Frame | None = None
        self._answered = False

    def committed(self, shard: int, applied: Applied) -> None:
        """See `replica.Waiting`."""
        with self._lock:
            self._numbers += (shard, applied.position, applied.staleness)
            self._missing -= 1
            if not self._missing:
                numbers = np.array(self._numbers, dtype=np.int64)
                self._say(Frame(Kind.PUSHED, request=self._request, numbers=numbers))

    def refused(self, why: str) -> None:
        """See `replica.Waiting`."""
        with self._lock:
            self._say(Frame(Kind.REFUSED, request=self._request, text=why))

    def release(self) -> Frame | None:
        """Return the answer if it is known by now: who asks sends it; if not, it is sent when it is known."""
        with self._lock:
            self._held = False
            return self._answer

    def _say(self, frame: Frame) -> None:
        if self._answered:
            return
        self._answered = True
        if self._held:
            self._answer = frame
        else:
            self._later(frame)
