"""Threads of which one runs at a time, until it waits for something that the others bring about."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from paceline.errors import ExchangeError


class Ended(BaseException):
    """There is nothing more to do for a replayed worker; no `except Exception` of its loop may swallow that."""


class Runner:
    """Something that runs while it has the baton.

    Args:
        name: in messages.
        work: what it does.
    """

    def __init__(self, name: str, work: Callable[[Runner], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._until: Callable[[], bool] | None = None
        self._ended = self._left = False
        self._mine, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it is through."""
        return self._ended

    @property
    def can_run(self) -> bool:
        """Whether what it waits for has come."""
        return not self._ended and (self._until is None or self._until())

    def wait(self, until: Callable[[], bool]) -> None:
        """Hand over the baton until this is true. By the runner itself. Its random numbers go on where they were.

        Raises:
            Ended: that will never be.
        """
        if until() and not self._left:
            return
        random = torch.get_rng_state()
        self._until = until
        self._back.release()
        self._mine.acquire()
        self._until = None
        if self._left:
            raise Ended
        torch.set_rng_state(random)

    def resume(self) -> None:
        """Let it run until it waits or is through."""
        self._mine.release()
        self._back.acquire()

    def leave(self) -> None:
        """End it: what it waits for will not come."""
        self._left = True
        while not self._ended:
            self.resume()
        self._thread.join()

    def _run(self, work: Callable[[Runner], None]) -> None:
        self._mine.acquire()
        try:
            if not self._left:
                work(self)
        except Ended:
            pass
        except BaseException as error:
            self.error = error
        self._ended = True
        self._back.release()


def run(runners: Sequence[Runner], complete: Callable[[], bool]) -> None:
    """Let runners run in turn until `complete`, or until none can.

    Raises:
        ExchangeError: one of them failed.
    """
    try:
        progress = True
        while progress and not complete():
            progress = False
            for runner in runners:
                if runner.can_run:
                    runner.resume()
                    progress = True
                if runner.error is not None:
                    raise ExchangeError(f"{runner.name} failed in the replay: {runner.error}") from runner.error
    finally:
        for runner in runners:
            runner.leave()
