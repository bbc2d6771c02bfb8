"""The processes of a job, as the one that forks them tells of them: which there are, and how each ended.

Signals go to whole sessions, as what a rank starts is to end with it. Knows nothing of why a rank ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from paceline.runtime.job.worker import WORD, command


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        at: when, in seconds since the epoch.
        code: its exit code, negative where a signal ended it.
    """

    at: float
    code: int


class Processes:
    """Ranks and what became of them; up to date after `poll`."""

    def __init__(self, entry: str, size: int, variables: Mapping[str, str]) -> None:
        """Start them: they inherit stdin, stdout and stderr, of which all but rank 0 let go."""
        self._size = size
        self._pids: dict[int, int] = {}
        self._sent: int | None = None  # to all ranks, also those that we have not heard of yet
        self.ended: dict[int, End] = {}
        self._word, theirs = os.pipe()
        os.set_blocking(self._word, False)
        self._unread = b""
        try:
            self._parent = subprocess.Popen(
                command(entry),
                env={key: value for key, value in variables.items() if key not in ("RANK", "LOCAL_RANK")}
                | {WORD: str(theirs)},
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C at the terminal is ours to pass on
            )
        except BaseException:
            os.close(self._word)
            raise
        finally:
            os.close(theirs)

    def poll(self) -> None:
        """Hear what happened since."""
        gone = self._parent.poll()  # before its words are read: all that it said is there then
        for line in self._lines():
            match line.split():
                case ["started", rank, pid]:
                    self._pids[int(rank)] = int(pid)
                    if self._sent is not None:
                        _signal_session(int(pid), self._sent)
                case ["ended", rank, code, at]:
                    self._end(int(rank), End(float(at), int(code)))
        if gone is not None:  # its children end with it
            for left in self.running:
                self._end(left, End(time.time(), gone or 1))

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._size) if rank not in self.ended]

    def send(self, number: int) -> None:
        """Send a signal to every rank, and to what it started."""
        self.poll()
        self._sent = number
        if len(self._pids) < self._size:  # it may still be loading what ranks need
            _signal_session(self._parent.pid, number)
        for rank in self.running:
            if rank in self._pids:
                _signal_session(self._pids[rank], number)

    def ask(self, rank: int, number: int) -> None:
        """Send a signal to a rank alone."""
        if rank in self._pids and rank not in self.ended:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def close(self) -> None:
        """Wait for the end of all of them, who have been told."""
        self._parent.wait()
        self.poll()
        os.close(self._word)

    def _lines(self) -> list[str]:
        while True:
            try:
                read = os.read(self._word, 1 << 16)
            except BlockingIOError:
                break
            if not read:
                break
            self._unread += read
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode() for line in lines]

    def _end(self, rank: int, end: End) -> None:
        self.ended[rank] = end
        if rank in self._pids:
            _signal_session(self._pids[rank], signal.SIGKILL)  # children that it left


def _signal_session(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(leader, number)
