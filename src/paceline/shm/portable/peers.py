"""The ranks of a portable group: how they meet, whether they are alive, and how to wait for them."""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.shm.portable.window import TOKEN_BYTES, Window, Word

# Asleep, a rank looks this often whether those that it waits for are alive.
_LOOK_S = 0.05
_SPINS = 200
_STORE_PAUSE_S = 0.05


@dataclass(frozen=True)
class _Peer:
    pid: int
    process: int  # a pidfd
    window: Window


class Peers:
    """The ranks of a group, connected: their windows, and whether they are alive.

    Args:
        rank: Ours, within the group.
        global_ranks: For each rank of the group, the number that error messages name.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int], own: Window) -> None:
        self.rank = rank
        self.size = len(global_ranks)
        self.own = own
        self._global_ranks = tuple(global_ranks)
        self._others: dict[int, _Peer] = {}
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 0

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]) -> Peers:
        """Meet the other ranks of this host at the store and map their windows.

        Raises:
            dist.DistBackendError: A rank did not come within the timeout, died, or is not who it should be; or the
                system does not let us share memory.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            file = os.memfd_create("paceline-shm", os.MFD_CLOEXEC)
        except OSError as error:
            raise dist.DistBackendError(f"shm: the system gives no shared memory ({error}); use gloo") from error
        try:
            os.ftruncate(file, Window.size_for(size))
            own = Window(file, size)
            own.sign(token)
            peers = cls(rank, global_ranks, own)
            store.set(f"shm/{rank}", f"{os.getpid()} {file} {token.hex()}")
            for other in range(size):
                if other != rank:
                    peers._meet(store, other, deadline)
            own.posted.bump()
            # Nobody needs the file or what was said in the store any more; a later group may use the same store.
            peers.wait(1, "connecting", deadline)
        finally:
            os.close(file)
        store.delete_key(f"shm/{rank}")
        return peers

    def window(self, rank: int) -> Window:
        """Return the window of a rank, ours too."""
        return self.own if rank == self.rank else self._others[rank].window

    def name(self, rank: int) -> str:
        """Return how messages call a rank."""
        peer = self._others.get(rank)
        return f"rank {self._global_ranks[rank]}" + (f" (pid {peer.pid})" if peer else "")

    def check(self) -> None:
        """Raise if the group is broken."""
        if self._broken is not None:
            raise dist.DistBackendError(f"shm: the group is broken and cannot be used any more: {self._broken}")

    def fail(self, reason: str) -> dist.DistBackendError:
        """Break the group, tell the peers, and return the error to raise."""
        with self._lock:
            if self._broken is None:
                self._broken = reason
                self.own.give_up(reason)
        self.own.posted.wake()
        for peer in self._others.values():
            peer.window.bell.bump()
        return dist.DistBackendError(f"shm: {reason}")

    def failed(self, error: BaseException) -> BaseException:
        """Return the error to report for what was raised in the middle of a collective; the group is broken."""
        if isinstance(error, dist.DistBackendError) and self._broken is not None:
            return error
        broken = self.fail(f"{self.name(self.rank)} stopped: {type(error).__name__}: {error}")
        broken.__cause__ = error
        return broken if isinstance(error, Exception) else error

    def stop(self) -> None:
        """Let nothing more begin, and end what waits for others."""
        with self._lock:
            self._broken = self._broken or "it was shut down"
        self.own.close()

    def close(self) -> None:
        """Leave the group. Only for when no thread uses it any more."""
        for peer in self._others.values():
            os.close(peer.process)

    def fence(self) -> None:
        """Keep what was read and written before from mixing with what comes after, on processors that reorder."""
        for _ in range(2):
            with self._lock:
                pass

    def gone(self, rank: int) -> str | None:
        """Return why a rank will publish no more, or None if it may."""
        if rank == self.rank:
            return None
        peer = self._others[rank]
        failure = peer.window.failure
        if failure is not None:
            return f"{self.name(rank)} gave up: {failure}"
        look = select.poll()
        look.register(peer.process, select.POLLIN)
        ended = bool(look.poll(0))
        if peer.window.is_closed:
            return f"{self.name(rank)} has left the group"
        return f"{self.name(rank)} died" if ended else None

    def doze(self, word: Word, seen: int) -> None:
        """Return when the word is no longer `seen`, or after a short while."""
        for _ in range(self._spins):
            if word.value != seen:
                return
            time.sleep(0)  # lets our other threads run
        word.sleep(seen, _LOOK_S)

    def wait(self, count: int, doing: str, deadline: float) -> None:
        """Return when every rank has posted `count` times (modulo 2**32)."""
        for rank in range(self.size):
            window = self.window(rank)
            while _behind(seen := window.posted.value, count):
                self.doze(window.posted, seen)
                if _behind(window.posted.value, count):
                    self._give_up_on(count, doing, deadline)
            if rank != self.rank and window.failure is not None:
                # It posted, but did not wait for us.
                raise self.fail(f"{doing}: {self.gone(rank)}")
        self.fence()

    def _give_up_on(self, count: int, doing: str, deadline: float) -> None:
        """Raise if one of those that have not posted never will, or if time is up."""
        self.check()
        late = time.monotonic() > deadline
        missing = [rank for rank in range(self.size) if _behind(self.window(rank).posted.value, count)]
        for rank in missing:
            reason = self.gone(rank)
            # It may have posted right before it went.
            if reason is not None and _behind(self.window(rank).posted.value, count):
                raise self.fail(f"{doing}: {reason}")
        if late and missing:
            names = ", ".join(self.name(rank) for rank in missing)
            raise self.fail(f"{doing}: {names} did not arrive before the timeout")

    def _meet(self, store: Store, rank: int, deadline: float) -> None:
        key = f"shm/{rank}"
        pause = 0.001
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise self.fail(f"connecting: {self.name(rank)} did not arrive before the timeout")
            for other in self._others:
                if reason := self.gone(other):
                    raise self.fail(f"connecting: {reason}")
            time.sleep(pause)
            pause = min(2 * pause, _STORE_PAUSE_S)
        said = bytes(store.get(key))
        try:
            pid, file, token = said.decode().split(" ")
            self._others[rank] = _open(int(pid), int(file), bytes.fromhex(token), self.size)
        except (OSError, ValueError) as error:
            raise self.fail(f"connecting: cannot open the memory of {self.name(rank)}, {said!r}: {error}") from error


def _behind(value: int, count: int) -> bool:
    return (value - count) % 2**32 >= 2**31


def _open(pid: int, file: int, token: bytes, size: int) -> _Peer:
    """Map a peer's window. The process is held first: whoever has its number and its token is the peer."""
    process = os.pidfd_open(pid)
    opened = None
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(opened)
        if status.st_uid != os.geteuid():
            raise ValueError(f"it belongs to user {status.st_uid}, not to us")
        if status.st_size != Window.size_for(size):
            raise ValueError(f"it has {status.st_size} bytes, not {Window.size_for(size)}")
        window = Window(opened, size)
        if not window.is_signed(token):
            raise ValueError("it does not hold the token that was given out")
    except BaseException:  # an interrupt too: the descriptor is nobody else's
        os.close(process)
        raise
    finally:
        if opened is not None:
            os.close(opened)
    return _Peer(pid, process, window)
