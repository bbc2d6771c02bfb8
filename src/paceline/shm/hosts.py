"""Which ranks of a group share a host, and can therefore share memory.

Ranks tell each other through the group's store what their host is; every rank computes the same layout from that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from torch._C._distributed_c10d import Store

from paceline.errors import LaunchError

_BOOT = "/proc/sys/kernel/random/boot_id"
# Processes can open each other's memory (/proc/<pid>/fd) if they see the same processes and are of one user.
_NAMESPACES = ("net", "pid", "user")


def identity() -> str:
    """Return what ranks have in common if, and only if, they can share memory.

    Raises:
        LaunchError: this system does not say.
    """
    try:
        with open(_BOOT, encoding="ascii") as boot:
            parts = [boot.read().strip()]
        parts += [f"{name}:{os.stat(f'/proc/self/ns/{name}').st_ino}" for name in _NAMESPACES]
    except OSError as error:
        raise LaunchError(
            f"which host this is cannot be read: {error}. Ranks share memory on Linux with /proc mounted; elsewhere "
            "choose the gloo backend."
        ) from error
    return " ".join((*parts, f"uid:{os.geteuid()}"))


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a group are, seen by one of them.

    Attributes:
        hosts: the ranks of each host in order; hosts in the order of their first ranks.
        rank: whose view this is.
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or self.rank not in ranks or not all(self.hosts):
            raise LaunchError(
                f"hosts {self.hosts} with rank {self.rank}: each rank from 0 on must be on exactly one host"
            )
        if any(list(host) != sorted(host) for host in self.hosts) or list(self.hosts) != sorted(self.hosts):
            raise LaunchError(f"hosts {self.hosts}: ranks must be in order on a host, and hosts by their first ranks")

    @property
    def size(self) -> int:
        """Return how many ranks the group has."""
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """Return the number of this rank's host."""
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this host."""
        return self.hosts[self.host]

    @property
    def index(self) -> int:
        """Return this rank's number among those of its host."""
        return self.local_ranks.index(self.rank)

    @property
    def leader(self) -> int:
        """Return the rank that speaks for this host."""
        return self.local_ranks[0]

    @property
    def even(self) -> bool:
        """Return whether all hosts have as many ranks."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    @property
    def peers_between(self) -> tuple[int, ...]:
        """Return with whom this rank exchanges between hosts, itself among them: one rank of each host, or nobody.

        On even hosts they are the ranks of the same index, otherwise the leaders.
        """
        if self.even:
            return tuple(ranks[self.index] for ranks in self.hosts)
        return tuple(ranks[0] for ranks in self.hosts) if self.rank == self.leader else ()


def layout(
    store: Store, rank: int, size: int, host: str | None = None, timeout: timedelta = timedelta(minutes=5)
) -> Layout:
    """Agree with the other ranks of a group on who shares a host.

    Args:
        store: of this group alone.
        rank: this rank in the group.
        size: how many ranks the group has; all of them call this.
        host: what this rank's host is called, `identity()` by default. Ranks that give the same share it.
        timeout: how long to wait for the others.

    Raises:
        LaunchError: a rank did not say where it is in time, or what was given cannot be.
    """
    if not 0 <= rank < size:
        raise LaunchError(f"rank {rank} of {size}: ranks are 0 to {size - 1}")
    name = identity() if host is None else host
    if not name:
        raise LaunchError("a host's name must not be empty")
    keys = [f"host/{other}" for other in range(size)]
    store.set(keys[rank], name)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:  # DistStoreError, or what a store of another kind raises
        absent = [other for other in range(size) if not store.check([keys[other]])]
        raise LaunchError(
            f"ranks {absent} of a group of {size} did not say on which host they are: {error}. Every rank of the group "
            "must create it; look whether those started."
        ) from error
    return grouped([one.decode() for one in store.multi_get(keys)], rank)


def grouped(names: Sequence[str], rank: int) -> Layout:
    """Return the layout of ranks whose hosts have these names."""
    hosts: dict[str, list[int]] = {}
    for other, name in enumerate(names):
        hosts.setdefault(name, []).append(other)
    return Layout(tuple(map(tuple, hosts.values())), rank)
