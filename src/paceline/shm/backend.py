"""What `init_process_group("shm")` and `new_group` call: it finds out who shares a host, and how ranks can exchange.

All ranks of a group decide the same, from what each of them put into the group's store.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo, Store

from paceline.errors import LaunchError
from paceline.shm import build
from paceline.shm.hosts import Layout, layout
from paceline.shm.portable import PortableGroup

BACKEND = "shm"
CHOICE = "PACELINE_SHM"
"""Environment variable: `native` or `portable` allow one implementation only."""

_NATIVE, _PORTABLE = "native", "portable"
_MOST_ADDRESSES = 1 << 40  # of an arena: a process maps those of all its peers, and addresses have 47 bits


def unavailable() -> str | None:
    """Return why ranks cannot share memory on this system; None if they can."""
    if sys.platform != "linux":
        return f"ranks share memory on Linux, and this is {sys.platform}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        return f"this Python does not know {' and '.join(missing)}"
    if not os.path.exists("/proc/self/fd"):
        return "/proc is not mounted"
    return None


def describe(group: dist.ProcessGroup) -> str:
    """Return how the ranks of a group exchange tensors on CPUs, in words for people."""
    if isinstance(group, PortableGroup):
        return "shared memory (in pure Python)"
    backend = group._get_backend(torch.device("cpu"))
    if isinstance(backend, ProcessGroupGloo):
        return "gloo"
    return "shared memory" if backend.name() == BACKEND else "shared memory on each host, gloo between hosts"


def create(options: Any, _: object) -> Backend | dist.ProcessGroup:
    """Make one rank's part of a group, as `Backend.register_backend` wants it.

    Args:
        options: torch's `_DistributedBackendOptions`.
    """
    size = options.group_size
    names = list(options.global_ranks_in_group) or list(range(size))
    seat = _Seat(options.store, options.group_rank, size, options.timeout, names)
    means = _means()
    common = seat.agree(means.name)
    if common not in (_NATIVE, _PORTABLE):
        seat.warn(f"ranks exchange through gloo: {common}")
        return seat.gloo(seat.store)
    places = layout(PrefixStore("hosts", seat.store), seat.rank, seat.size, timeout=seat.timeout)
    together = len(places.hosts) == 1
    if common == _PORTABLE and not together:
        seat.warn(
            f"ranks exchange through gloo: shared memory within hosts is native, {means.lack or 'not on all ranks'}"
        )
        return seat.gloo(seat.store)
    if common == _PORTABLE:
        if means.lack is not None:
            seat.warn(f"ranks exchange through shared memory in pure Python, slower than it could be: {means.lack}")
        group: dist.ProcessGroup = PortableGroup(seat.store, seat.rank, seat.size, seat.timeout, seat.names)
        return group
    if together:
        return _connect(build.native(), seat)
    if all(len(ranks) == 1 for ranks in places.hosts):
        return seat.gloo(seat.store)
    return _connect_hosts(build.native(), seat, places)


@dataclass(frozen=True)
class _Means:
    """How this rank could exchange.

    Attributes:
        name: native, portable, or why it cannot share memory at all.
        lack: why there is no native part, where one was wanted.
    """

    name: str
    lack: str | None = None


def _means() -> _Means:
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", _NATIVE, _PORTABLE):
        raise LaunchError(f"{CHOICE} is '{choice}'; it is {_NATIVE}, {_PORTABLE}, or not set.")
    reason = unavailable()
    if reason is not None:
        return _Means(reason)
    if choice == _PORTABLE:
        return _Means(_PORTABLE)
    try:
        build.native()
    except build.BuildError as error:
        if choice == _NATIVE:
            raise LaunchError(f"{CHOICE} is {_NATIVE}, and the native part cannot be built here: {error}.") from error
        return _Means(_PORTABLE, lack=str(error))
    return _Means(_NATIVE)


@dataclass(frozen=True)
class _Seat:
    """A rank's place in a group that is being made. `names`: what the group's ranks are called in the whole job."""

    store: Store
    rank: int
    size: int
    timeout: timedelta
    names: list[int]

    def within(self, ranks: tuple[int, ...], name: str) -> _Seat:
        """Return the seat in a part of the group."""
        store = PrefixStore(f"{name}/{ranks[0]}", self.store)
        return _Seat(store, ranks.index(self.rank), len(ranks), self.timeout, [self.names[rank] for rank in ranks])

    def exchange(self, key: str, value: str) -> list[str]:
        """Return what every rank gives."""
        self.store.set(f"{key}/{self.rank}", value)
        return [self.store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    def agree(self, means: str) -> str:
        """Return the means that all ranks have: native, portable, or a reason why there are none."""
        all_means = self.exchange("means", means)
        reasons = [means for means in all_means if means not in (_NATIVE, _PORTABLE)]
        if reasons:
            return reasons[0]
        return _PORTABLE if _PORTABLE in all_means else _NATIVE

    def gloo(self, store: Store) -> ProcessGroupGloo:
        """Return a Gloo group of these ranks."""
        return ProcessGroupGloo(PrefixStore("gloo", store), self.rank, self.size, self.timeout)

    def warn(self, text: str) -> None:
        """Say it once in a job."""
        if self.names[self.rank] == 0:
            warnings.warn(f"paceline: {text}", RuntimeWarning, stacklevel=2)


@dataclass(frozen=True)
class _Arena:
    """This process's memory that its peers can read; it lasts as long as the process."""

    fd: int
    native: Any


@cache
def _arena(module: ModuleType) -> _Arena:
    fd = os.memfd_create("paceline-arena", os.MFD_CLOEXEC)
    size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _MOST_ADDRESSES)
    os.ftruncate(fd, size)  # addresses; memory comes with use
    return _Arena(fd, module.Arena(fd, size))


def _connect(module: ModuleType, seat: _Seat) -> Backend:
    """Make a group of ranks on one host: each opens the others' memory, which only their own user can."""
    arena = _arena(module)
    token = secrets.token_bytes(8)
    own = os.memfd_create("paceline-window", os.MFD_CLOEXEC)
    try:
        os.ftruncate(own, module.window_bytes(seat.size))
        os.pwrite(own, token, 0)
        mine = {"pid": os.getpid(), "window": own, "arena": arena.fd, "token": token.hex()}
        all_ranks = [json.loads(text) for text in seat.exchange("memory", json.dumps(mine))]
        peers = [(*_open(rank, name), rank["pid"], name) for rank, name in zip(all_ranks, seat.names, strict=True)]
        group: Backend = module.create_group(seat.rank, peers, arena.native, seat.timeout)
        module.barrier(group)  # everybody has opened everything
    finally:
        os.close(own)
    return group


def _open(rank: dict[str, Any], name: int) -> tuple[int, int, int]:
    """Return file descriptors of a rank's window, arena and process."""
    process = f"/proc/{rank['pid']}/fd"
    try:
        alive = os.pidfd_open(rank["pid"])
        window = os.open(f"{process}/{rank['window']}", os.O_RDWR | os.O_CLOEXEC)
        arena = os.open(f"{process}/{rank['arena']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(
            f"the memory of rank {name} (process {rank['pid']}) cannot be opened: {error.strerror}. It has died, or "
            "this system keeps processes of one user from each other; then choose the backend gloo."
        ) from error
    if os.pread(window, 8, 0).hex() != rank["token"]:
        raise LaunchError(f"process {rank['pid']} is not rank {name}, which has died.")
    return window, arena, alive


def _connect_hosts(module: ModuleType, seat: _Seat, places: Layout) -> Backend:
    """Make a group that spans hosts: shared memory on each, Gloo between them."""
    local = _connect(module, seat.within(places.local_ranks, "host"))
    between = None
    if places.peers_between:
        part = seat.within(places.peers_between, "between")
        between = part.gloo(part.store)
    flat = seat.gloo(PrefixStore("flat", seat.store))
    backend: Backend = module.hierarchy(
        seat.rank,
        hosts=places.hosts,
        local=local,
        between=between,
        flat=flat,
        store=seat.store,
        global_ranks=seat.names,
        timeout=seat.timeout,
    )
    return backend
