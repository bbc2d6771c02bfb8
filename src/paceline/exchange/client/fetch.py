"""Reads beside the computation: a thread of its own, with connections of its own, does what is begun one by one."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.errands import Errands
from paceline.exchange.client.pulls import Pull
from paceline.exchange.interface import Interrupted, Pending
from paceline.exchange.membership.member import Fenced

_DEPTH: Final = 3
"""Reads that servers are asked for at once: the next is there when they have answered one."""
_SOON_S: Final = 0.02
_GROUP_BYTES: Final = 4 << 20
"""Of tensors that are read together when they are read in order."""


class Fetch:
    """A read that was begun; see `interface.Pending`.

    Args:
        settle: called once where waiting takes longer: nothing of this worker may be left undone meanwhile.
        drain: called before it is told that a read gave way: returns when none is under way.
        taken: called when it counts as read.
    """

    def __init__(
        self, pull: Pull, settle: Callable[[], None], drain: Callable[[], None], taken: Callable[[Pull], None]
    ) -> None:
        self.pull = pull
        self._settle, self._drain, self._taken = settle, drain, taken
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._waited = False

    @property
    def ended(self) -> bool:
        """Whether it has come, or will not."""
        return self._ended.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """It has come, or will not."""
        self._error = error
        self._ended.set()

    def come(self) -> None:
        """Return when it has come, or will not."""
        if not self._ended.wait(_SOON_S):
            self._settle()
            self._ended.wait()

    def wait(self) -> None:
        """See `interface.Pending`."""
        self.come()
        if isinstance(self._error, Interrupted):
            self._drain()
            raise Interrupted
        if isinstance(self._error, Fenced):  # as any other question would say
            raise Fenced(str(self._error)) from self._error
        if self._error is not None:
            raise ExchangeError(f"a read ahead failed: {self._error}") from self._error
        if not self._waited:
            self._waited = True
            self._taken(self.pull)


class Fetcher:
    """Does reads in the order in which they are begun.

    Args:
        errands: over links that nobody else uses.
        finish: finishes a read with them, and writes it down.
    """

    def __init__(self, errands: Errands, finish: Callable[[Errands, Pull], None]) -> None:
        self._errands, self._finish = errands, finish
        self._queue: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._begun: list[Fetch] = []  # since the last that was known to have ended; of the worker's thread
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
        self._thread.start()

    def begin(self, fetch: Fetch) -> None:
        """Begin a read."""
        self._begun = [held for held in self._begun if not held.ended] + [fetch]
        self._queue.put(fetch)

    def drain(self) -> None:
        """Return when no read is under way; those that have to wait, maybe for this very worker, give way."""
        self._errands.hurry = True
        for fetch in self._begun:
            fetch.come()
        self._begun = []
        self._errands.hurry = False

    def close(self) -> None:
        """Return when the thread has ended; links are closed by then, so that it waits for nobody."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        begun: deque[Fetch] = deque()
        while True:
            while len(begun) < _DEPTH and not (begun and self._queue.empty()):
                fetch = self._queue.get()
                if fetch is None:
                    for left in begun:
                        left.end(ExchangeError("the exchange was closed."))
                    return
                begun.append(fetch)
                self._try(fetch, lambda fetch: self._errands.begin(fetch.pull))
            fetch = begun.popleft()
            if self._try(fetch, lambda fetch: self._finish(self._errands, fetch.pull)):
                fetch.end()

    @staticmethod
    def _try(fetch: Fetch, do: Callable[[Fetch], None]) -> bool:
        try:
            do(fetch)
        except Exception as error:  # told to who waits for it
            fetch.end(error)
            return False
        return True


class Arriving:
    """Tables that are read in order; see `interface.Arrivals`."""

    def __init__(self, pending: Mapping[int, Pending]) -> None:
        self._pending = pending

    def wait(self, table: int) -> None:
        """See `interface.Arrivals`."""
        self._pending[table].wait()


def in_order(
    fetch: Callable[[Sequence[int], Sequence[Tensor]], Pending], tables: Sequence[int], out: Sequence[Tensor]
) -> Arriving:
    """Begin to read tables one after the other, small ones together."""
    pending: dict[int, Pending] = {}
    group: list[int] = []
    for index in range(len(tables)):
        group.append(index)
        size = sum(out[i].nbytes for i in group)
        if size >= _GROUP_BYTES or index == len(tables) - 1:
            begun = fetch([tables[i] for i in group], [out[i] for i in group])
            pending |= {tables[i]: begun for i in group}
            group = []
    return Arriving(pending)
