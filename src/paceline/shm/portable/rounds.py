"""Collectives of the portable group: every rank shows bytes, in rounds, and takes what it needs of what all show.

In a round each rank copies a chunk into one half of its staging memory, posts it, waits until all have posted, and
reads. The next round uses the other half: who has posted it has read the one before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.shm.portable.peers import Peers
from paceline.shm.portable.window import Bytes

Shown = Callable[[int, int], Bytes]

_ALIGNMENT = 64
_LONGEST_TEXT = 400


@dataclass(frozen=True)
class Call:
    """One collective as one rank sees it.

    Attributes:
        text: What is called; the same on every rank, or it is an error.
        lanes: The bytes that this rank shows, lane by lane; it may show nothing.
        width: How many lanes a rank may show.
        length: Bytes of the longest lane of any rank, where `table` does not tell.
        take: Takes bytes `lo` to `hi` of lanes; its last argument gives what a rank shows of a lane from `lo` on.
        table: For exchanges of uneven parts: bytes to each rank, then bytes from each rank.
    """

    text: str
    lanes: Sequence[Bytes] = ()
    width: int = 1
    length: int = 0
    take: Callable[[int, int, Shown], None] = lambda lo, hi, shown: None
    table: Sequence[int] = ()


class Rounds:
    """Runs collectives, one after the other."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._count = 1  # connecting was the first round

    def run(self, call: Call, seconds: float) -> None:
        """Run one, at most for the given time.

        Raises:
            dist.DistBackendError: Ranks call different things; one died, left or did not arrive in time. The group is
                broken then.
        """
        peers = self._peers
        peers.check()
        deadline = time.monotonic() + seconds
        own = peers.own
        chunk = own.staging[0].size // call.width // _ALIGNMENT * _ALIGNMENT
        lo, length = 0, call.length
        while True:
            self._count += 1
            half = self._count % 2
            for lane, data in enumerate(call.lanes):
                part = data[lo : lo + chunk]
                own.staging[half][lane * chunk : lane * chunk + part.size] = part
            if lo == 0:
                packed = own.describe(
                    half, _short(call.text), np.array(call.table, np.int64).tobytes() if call.table else b""
                )
            peers.fence()
            own.posted.bump()
            peers.wait(self._count, call.text, deadline)
            if lo == 0:
                length = self._agree(call, half, packed)

            def shown(rank: int, lane: int, half: int = half) -> Bytes:
                return peers.window(rank).staging[half][lane * chunk : (lane + 1) * chunk]

            if length:
                call.take(lo, lo + chunk, shown)
            lo += chunk
            if lo >= length:
                return

    def _agree(self, call: Call, half: int, packed: bytes) -> int:
        """Compare what the ranks call, and return the bytes of the longest lane."""
        windows = [self._peers.window(rank) for rank in range(self._peers.size)]
        if not all(window.says(half, packed) for window in windows):
            calls = [f"{self._peers.name(rank)} calls {window.called(half)}" for rank, window in enumerate(windows)]
            raise self._peers.fail("the ranks call different collectives: " + "; ".join(calls))
        if not call.table:
            return call.length
        tables = np.stack([window.table(half) for window in windows])
        gives, wants = np.split(tables, 2, axis=1)
        for giver, taker in np.argwhere(gives != wants.T):
            raise self._peers.fail(
                f"{call.text}: {self._peers.name(giver)} gives {gives[giver, taker]} bytes to "
                f"{self._peers.name(taker)}, which wants {wants[taker, giver]}"
            )
        return int(gives.max())


def _short(text: str) -> bytes:
    data = text.encode()
    if len(data) <= _LONGEST_TEXT:
        return data
    return data[:_LONGEST_TEXT] + b"... " + hashlib.blake2b(data, digest_size=16).hexdigest().encode()
