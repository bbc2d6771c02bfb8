"""Work of the portable group: what c10d waits for, and the lane in which collectives run one after the other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_NO_LIMIT = timedelta(0)  # what c10d passes where the caller gave no timeout
_LEAVING_S = 2.0


class PortableWork(dist.Work):
    """One collective or message under way.

    Args:
        result: The tensors that hold the result at the end.
        run: Helps until the given work is done, or until the given number of seconds is over.
    """

    def __init__(self, result: Sequence[Tensor], run: Callable[[PortableWork, float | None], None]) -> None:
        super().__init__()
        self._result = list(result)
        self._run = run
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._source = -1
        self._ended: Future[None] | None = None
        self._outcome: Future[list[Tensor]] | None = None

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Say that it is done, or why it failed."""
        with self._lock:
            if self._done:
                return
            self._error, self._source, self._done = error, source, True
            ended = self._ended
        if ended is not None:
            # A callback may wait for a collective that it starts, which our own threads have to run.
            threading.Thread(target=ended.set_result, args=(None,), name="shm-callbacks", daemon=True).start()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return why it failed."""
        return self._error

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when it is done.

        Raises:
            dist.DistBackendError: It failed, or is not done within `timeout` (it goes on then).
        """
        seconds = timeout.total_seconds()
        if not self._done:
            self._run(self, seconds if seconds > 0 else None)
        if not self._done:
            raise dist.DistBackendError(f"shm: not done within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the result."""
        with self._lock:
            if self._outcome is None:
                self._ended = Future()
                # Only an error raised in a callback reaches those who wait in C++, such as DDP.
                self._outcome = self._ended.then(lambda _: self._value())
                if self._done:
                    self._ended.set_result(None)
            return self._outcome

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._result

    def source_rank(self) -> int:
        """Return who sent the message, if this is one that was received."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def synchronize(self) -> None:
        """Return when it is done."""
        self.wait()

    def _value(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result


class Lane:
    """Runs tasks one after the other, in order, on whichever thread is first: its own, or one that waits.

    Args:
        failed: Turns what a task raised into the error to report.
    """

    def __init__(self, failed: Callable[[BaseException], BaseException]) -> None:
        self._failed = failed
        self._state = threading.Condition()
        self._tasks: deque[tuple[PortableWork, Callable[[], None]]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, result: Sequence[Tensor], task: Callable[[], None], at_once: bool) -> PortableWork:
        """Add a task; return when it is done if `at_once`."""
        work = PortableWork(result, self._run_until)
        with self._state:
            if self._is_closed:
                raise dist.DistBackendError("shm: the group was shut down")
            self._tasks.append((work, task))
            if not at_once:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="shm-collectives", daemon=True)
                    self._thread.start()
                self._state.notify_all()
        if at_once:
            self._run_until(work, None)
        return work

    def drain(self, seconds: float) -> None:
        """Return when nothing is left to run, or when time is up."""
        with self._state:
            self._state.wait_for(lambda: not self._tasks and not self._is_busy, seconds)

    def close(self) -> None:
        """Run nothing more. What is running must have been told to end."""
        with self._state:
            self._is_closed = True
            dropped, self._tasks = self._tasks, deque()
            self._state.notify_all()
        for work, _ in dropped:
            work.finish(dist.DistBackendError("shm: the group was shut down"))
        self.drain(_LEAVING_S)

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_closed or (self._tasks and not self._is_busy))
                if self._is_closed:
                    return
                work, task = self._tasks.popleft()
                self._is_busy = True
            self._perform(work, task)
            del work, task  # they hold tensors

    def _run_until(self, wanted: PortableWork, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not wanted.is_completed():
            with self._state:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                # A task takes as long as it takes, so who has a limit leaves it to the thread.
                if left is not None or self._is_busy or not self._tasks:
                    if not wanted.is_completed():
                        self._state.wait(left)
                    continue
                work, task = self._tasks.popleft()
                self._is_busy = True
            self._perform(work, task)

    def _perform(self, work: PortableWork, task: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                task()
        except BaseException as caught:  # an interrupt too: the peers must learn that we do not go on
            error = self._failed(caught)
        work.finish(error)
        with self._state:
            self._is_busy = False
            self._state.notify_all()
